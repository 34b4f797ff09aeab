"""The command `rekindle backfill`: missed runs of a schedule."""

from datetime import UTC, datetime

import click

from argolocal.cli.options import make_output_option
from argolocal.cli.output import print_errors_as_json
from argolocal.common import homes
from argolocal.common.json_text import to_json
from rekindle.cli.group import command
from rekindle.cli.on_cluster import refuse_inadmissible
from rekindle.cli.options import cluster_flag, config_options
from rekindle.cli.sources import Source
from rekindle.cluster.kubernetes_api import Cluster
from rekindle.errors import write_stderr

DAY = click.DateTime(["%Y-%m-%d"])

FIXED_DATA = (
    "every run of this backfill trains on the same data, because the pipeline {} does not use the"
    " scheduled time. Configure a moving window, such as `data.window` of the fraud workload"
    " (docs/time.md)."
)


@command
@config_options
@click.option(
    "--from",
    "first_day",
    type=DAY,
    required=True,
    metavar="DATE",
    help="First day, such as 2026-03-01.",
)
@click.option(
    "--to", "last_day", type=DAY, required=True, metavar="DATE", help="Last day, included."
)
@click.option(
    "--parallel",
    type=click.IntRange(1, 64),
    default=1,
    show_default=True,
    help="Number of parallel runs.",
)
@cluster_flag
@make_output_option("text", "json")
def backfill(
    source: Source,
    first_day: datetime,
    last_day: datetime,
    parallel: int,
    cluster: Cluster | None,
    as_json: bool,
) -> int:
    """Run the missed runs of a schedule, with the data of their time.

    For each time of schedule.cron between two days, one run is started. Models are evaluated and
    recorded, but no model is released. Without a moving window, all runs train on the same data,
    and a warning says so. If the command is stopped or killed, repeat it to continue. On a cluster,
    the runs are created from the schedule that `rekindle schedule CONFIG` applied. Exit codes: 0
    all runs succeeded, 1 a run failed, 2 bad usage or config.

    Example:
      rekindle backfill configs/demo.yaml --set data.window=60d --from 2024-03-01 --to 2024-03-31 \\
        --parallel 2
    """
    from rekindle.blocks.manifest.provenance import uses_scheduled_time
    from rekindle.blocks.manifest.render import manifest_sha256, render_manifest
    from rekindle.operations.backfill import backfill, select_executor
    from rekindle.operations.missed_runs import list_missed_runs
    from rekindle.view.backfill_table import format_backfill_table

    with print_errors_as_json(as_json):
        loaded_config = source.load().config
        if not cluster:
            loaded_config.data.check_source()

        manifest = render_manifest(loaded_config)
        scheduled_runs = list_missed_runs(
            loaded_config,
            manifest_sha256(manifest),
            first_day.date(),
            last_day.date(),
            datetime.now(UTC),
        )

        execute_run = select_executor(
            homes.home_path() if cluster else homes.require_home(),
            manifest,
            loaded_config.name,
            cluster,
        )
        if cluster:
            refuse_inadmissible(cluster, manifest)

    if not uses_scheduled_time(manifest):
        write_stderr(f"warning: {FIXED_DATA.format(loaded_config.name)}")

    result_rows = backfill(
        scheduled_runs, execute_run, parallel, lambda line: click.echo(line, err=True)
    )
    click.echo(
        to_json({"weeks": result_rows}, indent=2)
        if as_json
        else f"\n{format_backfill_table(result_rows)}"
    )

    if all(result_row["phase"] == "Succeeded" for result_row in result_rows):
        return 0
    return 1
