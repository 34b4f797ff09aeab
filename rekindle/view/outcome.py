"""What became of the model of a run, from Argo's WorkflowStatus as plain data: verdict, metrics, release, exit code."""

import json
import math
from collections.abc import Mapping
from typing import Any

from argolocal.common.wording import duration
from argolocal.view import summary
from argolocal.view.summary import Status, lines_of, outputs, timestamp, warnings
from rekindle.errors import ConfigError

NOT_RELEASED = 3
VERDICTS = {
    "release": "released",
    "keep": "not released",
    "same": "nothing to release: this model is already serving",
    "taken back": "its canary did worse, and what served before serves on",
}


def as_json(name: str, status: Status, **facts: Any) -> dict[str, Any]:
    """The object that `-o json` prints. `facts` adds or overrides keys (manifest_sha256, endpoint, status, ...)."""
    values = parameters(status)
    known = {key: values.get(key) for key in ("model_sha256", "verdict", "reason")}
    judged = {"metrics": metrics(values), "verdicts": verdicts(status)}
    found = {"manifest_sha256": None} | known | judged | {"endpoint": None, "run_id": values.get("run_id")}
    return summary.as_json(name, status, **found | facts)


def parameters(status: Status) -> dict[str, str]:
    """The global outputs of the workflow (globalName), by name; what a canary found replaces the gate's verdict."""
    found = outputs(status)
    for node in list((status.get("nodes") or {}).values()):
        for p in (node.get("outputs") or {}).get("parameters") or []:
            verdict, _, reason = str(p.get("value", "")).partition(": ")
            if p["name"] == "run_id" and p.get("value"):
                found.setdefault("run_id", p["value"])  # of the last step, where no other made it
            if p["name"] == "canary" and verdict == "taken back":
                found |= {"verdict": verdict, "reason": reason}
    return found


def verdicts(status: Status) -> list[dict[str, Any]]:
    """Return the task, verdict, reason and metrics of each evaluation of the run."""
    found = []
    for node in list((status.get("nodes") or {}).values()):
        values = outputs(node)
        if node.get("type") == "Pod" and values.get("verdict") in VERDICTS and "metrics" in values:
            task = node["displayName"].partition("(")[0]
            facts = {"verdict": values["verdict"], "reason": values.get("reason"), "metrics": metrics(values)}
            found.append({"task": task, **facts})
    return sorted(found, key=lambda verdict: verdict["task"])


def metrics(values: Mapping[str, str]) -> dict[str, float | None]:
    """The metrics of the candidate by name, None for what is not a number; empty if nothing was judged."""
    try:
        numbers = json.loads(values.get("metrics") or "{}")
    except ValueError:
        return {}
    return {name: value if math.isfinite(value) else None for name, value in numbers.items()}


def success(status: Status, facts: Mapping[str, str | None], ours: bool) -> str:
    """The outcome, one line per fact. `facts` (endpoint, where to look, ...) precede the duration.

    Only if `ours`, the outputs are a verdict and metrics.
    """
    values = parameters(status) if ours else {}
    took = timestamp(status["finishedAt"]) - timestamp(status["startedAt"])
    figures = [f"{name} {value:.4g}" for name, value in metrics(values).items() if value is not None]
    lines = {
        "verdict": _verdict(status, values.get("verdict", "")),
        "reason": values.get("reason"),
        "metrics": "  ".join(figures),
        **facts,
        "took": duration(took),
    }
    several = verdicts(status) if ours and not values.get("verdict") else []
    judged = [f"{verdict['task']}: {verdict['verdict']}. {verdict['reason']}" for verdict in several]
    rows = [("judged", text) for text in judged] + list(lines.items())
    rows += [("warning", text) for text in warnings((status.get("nodes") or {}).values()) if ours]
    return lines_of(rows)


def _verdict(status: Status, verdict: str) -> str:
    """What became of the model: a verdict alone releases nothing."""
    released = releases(status)
    if not verdict:
        return f"released: {', '.join(sorted(released))}" if released else ""
    if verdict == "release" and not released:
        return "release: it may be released; this pipeline has not done so"
    return f"{verdict}: {VERDICTS[verdict]}" if verdict in VERDICTS else ""


def releases(status: Status) -> list[str]:
    """The steps that registered a version, each with it: `release 3`."""
    return [
        f"{node['displayName'].partition('(')[0]} {version}"
        for node in (status.get("nodes") or {}).values()
        if node.get("phase") == "Succeeded" and node.get("type") == "Pod" and (version := _released(node))
    ]


def _released(node: Mapping[str, Any]) -> str:
    """The version that a step registered, if it is one that does."""
    values = outputs(node)
    return values.get("version", "") if {"model_uri", "content"} <= values.keys() else ""


def exit_code(status: Status, ours: bool) -> int:
    """The exit code of a completed run; 2 if a step of `ours` rejected its config."""
    if status.get("phase") != "Succeeded":
        codes = {(node.get("outputs") or {}).get("exitCode") for node in (status.get("nodes") or {}).values()}
        return 2 if ours and str(ConfigError.exit_code) in codes else 1
    if not ours:
        return 0
    if one := parameters(status).get("verdict"):
        return NOT_RELEASED if one in ("keep", "taken back") else 0
    several = {verdict["verdict"] for verdict in verdicts(status)}
    return NOT_RELEASED if "keep" in several and "same" not in several and not releases(status) else 0
