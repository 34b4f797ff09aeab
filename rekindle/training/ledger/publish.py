"""Publishes the report of a run: metrics and tags for MLflow, and files with text, JSON and the
timeline."""

from pathlib import Path
from typing import Any

from argolocal.common.json_text import to_json
from rekindle import tracking
from rekindle.errors import say
from rekindle.training.ledger.ledger_summary import Summary

REPORTED_COUNTS = (
    "preemptions",
    "steps_repeated",
    "steps_per_second",
    "generations",
    "coordinator_restarts",
)


def compute_metrics(summary: Summary, prefix: str) -> dict[str, float]:
    """Return MLflow metrics whose names start with `prefix`: worker-seconds by kind, and counts."""
    report = summary.as_json()
    values = {
        f"worker_seconds_{kind}": seconds for kind, seconds in report["worker_seconds"].items()
    }
    values["wall_seconds"] = summary.ended - summary.began
    values["bytes_uploaded"] = summary.uploaded
    values.update({name: report[name] for name in REPORTED_COUNTS})
    return {f"{prefix}/{name}": value for name, value in values.items()}


def compute_tags(summary: Summary) -> dict[str, Any]:
    """Return MLflow tags by which users can filter runs."""
    values = {
        "preemptions": summary.preemptions,
        "steps_repeated": summary.repeated,
        "workers": len(summary.intervals),
        "device": summary.run.get("device", "unknown"),
    }
    return {f"{tracking.PREFIX}{name}": value for name, value in values.items()}


def write_files(summary: Summary, folder: Path, report: dict[str, Any]) -> None:
    """Write `summary.json`, `story.txt` and, if matplotlib is installed, `timeline.png` to
    `folder`."""
    from rekindle.training.ledger.plot import draw

    folder.mkdir(parents=True, exist_ok=True)
    words = report.pop("words")
    (folder / "summary.json").write_text(to_json(report, indent=1))
    (folder / "story.txt").write_text("\n".join(words) + "\n")
    try:
        draw(summary, folder / "timeline.png")
    except ImportError as error:
        say(f"timeline.png is not drawn: {error}. Install matplotlib in the image of `report`.")
