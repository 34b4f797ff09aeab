"""The command that searches hyper-parameters."""

import json
from contextlib import nullcontext, redirect_stdout
from io import StringIO
from typing import Any

import click

from argolocal.cli.options import Name, ask_option, output_option
from argolocal.cli.output import run_output
from argolocal.common.homes import current as home
from argolocal.view import runs
from rekindle.cli.group import command
from rekindle.cli.inputs import Source, check_source
from rekindle.cli.options import cluster_flag, configured, no_cache_option
from rekindle.cluster.api import Cluster
from rekindle.errors import ConfigError
from rekindle.view import reuse


def check_search(config: Any) -> None:
    """Raise ConfigError if the pipeline is no search, or its data is not there."""
    from rekindle.training.search.config import Sweep

    if not isinstance(getattr(config, "sweep", None), Sweep):
        raise ConfigError(
            f"{config.pipeline} is no search: a config for `rekindle sweep` has `pipeline: pipelines.sweep` and a "
            "section `sweep`, as configs/sweep.yaml has. `rekindle run` runs this one."
        )
    check_source(config)


@command
@configured
@click.option("--of", "name", type=Name(), metavar="RUN", help="Show the trials of a run instead, also while it runs.")
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
    """Search hyper-parameters on this machine, and list the trials.

    CONFIG has a section `sweep`. Trials train side by side, the better ones go on from where they paused, and the best
    is the candidate. It is a run like any other: `rekindle resume` goes on with it, `rekindle submit CONFIG` runs it on
    a cluster. Exit codes: as of `rekindle run`.

    Example:
      rekindle sweep configs/sweep.yaml --set sweep.trials=18
      rekindle sweep --of sweep-4k2xp -o json
    """
    from rekindle.view.history import trials

    if bool(name) == bool(source.config):
        raise click.UsageError("give a config to search, or --of RUN to show the trials of a run.")
    if name:
        with run_output(as_json):
            known = trials.on_cluster(cluster, name) if cluster else trials.here(home(), name)
        table = "\n".join(known["table"])
        click.echo(json.dumps({"workflow": name, "trials": known["trials"]}, indent=2) if as_json else table)
        return 0
    if cluster:
        raise click.UsageError("a search on a cluster is a run: `rekindle submit CONFIG`, then --of RUN --cluster.")
    from rekindle.view import foreground

    with run_output(as_json):
        workflow, _ = source.manifests(check_search)
        values = reuse.looked_up(home(), workflow, {}, not no_cache)
        out = StringIO()
        with redirect_stdout(out) if as_json else nullcontext():
            code = foreground.run(home(), workflow, values, as_json=as_json, ask=not yes)
        result = json.loads(out.getvalue()) if as_json else {"workflow": runs.newest(home())}
        known = trials.here(home(), result["workflow"])
    listing = json.dumps(result | {"trials": known["trials"]})
    click.echo(listing if as_json else "\n".join(["", *known["table"]]))
    return code
