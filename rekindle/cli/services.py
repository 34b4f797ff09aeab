"""Commands for the services and deployments of this machine, and for the data and models in
them."""

import os
import shlex
from pathlib import Path

import click

from argolocal import cli as local
from argolocal.cli.group import copy_for_program
from argolocal.cli.options import (
    FiniteNumber,
    NonEmptyName,
    NonEmptyPath,
    RunNameParam,
    make_output_option,
    open_option,
    parallelism_option,
    port_option,
    print_unit_option,
)
from argolocal.cli.output import announce_page, print_result
from argolocal.common import homes
from argolocal.common.homes import require_home as home
from rekindle import project
from rekindle.cli.group import command, commands
from rekindle.cli.options import cluster_flag
from rekindle.cluster.kubernetes_api import Cluster
from rekindle.kubernetes_names import CONFIG_MAP, S3_ENDPOINT_URL, STORE_SECRET
from rekindle.names import ModelName

commands.add_command(copy_for_program(local.trust, "rekindle"))


@command
@make_output_option("text", "json")
def down(as_json: bool) -> None:
    """Stop the deployments and the embedded services of this machine.

    Data, models and runs are kept. The command fails while a run needs the services.

    Example:
      rekindle down
    """
    click.get_current_context().invoke(local.down, as_json=as_json)


@command
@click.option(
    "--keep-runs", type=click.IntRange(0), help="Number of ended runs of each pipeline to keep."
)
@click.option(
    "--keep-days", type=FiniteNumber(0), help="Number of days to keep a run after its end."
)
@click.option(
    "--keep-releases",
    type=click.IntRange(0),
    help="Number of the newest releases of each model to keep.",
)
@cluster_flag
@make_output_option("text", "json")
@click.option(
    "--yes", is_flag=True, help="Remove the runs and releases instead of only listing them."
)
def prune(
    keep_runs: int | None,
    keep_days: float | None,
    keep_releases: int | None,
    cluster: Cluster | None,
    as_json: bool,
    yes: bool,
) -> None:
    """Remove old runs and releases.

    The limits come from the section `retention` in the config of the newest run of each pipeline;
    an option overrides the limit of the same name. If no limit is given, the newest five runs of
    each pipeline are kept on this machine, and all runs on a cluster. Artifacts, logs, cached
    results and the record in MLflow are removed with a run. These always stay: the champion, the
    releases that `rekindle rollback` can go back to, the MLflow runs of all kept releases, running
    runs, and artifacts that kept runs reuse. On a cluster, MLFLOW_TRACKING_URI, S3_BUCKET and
    S3_ENDPOINT_URL locate the services.

    Example:
      rekindle prune --keep-runs 3
      rekindle prune --keep-runs 3 --yes
      rekindle prune --cluster -n models
    """
    from argolocal.view import runs
    from rekindle.operations import retention

    retention_options = {
        "keep_runs": keep_runs,
        "keep_days": keep_days,
        "keep_releases": keep_releases,
    }
    removal_tables = retention.prune_runs(
        homes.home_path() if cluster else home(), cluster, retention_options, should_delete=yes
    )
    removal_rows = [
        removal_row for removal_table in removal_tables.values() for removal_row in removal_table
    ]
    count_description = retention.describe_counts(
        (removal_row["kept"] for removal_row in removal_tables["runs"]),
        len(removal_tables["releases"]),
    )
    total_description = (
        f"{count_description},"
        f" {sum(removal_row['bytes'] for removal_row in removal_rows) / 1e6:.1f} MB"
    )

    tables_text = "\n\n".join(
        runs.format_table(removal_table)
        for removal_table in removal_tables.values()
        if removal_table
    )
    text = (
        f"removed {total_description}"
        if yes
        else f"{tables_text}\n\n--yes removes {total_description}"
    )
    print_result(
        as_json, {"removed": yes, **removal_tables}, text if removal_rows else "nothing to remove"
    )


@commands.group
def cache() -> None:
    """List or delete cached results of earlier runs.

    Example:
      rekindle cache ls
    """


@cache.command("ls")
@make_output_option("text", "json")
def list_entries(as_json: bool) -> None:
    """List cached results, newest first.

    Example:
      rekindle cache ls
    """
    from argolocal.view import runs
    from rekindle.operations import cached_results

    click.echo(
        runs.show_tables(
            {"entries": cached_results.list_entry_rows(home())}, as_json, "the cache is empty"
        )
    )


@cache.command("prune")
@click.option(
    "--keep",
    type=click.IntRange(0),
    default=10_000,
    show_default=True,
    help="Number of entries to keep.",
)
@click.option(
    "--days",
    type=FiniteNumber(0),
    default=90.0,
    show_default=True,
    help="Maximum age of an entry, in days.",
)
@make_output_option("text", "json")
@click.option("--yes", is_flag=True, help="Delete the entries instead of only listing them.")
def prune_entries(keep: int, days: float, as_json: bool, yes: bool) -> None:
    """Delete old cached results, and cached results of removed runs.

    Only the cache entries are deleted: artifacts belong to their run, which `rekindle prune`
    removes.

    Example:
      rekindle cache prune --days 30 --yes
    """
    from argolocal.view import runs
    from rekindle.operations import cached_results

    pruned_rows = cached_results.prune_cache(home(), keep, days, yes)

    if yes:
        text = f"deleted {len(pruned_rows)} entries"
    else:
        text = f"{runs.format_table(pruned_rows)}\n\n--yes deletes {len(pruned_rows)} entries"

    print_result(
        as_json,
        {"removed": yes, "entries": pruned_rows},
        text if pruned_rows else "nothing to delete",
    )


@command
@click.argument("name", type=NonEmptyName())
@click.argument("version", required=False, type=click.IntRange(1))
@click.option(
    "--seconds",
    type=FiniteNumber(0),
    default=120.0,
    show_default=True,
    help="Seconds to wait for the servers.",
)
@cluster_flag
@make_output_option("text", "json")
def rollback(
    name: str, version: int | None, seconds: float, cluster: Cluster | None, as_json: bool
) -> None:
    """Roll model NAME back to an earlier release.

    VERSION is a version of the registered model (default: the version before the champion). The
    Deployment of an earlier release still exists, with its weights, image, flags and resources: the
    command starts its pods, makes the version the champion, and switches the traffic to it. If a
    rollback is interrupted, repeat the command to finish it. On a cluster, MLFLOW_TRACKING_URI,
    S3_BUCKET and S3_ENDPOINT_URL locate the record of the champion, and NOTIFY_URL receives
    notifications.

    Example:
      rekindle rollback demo
      rekindle rollback demo 3 --cluster
    """
    from rekindle.operations.rollback import roll_back_model

    def report(rollback_result: dict[str, str]) -> None:
        previous_version_text = (
            f" (before: version {rollback_result['before']})" if rollback_result["before"] else ""
        )
        print_result(
            as_json,
            rollback_result,
            f"version {rollback_result['version']} of {name} is serving{previous_version_text}",
        )

    name = ModelName(name, "NAME")
    roll_back_model(
        homes.home_path() if cluster else home(), cluster, name, str(version or ""), seconds, report
    )


@command
@click.argument("name", required=False, type=RunNameParam())
@port_option
@open_option
@click.option("--mlflow", is_flag=True, help="Print the address of MLflow instead.")
@click.option(
    "--allow-actions",
    is_flag=True,
    help="On a cluster, let the page stop, resume and scale runs, and roll models back.",
)
@cluster_flag
def ui(
    name: str | None,
    port: int | None,
    open_browser: bool,
    mlflow: bool,
    allow_actions: bool,
    cluster: Cluster | None,
) -> None:
    """Serve a page that shows runs and models, until Ctrl-C.

    With NAME, the page starts with one run. The page listens on 127.0.0.1 only. Its address
    contains a token: do not share it. `--mlflow` prints the address of MLflow, and starts MLflow if
    necessary: of the experiment of the newest run or, with NAME, of one run.

    On a cluster, the page shows the runs of a namespace with your own rights. It changes nothing
    without --allow-actions. MLFLOW_TRACKING_URI locates the record of the models, S3_BUCKET and
    S3_ENDPOINT_URL the logs of deleted pods.

    Example:
      rekindle ui
      rekindle ui demo-4k2xp --open
      rekindle ui demo-4k2xp --mlflow
      rekindle ui --cluster -n models
    """

    def announce(page_address: str) -> None:
        announce_page(page_address, open_browser)

    if cluster:
        if mlflow:
            raise click.UsageError("--mlflow is for the MLflow of this machine: omit --cluster.")
        from rekindle.page import cluster_site

        cluster_site.serve(home(), cluster, name, port, allow_actions, announce)
        return

    from rekindle.page import site

    if not mlflow:
        site.serve(home(), name, port, announce)
        return

    url = site.find_mlflow_page(home(), name or "")
    click.echo(url)
    if open_browser:
        click.launch(homes.write_redirect_page(home(), url))


@command
@make_output_option("text", "json")
def env(as_json: bool) -> None:
    """Print the environment variables that a notebook needs.

    The variables give access to runs and models. The values contain the keys of the object store
    and the token of MLflow. The services are started if necessary.

    Example:
      eval "$(rekindle env)" && jupyter lab
      rekindle env -o json
    """
    from rekindle.local.cluster import LocalCluster

    cluster = LocalCluster(home())
    environment_variables = cluster.configmap(CONFIG_MAP) | cluster.secret(STORE_SECRET)
    # include the keys of the object store, because MLflow's client fetches models directly from it
    environment_variables["MLFLOW_S3_ENDPOINT_URL"] = environment_variables[S3_ENDPOINT_URL]
    environment_variables[project.PATH_VARIABLE] = os.environ[project.PATH_VARIABLE]
    text = "\n".join(
        f"export {name}={shlex.quote(variable_value)}"
        for name, variable_value in environment_variables.items()
    )
    print_result(as_json, environment_variables, text)


@command
@click.argument("path", type=NonEmptyPath())
@click.argument("uri", required=False, metavar="[s3://BUCKET/KEY]")
@make_output_option("text", "json")
def put(path: Path, uri: str | None, as_json: bool) -> None:
    """Copy a file or folder into the object store, for data.source.

    The command prints the URI of the copy (default: s3://BUCKET/data/NAME, in the bucket of the
    runs). The object store is the embedded S3, or the store at S3_ENDPOINT_URL if this variable is
    set.

    Example:
      rekindle put payments.csv
      rekindle put exports/ s3://rekindle/raw/exports
    """
    from rekindle.operations import artifact_listing

    target_uri = artifact_listing.upload_path(home(), path, uri or "")
    print_result(as_json, {"uri": target_uri}, target_uri)


@command
@click.argument("name", type=RunNameParam())
@click.argument("artifact", required=False, type=NonEmptyName())
@click.option(
    "--to",
    "target",
    type=NonEmptyPath(),
    metavar="PATH",
    help="Path of the copy (default: the artifact's name).",
)
@make_output_option("text", "json")
def get(name: str, artifact: str | None, target: Path | None, as_json: bool) -> None:
    """Fetch an artifact of run NAME, or list all artifacts of the run.

    ARTIFACT may be a file or folder in an artifact, such as prepare/dataset/rejects.parquet with
    the invalid rows.

    Example:
      rekindle get demo-4k2xp
      rekindle get demo-4k2xp evaluate/report --to report-of-monday
      rekindle get demo-4k2xp prepare/dataset/rejects.parquet
    """
    from argolocal.view import runs
    from rekindle.operations import artifact_listing

    if not artifact:
        artifact_rows = artifact_listing.list_artifacts(home(), name)
        click.echo(runs.show_tables({"artifacts": artifact_rows}, as_json, ""))
        return

    target = target or Path(Path(artifact).name)
    artifact_listing.fetch_artifact(home(), name, artifact, target)
    print_result(as_json, {"artifact": artifact, "path": str(target)}, str(target))


@command
@port_option
@open_option
@parallelism_option
@print_unit_option
def server(
    port: int | None, open_browser: bool, parallelism: int | None, print_unit: str | None
) -> None:
    """Run queued and scheduled pipelines, and serve the page.

    The server starts what `rekindle schedule` has scheduled and what `rekindle run --queue` has
    queued, by priority and then in the order of submission. Runs are processes of their own: they
    continue when the server ends, and the next server watches them. A run whose process was killed
    is continued.

    The page listens on 127.0.0.1 only. Its address contains a token: do not share it.

    Example:
      rekindle server --parallelism 2
      rekindle server --print-unit user
    """
    if print_unit:
        from argolocal.server.systemd import make_unit

        click.echo(make_unit(print_unit, home(), parallelism, port), nl=False)
        return

    from argolocal.page.application import Page
    from argolocal.server.server import Server
    from rekindle.local.cluster import LocalCluster
    from rekindle.page.artifacts import open_home_artifacts
    from rekindle.page.site import make_parts

    open_store = open_home_artifacts(home()).open_store
    page = Page(make_parts(home())).application()
    execute_function = "rekindle.view.pipeline_display:execute_queued"
    home_server = Server(LocalCluster(home()), execute_function, open_store, parallelism)
    home_server.serve(
        page, port, lambda address: announce_page(address, open_browser, home_server.describe())
    )
