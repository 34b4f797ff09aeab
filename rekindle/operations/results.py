"""Read the results of a run from Argo's WorkflowStatus: verdicts, metrics, releases, exit code."""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from argolocal.common.json_text import to_json
from argolocal.view.summary import Status, outputs
from rekindle.errors import ConfigError
from rekindle.keys import AGAIN, TASK
from rekindle.kubernetes_names import REKINDLE_TOKEN

NOT_RELEASED = 3
ATTEMPT = re.compile(r"\(\d+\)$")  # end of the display name of an attempt, in a task with retries
VERDICTS = {
    "release": "released",
    "keep": "not released",
    "same": "nothing to release: this model is already serving",
    "taken back": "its canary was ended, so the previous version keeps serving",
}


def parameters(status: Status) -> dict[str, str]:
    """Return the global outputs of the workflow (globalName), by name; if the run has exactly one
    evaluation, include its results.

    If the canary was rolled back, or the source has no new data, this replaces the verdict.
    """
    values = outputs(status)
    evaluations = list(_evaluations(status).values())
    values.update(evaluations[0] if len(evaluations) == 1 else {})

    for node in list((status.get("nodes") or {}).values()):
        for p in (node.get("outputs") or {}).get("parameters") or []:
            verdict, _, reason = str(p.get("value", "")).partition(": ")
            if p["name"] == "run_id" and p.get("value"):
                # a step's output run_id is used if no global output has this name
                values.setdefault("run_id", p["value"])

            if p["name"] == "canary" and verdict == "taken back":
                values["verdict"] = verdict
                values["reason"] = reason

            if p["name"] == "unchanged" and p.get("value"):
                values["verdict"] = "same"
                values["reason"] = p["value"]
                values["unchanged"] = "yes"

    return values


def needs_token(workflow: Mapping[str, Any]) -> bool:
    """Return True if the model servers of a run need a token."""
    return f'"{REKINDLE_TOKEN}"' in to_json(workflow)


def costs(status: Status, workflow: Mapping[str, Any]) -> dict[str, Any]:
    """Return the costs of a run, as a sentence and by task; {} if its manifest has no prices."""
    from rekindle.training.cost import tariff
    from rekindle.training.cost.run_cost import compute_run_costs

    manifest = tariff.read_recorded_manifest(workflow)
    return compute_run_costs(status, manifest, tariff.read_prices(manifest))


def verdicts(status: Status) -> list[dict[str, Any]]:
    """Return a row for each evaluation: task, last verdict, reason, metrics, and the version of a
    released model."""
    versions = {release.evaluation: release.version for release in releases(status)}
    rows = [
        {"task": task, **row, "metrics": metrics(row), "version": versions.get(task)}
        for (task, _), row in _evaluations(status).items()
    ]
    return sorted(rows, key=lambda verdict: verdict["task"])


def _evaluations(status: Status) -> dict[tuple[str, str], dict[str, str]]:
    """Return the verdict, reason and metrics of each evaluation, by task and loop item; a repeated
    evaluation replaces the earlier one."""
    all_nodes = list((status.get("nodes") or {}).values())
    nodes = [node for node in all_nodes if node.get("type") == "Pod"]
    rows: dict[tuple[str, str], dict[str, str]] = {}

    # sort also by length, because a repeated evaluation runs in an inner DAG and has a longer name
    for node in sorted(nodes, key=lambda node: (node.get("finishedAt") or "", len(node["name"]))):
        values = outputs(node)
        inputs = outputs({"outputs": node.get("inputs")})

        if values.get("verdict") in VERDICTS and values.keys() & {"metrics", "champion"}:
            task, _, item = ATTEMPT.sub("", node.get("displayName") or node["name"]).partition("(")
            row = {name: values.get(name, "") for name in ("verdict", "reason", "metrics")}
            rows[inputs.get(TASK) or task.removesuffix(AGAIN), item] = row

    return rows


def metrics(values: Mapping[str, str]) -> dict[str, float | None]:
    """Return the metrics of the candidate by name, with None for NaN or infinity; {} if the run has
    no evaluation."""
    try:
        # a step of another program may write NaN
        numbers = json.loads(values.get("metrics") or "{}", parse_int=float)
    except (ValueError, RecursionError):
        return {}

    values_by_name = numbers.items() if isinstance(numbers, dict) else ()

    return {
        name: value if math.isfinite(value) else None
        for name, value in values_by_name
        if isinstance(value, float)
    }


@dataclass(frozen=True)
class Release:
    """A model version that a step registered, and the task that evaluated the model."""

    model: str
    version: str
    evaluation: str

    def __str__(self) -> str:
        return f"{self.model}@{self.version}" + (f" ({self.evaluation})" if self.evaluation else "")


def releases(status: Status) -> list[Release]:
    """Return the releases of a run, except releases whose last evaluation did not end with the
    verdict `release`."""
    last_verdicts = {task: row["verdict"] for (task, _), row in _evaluations(status).items()}

    registered = []
    for node in (status.get("nodes") or {}).values():
        values = _released(node)
        if values and node.get("phase") == "Succeeded" and node.get("type") == "Pod":
            model = values["model_uri"].split("/")[1]
            registered.append(Release(model, values["version"], _evaluation(node)))

    return [
        release
        for release in registered
        if last_verdicts.get(release.evaluation, "release") == "release"
    ]


def _released(node: Mapping[str, Any]) -> dict[str, str]:
    """Return the outputs of a step that registered a model version; {} for any other step."""
    values = outputs(node)
    # releases/NAME/HASH/
    has_release_key = values.get("model_uri", "").count("/") > 1
    if values.get("version") and "content" in values and has_release_key:
        return values
    return {}


def _evaluation(node: Mapping[str, Any]) -> str:
    """Return the task that wrote the input `report` of a step, from its key RUN/TASK/report; "" if
    unknown."""
    artifacts = (node.get("inputs") or {}).get("artifacts") or []
    keys = [
        (artifact.get("s3") or {}).get("key", "")
        for artifact in artifacts
        if artifact["name"] == "report"
    ]

    if keys and keys[0].count("/") == 2:
        return keys[0].split("/")[1]
    return ""


def exit_code(status: Status, is_rekindle: bool) -> int:
    """Return the exit code of a command for a completed run; 2 if a step rejected its config."""
    if status.get("phase") != "Succeeded":
        codes = {
            (node.get("outputs") or {}).get("exitCode")
            for node in (status.get("nodes") or {}).values()
        }
        if is_rekindle and str(ConfigError.exit_code) in codes:
            return 2
        return 1

    if not is_rekindle:
        return 0

    verdict = parameters(status).get("verdict")
    if verdict:
        if verdict in ("keep", "taken back"):
            return NOT_RELEASED
        return 0

    verdict_names = {row["verdict"] for row in verdicts(status)}
    if verdict_names and "same" not in verdict_names and not releases(status):
        return NOT_RELEASED

    return 0
