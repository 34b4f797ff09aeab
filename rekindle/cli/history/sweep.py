"""The command `rekindle sweep`."""

import json
from contextlib import nullcontext, redirect_stdout
from io import StringIO
from typing import Any

import click

from argolocal.cli.options import RunNameParam, ask_option, output_option
from argolocal.cli.output import run_output
from argolocal.common.homes import current as home
from argolocal.common.json_text import to_json
from rekindle.cli.group import command
from rekindle.cli.options import cluster_flag, config_options, no_cache_option
from rekindle.cli.sources import Source, check_training
from rekindle.cluster.kubernetes_api import Cluster
from rekindle.errors import ConfigError


def check_sweep(config: Any) -> None:
    """Raise ConfigError if the config is not a sweep, its data does not exist, or its workload
    cannot be trained."""
    from rekindle.training.sweep.sweep_config import Sweep

    if not isinstance(getattr(config, "sweep", None), Sweep):
        raise ConfigError(
            f"{config.pipeline} is not a sweep: a config for `rekindle sweep` needs `pipeline:"
            " pipelines.sweep` and a section `sweep`, see configs/sweep.yaml. To run this config,"
            " use `rekindle run`."
        )
    check_training(config)


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
@output_option("text", "json")
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
                trials = sweep_trials.trials_on_cluster(cluster, name)
            else:
                trials = sweep_trials.trials_here(home(), name)

        table = "\n".join(trials.pop("table"))
        click.echo(to_json({"workflow": name, **trials}, indent=2) if as_json else table)
        return 0

    if cluster:
        raise click.UsageError(
            "--cluster needs --of RUN: to run a sweep on a cluster, use `rekindle submit CONFIG`."
        )

    from rekindle.operations import cached_results
    from rekindle.view import pipeline_display

    with run_output(as_json):
        manifests = source.manifests()
        check_sweep(manifests.config)

        workflow = manifests.main_for_this_machine()
        values = cached_results.add_cached(home(), workflow, {}, not no_cache)
        pipeline = pipeline_display.create_run(home(), workflow, values)

        out = StringIO()
        with redirect_stdout(out) if as_json else nullcontext():
            code = pipeline_display.run_here(
                pipeline, as_json=as_json, ask=not yes, full_status=False
            )

        result = json.loads(out.getvalue()) if as_json else {}
        trials = sweep_trials.trials_here(home(), pipeline.name)

    table = "\n".join(["", *trials.pop("table")])
    click.echo(to_json(result | trials) if as_json else table)
    return code
