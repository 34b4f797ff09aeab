"""Commands that act on a cluster."""

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from argolocal.cli.options import RunNameParam, make_output_option, parse_parameter_options
from argolocal.cli.output import print_errors_as_json, print_result
from argolocal.manifest.allowed_values import COMPLETED_PHASES
from rekindle.cli.group import command
from rekindle.cli.options import (
    Target,
    cluster_options,
    config_options,
    local_option,
    manifest_options,
    no_cache_option,
)
from rekindle.cli.output import print_manifest
from rekindle.cli.runs import queue_here
from rekindle.cli.sources import Manifests, Source
from rekindle.cluster.kubernetes_api import Cluster
from rekindle.errors import ConfigError, write_stderr

if TYPE_CHECKING:
    from rekindle.cluster.kueue.admission import AdmissionFinding


@command
@config_options
@manifest_options
@click.option(
    "-w",
    "--watch",
    is_flag=True,
    help="Show the run until it completes; Ctrl-C ends only the watch.",
)
@click.option("--dry-run", is_flag=True, help="Print the Workflow without submitting it.")
@click.option(
    "--argo-server",
    metavar="URL",
    help="URL of an Argo Server to use instead of the Kubernetes API (default: ARGO_SERVER).",
)
@cluster_options
@local_option
@make_output_option("text", "json")
@click.option("--yes", is_flag=True, help="Do not ask: submit even if an identical run is active.")
@no_cache_option
def submit(
    source: Source,
    target: Target,
    argo_server: str | None,
    watch: bool,
    dry_run: bool,
    is_local: bool,
    as_json: bool,
    yes: bool,
    no_cache: bool,
) -> int:
    """Run a pipeline on a cluster.

    The namespace comes from --namespace, else from the config or manifest, else from the kubectl
    context. With --watch, the exit codes are the same as for `rekindle run`. With --local, the
    server of this machine runs the pipeline instead, as after `rekindle run --queue`.

    Example:
      rekindle submit configs/cluster.yaml --namespace models --watch
      rekindle submit --manifest workflow.yaml -p message=hello --dry-run
      rekindle submit configs/demo.yaml --local
    """
    if is_local:
        target.require_none("--local")
        if watch or dry_run or argo_server:
            raise click.UsageError(
                "--local cannot be combined with --watch, --dry-run or a server."
            )
        return queue_here(source, as_json, no_cache)

    from rekindle.cluster import workflows
    from rekindle.cluster.argo_server import ArgoServer
    from rekindle.operations import cached_results

    with print_errors_as_json(as_json):
        pipeline_manifests = _read_manifests(source)
        manifest_metadata = pipeline_manifests.main.get("metadata") or {}
        namespace = target.namespace or manifest_metadata.get("namespace") or ""
        argo_server_client = ArgoServer.from_url(argo_server, namespace)
        needs_cluster = not namespace or not (
            dry_run or (argo_server_client is not None and not watch)
        )
        cluster = target.connect(namespace) if needs_cluster else None
        if cluster:
            namespace = cluster.namespace

        parameter_values = cached_results.add_cluster_cached_parameter(
            pipeline_manifests.main, parse_parameter_options(source.parameters), not no_cache
        )
        workflow = workflows.build_submission(pipeline_manifests.main, parameter_values, namespace)

        if dry_run:
            print_manifest(workflow, as_json)
            return 0

        if cluster:
            refuse_inadmissible(cluster, pipeline_manifests.main)
        else:
            _refuse_inadmissible_if_reachable(target, namespace, pipeline_manifests.main)

        if argo_server_client:
            argo_server_client.namespace = namespace
            find_duplicate = argo_server_client.find_duplicate
            create_workflow = argo_server_client.submit
        else:
            assert cluster
            find_duplicate = partial(workflows.find_duplicate, cluster)
            create_workflow = partial(workflows.submit, cluster)

        if not yes:
            confirm_duplicate(find_duplicate(workflow))

        create_workflow(workflow)

    return report_submission(workflow, cluster, watch, as_json)


def _read_manifests(source: Source) -> Manifests:
    """Return the manifests of `source`. Print the warnings of `lint`, and a note for each object
    that is not submitted. Raises ConfigError if `lint` finds errors."""
    pipeline_manifests = source.manifests()
    print_warnings(
        pipeline_manifests.main,
        source.config or source.manifest,
        pipeline_manifests.other_objects,
    )
    for other_object in pipeline_manifests.other_objects:
        write_stderr(
            f"note: the {other_object.get('kind')} is not submitted: apply it with `kubectl apply`"
        )
    return pipeline_manifests


def print_warnings(
    manifest: dict[str, Any], file: Path | None, other_objects: Sequence[dict[str, Any]] = ()
) -> None:
    """Print the warnings of `lint`. Raises ConfigError if `lint` finds errors."""
    from argolocal import validate

    for finding in validate.check(manifest, str(file), other_objects):
        write_stderr(f"warning: {finding}")


def refuse_inadmissible(cluster: Cluster, manifest: dict[str, Any]) -> None:
    """Print notes about jobs that must wait in a queue of Kueue. Raises ConfigError if Kueue can
    never admit a job, or would not queue it."""
    from rekindle.cluster.kueue.submission import check_submission

    _report_findings(check_submission(cluster, manifest))


def _refuse_inadmissible_if_reachable(
    target: Target, namespace: str, manifest: dict[str, Any]
) -> None:
    """Compare a manifest for an Argo server with Kueue's queues, if the kubeconfig names a
    Kubernetes API that answers; else print a note if the manifest has queued jobs. Raises
    ConfigError if Kueue can never admit a job, or would not queue it."""
    from rekindle.cluster.errors import ApiError
    from rekindle.cluster.kueue.queued_jobs import list_queued_jobs, read_templates
    from rekindle.cluster.kueue.submission import check_submission

    try:
        # no retries: the run does not need this API
        cluster = target.connect(namespace, max_retries=0)
        findings = check_submission(cluster, manifest)
    except (ConfigError, ApiError) as error:
        if list_queued_jobs(read_templates(manifest)):
            write_stderr(f"note: the jobs are not compared with the queues of Kueue: {error}")
        return

    _report_findings(
        findings,
        f"These are the queues of the context {cluster.context}: if the Argo server belongs to"
        " another cluster, give its context with --context.",
    )


def _report_findings(findings: Sequence["AdmissionFinding"], *hints: str) -> None:
    """Print findings as notes. Raises ConfigError with the hints if a finding is fatal."""
    refusals = [str(finding) for finding in findings if finding.is_fatal]
    if refusals:
        raise ConfigError(*refusals, *hints)
    for finding in findings:
        write_stderr(f"note: {finding}")


def confirm_duplicate(running_workflow: str | None) -> None:
    """If `running_workflow`, an identical run, is active, ask whether to start another run. Raises
    ConfigError without a terminal, and click.Abort if the answer is "no"."""
    if running_workflow:
        command = f"rekindle status {running_workflow} --cluster --watch"
        remedy = f"follow it with `{command}`, or start another run with --yes."
        problem = f"{running_workflow} is already running with the same manifest and parameters"
        _confirm(problem, remedy, "Start another run?")


def _confirm(problem: str, remedy: str, question: str) -> None:
    """Ask the user for confirmation. Raises ConfigError without a terminal, and click.Abort if the
    answer is "no"."""
    if not sys.stdin.isatty():
        raise ConfigError(f"{problem}: {remedy}")
    click.confirm(f"{problem}. {question}", abort=True, err=True)


def report_submission(
    workflow: dict[str, Any], cluster: Cluster | None, watch: bool, as_json: bool
) -> int:
    """Print the name of a submitted run, or show the run until it completes. Return the exit code
    of the command."""
    from rekindle.cluster.workflows import SHA256_ANNOTATION

    name = workflow["metadata"]["name"]
    namespace = workflow["metadata"]["namespace"]
    flags = " --cluster" + (cluster.flags if cluster else f" --namespace {namespace}")
    click.echo(f"{name} was submitted to namespace {namespace}", err=as_json)

    if watch and cluster:
        from rekindle.view import cluster_watch

        return cluster_watch.watch_run(cluster, name, as_json=as_json)

    sha256 = workflow["metadata"]["annotations"][SHA256_ANNOTATION]
    result = {
        "workflow": name,
        "namespace": namespace,
        "phase": "Pending",
        "manifest_sha256": sha256,
    }

    text = f"watch   rekindle status {name} --watch{flags}\nlogs    rekindle logs {name} -f{flags}"
    print_result(as_json, result, text)
    return 0


@command
@click.argument("name", type=RunNameParam())
@cluster_options
@click.option(
    "--cluster",
    is_flag=True,
    hidden=True,
    expose_value=False,
    help="Accepted for symmetry: this command always acts on a cluster.",
)
@make_output_option("text", "json")
@click.option(
    "--yes",
    is_flag=True,
    help="Do not ask: delete the run even if it is active; its exit steps do not run.",
)
def delete(name: str, target: Target, as_json: bool, yes: bool) -> None:
    """Delete a run from a cluster, with its pods and its training job.

    The released model keeps serving; data, checkpoints and models stay in the object store.

    Example:
      rekindle delete demo-4k2xp --namespace models
    """
    from rekindle.cluster import workflows

    cluster = target.connect()

    workflow_status = workflows.read_run(cluster, name).get("status") or {}
    if workflow_status.get("phase") not in COMPLETED_PHASES and not yes:
        remedy = f"`rekindle stop {name} --cluster{cluster.flags}` first, or delete with --yes."
        _confirm(f"{name} is still running, and its exit steps would not run", remedy, "Delete it?")

    workflows.delete_run(cluster, name)
    print_result(
        as_json,
        {"workflow": name, "namespace": cluster.namespace, "deleted": True},
        f"deleted {name}",
    )
