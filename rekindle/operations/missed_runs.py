"""The runs that a schedule should have started between two days, and their results."""

from dataclasses import dataclass
from datetime import date, datetime
from typing import Any

from argolocal.language.gofmt import timestamp
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
        return {SCHEDULED_TIME: timestamp(self.time.timestamp()), BACKFILL: "true"}

    def row(self, status: Status) -> dict[str, Any]:
        """Return the result of the run as a row of the table of `rekindle backfill`."""
        outputs = results.parameters(status)
        return {
            "scheduled": self.parameters[SCHEDULED_TIME],
            "workflow": self.name,
            "phase": status.get("phase") or "Pending",
            "gate": _gate_result(status),
            "reason": outputs.get("reason"),
            "metrics": results.metrics(outputs),
            "model_sha256": outputs.get("model_sha256"),
        }


def missed_runs(
    config: Config, manifest_hash: str, first: date, last: date, now: datetime
) -> list[MissedRun]:
    """Return the scheduled runs on the days from `first` to `last` (in the schedule's time zone),
    oldest first. Raises ConfigError if the schedule does not start a run on these days, or if a run
    is in the future."""
    if first > last:
        raise ConfigError(f"--from is {first}, which is after --to, {last}: exchange the two days.")

    schedule = config.schedule
    times = list(cron.run_times(schedule.cron, schedule.timezone, first, last))
    if not times:
        raise ConfigError(
            f"schedule.cron ({schedule.cron}) does not start a run from {first} to {last}: give"
            " other days."
        )

    if times[-1] > now:
        raise ConfigError(
            f"--to is {last}: the run of {times[-1]:%Y-%m-%d %H:%M} UTC is in the future. Give an"
            " earlier day."
        )

    def name_at(time: datetime) -> str:
        digits = _base36(int(time.timestamp()))
        return f"{config.name}-{digits}-{manifest_hash[:HASH_LENGTH]}"

    return [MissedRun(time, name_at(time)) for time in times]


def _gate_result(status: Status) -> str | None:
    """Return the result of the gate; None if the run has no evaluation, or if its evaluations have
    different results."""
    nodes = (status.get("nodes") or {}).values()
    outputs = [
        output for node in nodes for output in (node.get("outputs") or {}).get("parameters") or []
    ]
    results = {output.get("value") for output in outputs if output["name"] == "judged"}
    if len(results) == 1:
        return results.pop()
    return None


def _base36(number: int) -> str:
    text = ""
    while number:
        number, digit = divmod(number, 36)
        text = BASE36_DIGITS[digit] + text
    return text
