"""The runs that a schedule would have started between two days, and what became of each."""

from dataclasses import dataclass
from datetime import date, datetime
from typing import Any

from argolocal.language.gofmt import timestamp
from argolocal.manifest import cron
from argolocal.view import runs
from argolocal.view.summary import Status
from rekindle.blocks.manifest.config import Config
from rekindle.blocks.manifest.provenance import BACKFILL, SCHEDULED
from rekindle.errors import ConfigError
from rekindle.view import outcome

DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
HASH = 3  # characters of the manifest's in a name: as long as that of a scheduled run


@dataclass(frozen=True)
class Week:
    """One run of the past; its `name` is a function of the manifest and of its time."""

    time: datetime
    name: str

    @property
    def parameters(self) -> dict[str, str]:
        return {SCHEDULED: timestamp(self.time.timestamp()), BACKFILL: "true"}

    def row(self, status: Status) -> dict[str, Any]:
        """What the run came to: the same for the same manifest, data and champion, however often it was killed."""
        outputs = outcome.parameters(status)
        row = {
            "scheduled": self.parameters[SCHEDULED],
            "workflow": self.name,
            "phase": status.get("phase") or "Pending",
        }
        row |= {"gate": _judged(status), "reason": outputs.get("reason"), "metrics": outcome.metrics(outputs)}
        return row | {"model_sha256": outputs.get("model_sha256")}


def weeks(config: Config, manifest_hash: str, first: date, last: date, now: datetime) -> list[Week]:
    """The scheduled runs on the days from `first` to `last` (of the schedule's time zone), the oldest first.

    Raises ConfigError if there is none, or one in the future.
    """
    schedule = config.schedule
    times = list(cron.run_times(schedule.cron, schedule.timezone, first, last)) if first <= last else []
    if not times:
        raise ConfigError(
            f"schedule.cron ({schedule.cron}) has no run from {first} to {last}: give days with one in between."
        )
    if times[-1] > now:
        raise ConfigError(
            f"--to is {last}: the run of {times[-1]:%Y-%m-%d %H:%M} UTC is still to come. Give a day before."
        )
    return [Week(time, f"{config.name}-{_base36(int(time.timestamp()))}-{manifest_hash[:HASH]}") for time in times]


def table(rows: list[dict[str, Any]]) -> str:
    """A line for each week."""
    names = list(dict.fromkeys(name for row in rows for name in row["metrics"]))

    def cells(row: dict[str, Any]) -> dict[str, str]:
        known = {name: row["metrics"].get(name) for name in names}
        figures = {name: "" if value is None else f"{value:.4g}" for name, value in known.items()}
        judged = {"scheduled": row["scheduled"], "phase": row["phase"], "gate": row["gate"] or ""}
        return judged | figures | {"weights": (row["model_sha256"] or "")[:12]}

    return runs.table([cells(row) for row in rows])


def _judged(status: Status) -> str | None:
    """What the gate said; None where nothing was judged, or several models were."""
    nodes = (status.get("nodes") or {}).values()
    outputs = [output for node in nodes for output in (node.get("outputs") or {}).get("parameters") or []]
    said = {output.get("value") for output in outputs if output["name"] == "judged"}
    return said.pop() if len(said) == 1 else None


def _base36(number: int) -> str:
    text = ""
    while number:
        number, digit = divmod(number, 36)
        text = DIGITS[digit] + text
    return text
