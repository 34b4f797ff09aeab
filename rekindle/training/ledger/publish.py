"""Publishes the report of a run: metrics and tags for MLflow, and files with text, JSON and the
timeline."""

from pathlib import Path
from typing import Any

from argolocal.common.json_text import to_json
from rekindle import tracking
from rekindle.errors import write_stderr
from rekindle.training.ledger.ledger_summary import LedgerSummary

REPORTED_COUNTS = (
    "preemptions",
    "steps_repeated",
    "steps_per_second",
    "generations",
    "coordinator_restarts",
)


def compute_metrics(ledger_summary: LedgerSummary, name_prefix: str) -> dict[str, float]:
    """Return MLflow metrics whose names start with `name_prefix`: worker-seconds by kind, and
    counts."""
    summary_report = ledger_summary.as_json()
    metric_values = {
        f"worker_seconds_{interval_kind}": worker_seconds
        for interval_kind, worker_seconds in summary_report["worker_seconds"].items()
    }
    metric_values["queued_seconds"] = summary_report["queued_seconds"]
    if ledger_summary.harvest:
        metric_values.update(
            harvested_worker_seconds=ledger_summary.harvest.worker_seconds,
            harvested_steps=ledger_summary.harvest.steps,
            seconds_without_harvest=ledger_summary.harvest.seconds_without,
        )
    for capacity, alive_seconds in ledger_summary.capacity_seconds.items():
        metric_values[f"{capacity.replace('-', '_')}_worker_seconds"] = alive_seconds
    metric_values["wall_seconds"] = ledger_summary.ended - ledger_summary.began
    metric_values["bytes_uploaded"] = ledger_summary.uploaded
    metric_values.update(
        {metric_name: summary_report[metric_name] for metric_name in REPORTED_COUNTS}
    )
    return {
        f"{name_prefix}/{metric_name}": metric_value
        for metric_name, metric_value in metric_values.items()
    }


def compute_tags(ledger_summary: LedgerSummary) -> dict[str, Any]:
    """Return the MLflow tags of a training, by which users can filter runs."""
    tag_values = {
        "preemptions": ledger_summary.preemptions,
        "steps_repeated": ledger_summary.repeated,
        "workers": len(ledger_summary.intervals),
        "device": ledger_summary.run.get("device", "unknown"),
    }
    return {
        f"{tracking.TAG_PREFIX}{tag_name}": tag_value for tag_name, tag_value in tag_values.items()
    }


def write_report_files(ledger_summary: LedgerSummary, folder: Path, report: dict[str, Any]) -> None:
    """Write `summary.json`, `story.txt` and, if matplotlib is installed, `timeline.png` to
    `folder`."""
    from rekindle.training.ledger.plot import draw_timeline

    folder.mkdir(parents=True, exist_ok=True)
    report_sentences = report.pop("words")
    (folder / "summary.json").write_text(to_json(report, indent=1))
    (folder / "story.txt").write_text("\n".join(report_sentences) + "\n")
    try:
        draw_timeline(ledger_summary, folder / "timeline.png")
    except ImportError as error:
        write_stderr(
            f"timeline.png is not drawn: {error}. Install matplotlib in the image of `report`."
        )
