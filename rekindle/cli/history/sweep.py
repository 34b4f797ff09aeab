"""The command `rekindle sweep`."""

import json
from contextlib import nullcontext, redirect_stdout
from io import StringIO
from typing import Any

import click

from argolocal.cli.options import RunNameParam, ask_option, make_output_option
from argolocal.cli.output import run_output
from argolocal.common.homes import require_home as home
from argolocal.common.json_text import to_json
from rekindle.cli.group import command
from rekindle.cli.options import cluster_flag, config_options, no_cache_option
from rekindle.cli.sources import Source, check_training
from rekindle.cluster.kubernetes_api import Cluster
from rekindle.errors import ConfigError


def check_sweep(sweep_config: Any) -> None:
    """Raise ConfigError if the config has no section `sweep`, if its data does not exist, or if its
    workload cannot be trained."""
    from rekindle.training.sweep.sweep_config import Sweep

    if not isinstance(getattr(sweep_config, "sweep", None), Sweep):
        raise ConfigError(
            f"{sweep_config.pipeline} is not a sweep: a config for `rekindle sweep` needs"
            " `pipeline: pipelines.sweep` and a section `sweep`, see configs/sweep.yaml. To run"
            " this config, use `rekindle run`."
        )
    check_training(sweep_config)


@command
@config_options
@click.option(
    "--of",
    "name",
    type=RunNameParam(),
    metavar="RUN",
    help="Show the trials of this run; start no sweep.",
)
@cluster_flag
@make_output_option("text", "json")
@ask_option
@no_cache_option
def sweep(
    source: Source,
    name: str | None,
    cluster: Cluster | None,
    as_json: bool,
    yes: bool,
    no_cache: bool,
) -> int:
    """Run a sweep of hyper-parameters, and list its trials.

    CONFIG must have a section `sweep`. Trials train in parallel on this machine, the best trials of
    each rung continue from where they paused, and the best of the last rung is the candidate. A
    sweep is a run like any other: `rekindle resume` resumes it, `rekindle submit CONFIG` runs it on
    a cluster. Exit codes: the same as for `rekindle run`.

    Example:
      rekindle sweep configs/sweep.yaml --set sweep.trials=18
      rekindle sweep --of sweep-4k2xp -o json
    """
    from rekindle.operations import sweep_trials

    if bool(name) == bool(source.config):
        raise click.UsageError(
            "give a config with a section `sweep`, or --of RUN to show the trials of a run."
        )

    if name:
        with run_output(as_json):
            if cluster:
                sweep_trials_report = sweep_trials.list_cluster_trials(cluster, name)
            else:
                sweep_trials_report = sweep_trials.list_local_trials(home(), name)

        trials_table = "\n".join(sweep_trials_report.pop("table"))
        click.echo(
            to_json({"workflow": name, **sweep_trials_report}, indent=2)
            if as_json
            else trials_table
        )
        return 0

    if cluster:
        raise click.UsageError(
            "--cluster needs --of RUN: to run a sweep on a cluster, use `rekindle submit CONFIG`."
        )

    from rekindle.operations import cached_results
    from rekindle.view import pipeline_display

    with run_output(as_json):
        pipeline_manifests = source.manifests()
        check_sweep(pipeline_manifests.config)

        workflow = pipeline_manifests.main_for_this_machine()
        parameter_values = cached_results.add_cached_parameter(home(), workflow, {}, not no_cache)
        sweep_run = pipeline_display.create_run(home(), workflow, parameter_values)

        captured_output = StringIO()
        with redirect_stdout(captured_output) if as_json else nullcontext():
            exit_code = pipeline_display.run_here(
                sweep_run, as_json=as_json, ask=not yes, full_status=False
            )

        run_result = json.loads(captured_output.getvalue()) if as_json else {}
        sweep_trials_report = sweep_trials.list_local_trials(home(), sweep_run.name)

    trials_table = "\n".join(["", *sweep_trials_report.pop("table")])
    click.echo(to_json(run_result | sweep_trials_report) if as_json else trials_table)
    return exit_code
