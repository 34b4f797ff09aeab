"""Commands that show and check configs, manifests and this machine."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from argolocal.cli.options import (
    NonEmptyPath,
    make_output_option,
    make_parameters_option,
    parse_parameter_options,
)
from argolocal.common import homes
from argolocal.common.json_text import to_json
from rekindle.cli.group import command
from rekindle.cli.options import (
    Target,
    cluster_flag,
    cluster_options,
    config_options,
    manifest_options,
    no_cache_option,
)
from rekindle.cli.output import print_checks, print_manifest
from rekindle.cli.sources import Source, check_paths, check_training
from rekindle.cluster.kubernetes_api import Cluster
from rekindle.errors import write_stderr

if TYPE_CHECKING:
    from argolocal.validate.findings import Finding
    from rekindle.blocks.manifest.render import Kind

# exit code of `plan` if at least one task would run
WOULD_RUN_EXIT_CODE = 10


@command
@config_options
@click.option(
    "--kind",
    type=click.Choice(["workflow", "template", "cron"]),
    default="workflow",
    show_default=True,
    help="Kind of the object: Workflow, WorkflowTemplate or CronWorkflow.",
)
@make_output_option("yaml", "json")
def render(source: Source, kind: "Kind", as_json: bool) -> None:
    """Print the Argo manifest of a config.

    The command needs neither a cluster nor a network.

    Example:
      rekindle render configs/demo.yaml | kubectl create -f -
      rekindle render configs/demo.yaml --kind cron -o json
    """
    from rekindle.blocks.manifest.render import render_manifest

    print_manifest(render_manifest(source.load().config, kind), as_json)


@command
@config_options
@click.option(
    "--explain",
    "key",
    metavar="KEY",
    help="Key or section to describe: its values, default and meaning.",
)
@make_output_option("text", "json")
def config(source: Source, key: str | None, as_json: bool) -> None:
    """Show each value of a config and its origin, or explain a key.

    Precedence: --set, the environment (REKINDLE_TRAIN__WORKERS=3), the file, the default. With
    --explain, CONFIG is needed only for keys that a workload or a pipeline of your own adds.

    Example:
      rekindle config configs/demo.yaml --set train.workers=3
      rekindle config --explain train.schedule
    """
    if key is not None:
        return _explain(source, key, as_json)

    loaded_config = source.load()
    check_paths(loaded_config.config)
    config_rows = list(loaded_config.rows())

    if as_json:
        values_by_path = {
            path: {"value": value, "origin": value_origin}
            for path, value, value_origin in config_rows
        }
        click.echo(to_json(values_by_path, indent=2))
        return

    path_width = max(len(path) for path, _, _ in config_rows)
    for path, value, value_origin in config_rows:
        value_text = value if isinstance(value, str) else to_json(value)
        click.echo(f"{path:{path_width}}  {value_text:24}  {value_origin}")


def _explain(source: Source, key: str, as_json: bool) -> None:
    from rekindle.blocks.manifest.config import describe_keys

    described_settings = describe_keys(key, source.load() if source.config else None)
    if as_json:
        click.echo(to_json([setting._asdict() for setting in described_settings], indent=2))
        return

    for setting in described_settings:
        default_text = ""
        if setting.default is not None:
            default_text = f"  (default: {to_json(setting.default)})"

        click.echo(f"{setting.key}: {setting.values}{default_text}")
        click.echo(f"    {setting.description}")


@command
@click.argument("configs", nargs=-1, type=NonEmptyPath())
@click.option(
    "--set", "sets", multiple=True, metavar="A.B=C", help="Value to override in each config."
)
@click.option(
    "--manifest",
    "manifests",
    multiple=True,
    metavar="FILE",
    type=NonEmptyPath(),
    help="File or folder with Argo or Kubernetes objects (YAML or JSON).",
)
@click.option(
    "--cluster",
    is_flag=True,
    help=(
        "Also compare the pods with the queues and quotas of Kueue on a cluster; implied by"
        " --namespace and --context."
    ),
)
@cluster_options
@make_output_option("text", "json")
def lint(
    configs: tuple[Path, ...],
    sets: tuple[str, ...],
    manifests: tuple[Path, ...],
    cluster: bool,
    target: Target,
    as_json: bool,
) -> int:
    """Find errors in workloads and manifests before a run.

    A config's workload is tried on the first rows of its data, as by `rekindle check`; the result
    is remembered until the code or the settings change. References to WorkflowTemplates in the
    given files are checked too. Exit codes: 0 no errors (there may be warnings), 1 errors, 2 bad
    usage or config.

    Example:
      rekindle lint configs/demo.yaml
      rekindle lint --manifest workflow.yaml --manifest templates/ -o json
      rekindle lint configs/cluster.yaml --cluster -n models
    """
    from argolocal.cli import print_findings
    from argolocal.manifest.read import ManifestDocuments
    from argolocal.manifest.shape import find_shape_errors
    from rekindle.blocks.settings import DEFAULT_IMAGE

    if not configs and not manifests:
        raise click.UsageError("give a config file, such as configs/demo.yaml, or --manifest FILE.")

    lint_documents = ManifestDocuments(
        [(str(file), _render_trainable(file, sets)) for file in configs]
    )
    for path in manifests:
        lint_documents.add(path)

    # omit the warning about the default image, which matters only for `submit`, and which `submit`
    # prints
    default_warning = f'"{DEFAULT_IMAGE}" can change'
    rendered_files = {str(file) for file in configs}

    queue_findings: list[Finding] = []
    for file, manifest in lint_documents.objects:
        if any(find_shape_errors(manifest)):
            continue
        _print_unqueued_steps(file, manifest)
        if cluster or target.namespace or target.context:
            queue_findings += _find_queue_problems(file, manifest, target)

    return print_findings(
        lint_documents,
        as_json,
        lambda finding: (
            finding.file not in rendered_files or not finding.message.startswith(default_warning)
        ),
        queue_findings,
    )


def _print_unqueued_steps(file: str, manifest: dict[str, Any]) -> None:
    """Print a note if some pods of a manifest do not wait in a queue, although others do."""
    from rekindle.cluster.kueue.queued_jobs import list_unqueued_steps, read_templates

    unqueued_steps = list_unqueued_steps(read_templates(manifest))
    if unqueued_steps:
        write_stderr(
            f"note: {file}: the pods of {', '.join(unqueued_steps)} do not wait in the queue of"
            " the other pods (daemons and the kinds in cluster.unqueued)"
        )


def _find_queue_problems(file: str, manifest: dict[str, Any], target: Target) -> list["Finding"]:
    """Compare the pods of a manifest with the queues and quotas of Kueue on a cluster."""
    from argolocal.validate.findings import Finding
    from rekindle.cluster.kueue.admission import check_admission
    from rekindle.cluster.kueue.queued_jobs import list_queued_jobs, read_templates

    queued_jobs = list_queued_jobs(read_templates(manifest))
    if not queued_jobs:
        return []

    namespace = (manifest.get("metadata") or {}).get("namespace") or ""
    return [
        Finding(file, "spec.templates", "queue", str(finding), finding.is_fatal)
        for finding in check_admission(target.connect(namespace), queued_jobs)
    ]


def _render_trainable(file: Path, set_flags: tuple[str, ...]) -> dict[str, Any]:
    """Return the manifest of a config. Raises ConfigError if the workload of the config cannot be
    trained."""
    rendered_manifests = Source(file, set_flags).manifests()
    check_training(rendered_manifests.config)
    return rendered_manifests.main


@command
@config_options
@click.option(
    "--rows",
    type=click.IntRange(0),
    default=1000,
    show_default=True,
    help="Number of rows to use, from the start of the data; 0: all rows.",
)
@make_parameters_option("End of a moving window, instead of the current time: scheduled-time=TIME.")
@make_output_option("text", "json")
def check(source: Source, rows: int, as_json: bool) -> int:
    """Try a workload on a few rows, in seconds.

    The command runs `prepare`, one training step, predictions and metrics, and prints the batch,
    the model, the memory of the training state and the FLOPs of a step. A training program (the
    section `program`) is started, killed after a save and started again. If the workload cannot
    separate the first rows from the rest (its `Data.first_rows` returns None), as for a moving
    window, the command uses all of the data. Exit codes: 0 no error, 2 an error.

    Example:
      rekindle check configs/digits.yaml
      rekindle check configs/demo.yaml --rows 5000 -o json
      rekindle check configs/demo.yaml --set data.window=60d -p scheduled-time=2024-03-25T03:00:00Z
    """
    from rekindle.blocks.manifest.provenance import SCHEDULED_TIME
    from rekindle.training.rehearsal import run_rehearsal
    from rekindle.view.rehearsal_report import format_rehearsal_report

    for name in parse_parameter_options(source.parameters).keys() - {SCHEDULED_TIME}:
        raise click.UsageError(f"-p {name}: `check` uses only the parameter {SCHEDULED_TIME}.")

    loaded_config = source.load().config
    check_paths(loaded_config)
    rehearsal_report = run_rehearsal(
        loaded_config.model_dump(mode="json"),
        rows,
        is_thorough=True,
        scheduled=source.scheduled_time(),
    )
    click.echo(
        to_json(rehearsal_report, indent=2)
        if as_json
        else format_rehearsal_report(rehearsal_report)
    )

    if "error" in rehearsal_report:
        return 2
    return 0


@command
@config_options
@manifest_options
@no_cache_option
@cluster_flag
@make_output_option("text", "json")
def plan(source: Source, no_cache: bool, cluster: Cluster | None, as_json: bool) -> int:
    """Forecast a run: its tasks, time, resources and release.

    The command shows which tasks run and why, which tasks are reused, how long the run takes
    according to earlier runs, the resource requests of its pods, and which model it may release.
    Nothing is started or written. Exit codes: 0 every task is cached, 10 a task would run, 2 bad
    usage or config.

    Example:
      rekindle plan configs/demo.yaml --set train.epochs=10
      rekindle plan --manifest workflow.yaml -p message=hello -o json
    """
    from rekindle.operations.plan import forecast
    from rekindle.view import plan as view

    pipeline_manifests = source.manifests()
    if pipeline_manifests.config:
        check_paths(pipeline_manifests.config)

    plan_forecast = forecast.forecast_run(
        forecast.ForecastSources(homes.home_path() if cluster else homes.require_home(), cluster),
        pipeline_manifests.main,
        parse_parameter_options(source.parameters),
        pipeline_manifests.other_objects,
        not no_cache,
    )
    click.echo(
        to_json(view.build_forecast_object(plan_forecast), indent=2)
        if as_json
        else view.format_forecast(plan_forecast)
    )

    if plan_forecast.would_run_anything():
        return WOULD_RUN_EXIT_CODE
    return 0


@command
@config_options
@click.option(
    "--cluster",
    is_flag=True,
    help="Check a namespace of a cluster, as `rekindle platform check` does.",
)
@cluster_options
@make_output_option("text", "json")
def doctor(source: Source, cluster: bool, target: Target, as_json: bool) -> int:
    """Check that this machine has everything that Rekindle needs.

    Each failure comes with a remedy.

    Example:
      rekindle doctor
    """
    if cluster:
        from rekindle.cli.platform import check_namespace

        return check_namespace(source, target, as_json)

    from rekindle.doctor.machine_checks import check_machine

    return print_checks(check_machine(homes.home_path()), as_json)
