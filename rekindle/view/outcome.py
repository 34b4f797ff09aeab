"""The outcome of a run, as text and as the object that `-o json` prints."""

from collections.abc import Mapping
from typing import Any

from argolocal.common.wording import format_duration
from argolocal.view import summary
from argolocal.view.summary import Status, format_facts, list_named_warnings, parse_timestamp
from rekindle.operations.results import (
    VERDICT_TEXTS,
    list_releases,
    list_verdicts,
    parse_metrics,
    read_parameters,
)


def build_outcome(run_name: str, run_status: Status, **more_fields: Any) -> dict[str, Any]:
    """Return the object that `-o json` prints about a run. `more_fields` adds or overrides keys
    (manifest_sha256, endpoint, ...)."""
    output_values = read_parameters(run_status)

    outcome_fields = {
        "manifest_sha256": None,
        "model_sha256": output_values.get("model_sha256"),
        "verdict": output_values.get("verdict"),
        "reason": output_values.get("reason"),
        "metrics": parse_metrics(output_values),
        "verdicts": list_verdicts(run_status),
        "endpoint": None,
        "run_id": output_values.get("run_id"),
    }
    return summary.make_json_object(run_name, run_status, **outcome_fields | more_fields)


def describe_success(
    run_status: Status, outcome_facts: Mapping[str, str | None], is_rekindle: bool
) -> str:
    """Return the outcome of a successful run as text, with one line per fact. `outcome_facts`
    (endpoint, commands, cost, ...): further lines, placed before the line with the duration.
    `is_rekindle` is True if Rekindle rendered the workflow; the outputs of other workflows, such as
    `verdict`, may have another meaning, and are not shown."""
    output_values = read_parameters(run_status) if is_rekindle else {}
    start_time = run_status.get("startedAt")
    finish_time = run_status.get("finishedAt")
    if start_time and finish_time:
        duration_text = format_duration(parse_timestamp(finish_time) - parse_timestamp(start_time))
    else:
        duration_text = None

    evaluations = []
    if is_rekindle and not output_values.get("verdict"):
        evaluations = list_verdicts(run_status)

    released_metrics = [
        evaluation_row["metrics"] for evaluation_row in evaluations if evaluation_row["version"]
    ]
    shown_metrics = (
        released_metrics[0] if len(released_metrics) == 1 else parse_metrics(output_values)
    )

    text_by_label = {
        "verdict": _describe_verdict(run_status, output_values),
        "reason": output_values.get("reason"),
        "metrics": "  ".join(
            f"{name} {metric_value:.4g}"
            for name, metric_value in shown_metrics.items()
            if metric_value is not None
        ),
        **outcome_facts,
        "took": duration_text,
    }

    labelled_rows = [
        (
            "judged",
            f"{evaluation_row['task']}: {evaluation_row['verdict']}. {evaluation_row['reason']}",
        )
        for evaluation_row in evaluations
    ]
    labelled_rows += text_by_label.items()
    if is_rekindle:
        warnings = list_named_warnings((run_status.get("nodes") or {}).values())
        labelled_rows += [("warning", text) for text in warnings]

    return format_facts(labelled_rows)


def _describe_verdict(run_status: Status, output_values: Mapping[str, str]) -> str:
    """Describe the verdict, and whether the model was released, because a positive verdict does not
    imply a release."""
    released_versions = list_releases(run_status)
    verdict_text = output_values.get("verdict", "")

    if not verdict_text:
        if released_versions:
            return f"released: {', '.join(sorted(map(str, released_versions)))}"
        return ""

    if verdict_text == "release" and not released_versions:
        return "release: the model passed the gate, but this pipeline has not released it"
    if output_values.get("unchanged"):
        return "same: nothing to train: the data, the code and the config did not change"
    if verdict_text in VERDICT_TEXTS:
        return f"{verdict_text}: {VERDICT_TEXTS[verdict_text]}"

    return ""
