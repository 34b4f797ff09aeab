"""The runs that a schedule should have started between two days, and their results."""

from dataclasses import dataclass
from datetime import date, datetime
from typing import Any

from argolocal.language.gofmt import format_timestamp
from argolocal.manifest import cron
from argolocal.view.summary import Status
from rekindle.blocks.manifest.config import Config
from rekindle.blocks.manifest.provenance import BACKFILL, SCHEDULED_TIME
from rekindle.errors import ConfigError
from rekindle.operations import results

BASE36_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
# number of characters of the manifest hash in a name, so that the name is as long as the name of a
# scheduled run
HASH_LENGTH = 3


@dataclass(frozen=True)
class MissedRun:
    """A past run of the schedule; its `name` is derived from the manifest and its time."""

    time: datetime
    name: str

    @property
    def parameters(self) -> dict[str, str]:
        return {SCHEDULED_TIME: format_timestamp(self.time.timestamp()), BACKFILL: "true"}

    def row(self, workflow_status: Status) -> dict[str, Any]:
        """Return the result of the run as a row of the table of `rekindle backfill`."""
        run_outputs = results.read_parameters(workflow_status)
        return {
            "scheduled": self.parameters[SCHEDULED_TIME],
            "workflow": self.name,
            "phase": workflow_status.get("phase") or "Pending",
            "gate": _read_gate_result(workflow_status),
            "reason": run_outputs.get("reason"),
            "metrics": results.parse_metrics(run_outputs),
            "model_sha256": run_outputs.get("model_sha256"),
        }


def list_missed_runs(
    pipeline_config: Config,
    manifest_hash: str,
    first_day: date,
    last_day: date,
    current_time: datetime,
) -> list[MissedRun]:
    """Return the runs that the schedule should have started on the days from `first_day` to
    `last_day` (in the schedule's time zone), oldest first. Raises ConfigError if the schedule does
    not start a run on these days, or if a run is in the future."""
    if first_day > last_day:
        raise ConfigError(
            f"--from is {first_day}, which is after --to, {last_day}: exchange the two days."
        )

    schedule = pipeline_config.schedule
    run_times = list(cron.list_run_times(schedule.cron, schedule.timezone, first_day, last_day))
    if not run_times:
        raise ConfigError(
            f"schedule.cron ({schedule.cron}) does not start a run from {first_day} to {last_day}:"
            " give other days."
        )

    if run_times[-1] > current_time:
        raise ConfigError(
            f"--to is {last_day}: the run of {run_times[-1]:%Y-%m-%d %H:%M} UTC is in the future."
            " Give an earlier day."
        )

    def make_run_name(run_time: datetime) -> str:
        base36_digits = _encode_base36(int(run_time.timestamp()))
        return f"{pipeline_config.name}-{base36_digits}-{manifest_hash[:HASH_LENGTH]}"

    return [MissedRun(run_time, make_run_name(run_time)) for run_time in run_times]


def _read_gate_result(workflow_status: Status) -> str | None:
    """Return the result of the gate; None if the run has no evaluation, or if its evaluations have
    different results."""
    workflow_nodes = (workflow_status.get("nodes") or {}).values()
    output_parameters = [
        output_parameter
        for workflow_node in workflow_nodes
        for output_parameter in (workflow_node.get("outputs") or {}).get("parameters") or []
    ]
    gate_results = {
        output_parameter.get("value")
        for output_parameter in output_parameters
        if output_parameter["name"] == "judged"
    }
    if len(gate_results) == 1:
        return gate_results.pop()
    return None


def _encode_base36(number: int) -> str:
    base36_text = ""
    while number:
        number, digit_index = divmod(number, 36)
        base36_text = BASE36_DIGITS[digit_index] + base36_text
    return base36_text
