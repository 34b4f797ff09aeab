"""The outcome of a run, as text and as the object that `-o json` prints."""

from collections.abc import Mapping
from typing import Any

from argolocal.common.wording import format_duration
from argolocal.view import summary
from argolocal.view.summary import Status, lines_of, named_warnings, timestamp
from rekindle.operations.results import VERDICTS, metrics, parameters, releases, verdicts


def as_json(name: str, status: Status, **facts: Any) -> dict[str, Any]:
    """Return the object that `-o json` prints. `facts` adds or overrides keys (manifest_sha256,
    endpoint, ...)."""
    values = parameters(status)

    fields = {
        "manifest_sha256": None,
        "model_sha256": values.get("model_sha256"),
        "verdict": values.get("verdict"),
        "reason": values.get("reason"),
        "metrics": metrics(values),
        "verdicts": verdicts(status),
        "endpoint": None,
        "run_id": values.get("run_id"),
    }
    return summary.as_json(name, status, **fields | facts)


def success(status: Status, facts: Mapping[str, str | None], is_rekindle: bool) -> str:
    """Return the outcome of a successful run as text, with one line per fact. `facts` (endpoint,
    commands, cost, ...): further lines, placed before the line with the duration. `is_rekindle`:
    Rekindle rendered the workflow, so outputs such as `verdict` have their meaning."""
    values = parameters(status) if is_rekindle else {}
    started = status.get("startedAt")
    finished = status.get("finishedAt")
    if started and finished:
        took = format_duration(timestamp(finished) - timestamp(started))
    else:
        took = None

    evaluations = []
    if is_rekindle and not values.get("verdict"):
        evaluations = verdicts(status)

    winners = [row["metrics"] for row in evaluations if row["version"]]
    figures = winners[0] if len(winners) == 1 else metrics(values)

    lines = {
        "verdict": _verdict(status, values),
        "reason": values.get("reason"),
        "metrics": "  ".join(
            f"{name} {value:.4g}" for name, value in figures.items() if value is not None
        ),
        **facts,
        "took": took,
    }

    rows = [("judged", f"{row['task']}: {row['verdict']}. {row['reason']}") for row in evaluations]
    rows += lines.items()
    if is_rekindle:
        warnings = named_warnings((status.get("nodes") or {}).values())
        rows += [("warning", text) for text in warnings]

    return lines_of(rows)


def _verdict(status: Status, values: Mapping[str, str]) -> str:
    """Describe the verdict, and whether the model was released, because a positive verdict does not
    imply a release."""
    released = releases(status)
    verdict = values.get("verdict", "")

    if not verdict:
        if released:
            return f"released: {', '.join(sorted(map(str, released)))}"
        return ""

    if verdict == "release" and not released:
        return "release: the model passed the gate, but this pipeline has not released it"
    if values.get("unchanged"):
        return "same: nothing to train: the data, the code and the config did not change"
    if verdict in VERDICTS:
        return f"{verdict}: {VERDICTS[verdict]}"

    return ""
