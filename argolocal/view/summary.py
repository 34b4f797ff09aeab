"""Summarizes a run as text and as a JSON object, from Argo's WorkflowStatus as plain data.

Node names are Argo's: a DAG task is `PARENT.TASK`, a member of a steps template `PARENT[GROUP].STEP`, an attempt of a
retried node `NAME(N)`; so names encode the tree.
"""

import json
import math
import re
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from argolocal.common.wording import minutes, visible
from rekindle.errors import ConfigError, did_you_mean

Status = Mapping[str, Any]

FAILED = ("Failed", "Error")
FINISHED = ("Succeeded", "Failed", "Error", "Skipped", "Omitted", "Cached")
KNOWN = re.compile(r"when ''([^' ]+)' == ''' evaluated false")  # Argo's message of a task that need not run
NOT_RELEASED = 3
VERDICTS = {
    "release": "released",
    "keep": "not released",
    "same": "nothing to release: this model is already serving",
    "taken back": "its canary did worse, and what served before serves on",
}
ERROR = re.compile(r"^(error: |Traceback)", re.MULTILINE)  # in the log of a step
GROUPS = ("DAG", "Steps", "StepGroup", "TaskGroup")


@dataclass(frozen=True)
class Step:
    """One node of a run, named without the run: `ship.release` instead of `demo-4k2xp.ship.release`."""

    name: str
    label: str
    depth: int
    kind: str
    phase: str
    started: str | None = None
    finished: str | None = None
    message: str = ""
    node: Mapping[str, Any] | None = None

    @property
    def seconds(self) -> float | None:
        """Its duration so far."""
        if not self.started:
            return None
        return round((timestamp(self.finished) if self.finished else time.time()) - timestamp(self.started), 3)


def timestamp(text: str) -> float:
    """RFC 3339 → unix seconds."""
    return datetime.fromisoformat(text).timestamp()


def duration(seconds: float | None) -> str:
    """`2.3 s`, `1 min 05 s`, `2 h 10 min`."""
    if seconds is None:
        return ""
    if seconds < 60:
        return f"{seconds:.1f} s"
    return minutes(seconds)


def planned(manifest: Mapping[str, Any]) -> list[str]:
    """The tasks of the entrypoint in the order of the manifest, so that a tree can show pending ones."""
    spec = manifest.get("spec", {})
    for template in spec.get("templates", []):
        if template.get("name") == spec.get("entrypoint"):
            groups = [template.get("dag", {}).get("tasks", []), *template.get("steps", [])]
            return [task["name"] for group in groups for task in group]
    return []


def check_step(name: str, step: str, manifest: Mapping[str, Any], logs: Iterable[str] = ()) -> None:
    """Raise ConfigError if neither a task of the manifest nor one of these `logs` has `step` in its name."""
    spec = (manifest.get("status") or {}).get("storedWorkflowTemplateSpec") or manifest.get("spec") or {}
    tasks: set[str] = set()
    for template in spec.get("templates") or []:
        groups = [(template.get("dag") or {}).get("tasks") or [], *(template.get("steps") or [])]
        tasks |= {task["name"] for group in groups for task in group}
    tasks = tasks or {name}  # a template of its own is all of the workflow
    # a part of a task's name, or more than it: `ship.release`, `prepare(0)`, `train-worker-1`
    longer = re.compile(rf"(^|\.)({'|'.join(map(re.escape, tasks))})($|[-.(\[])")
    if not any(step in name for name in (*tasks, *logs)) and not longer.search(step):
        hint = did_you_mean(step, tasks)
        raise ConfigError(f'{name} has no step called "{step}".{hint} Steps: {", ".join(sorted(tasks))}.')


def steps(name: str, status: Status, plan: Iterable[str] = ()) -> list[Step]:
    """The nodes of run `name`, each below its parent, then the tasks of `plan` that have not started."""
    unsorted = list((status.get("nodes") or {}).values())  # a copy: the runner may add nodes concurrently
    nodes = {n["name"]: n for n in sorted(unsorted, key=lambda n: n.get("startedAt") or "~")}
    children: dict[str, list[str]] = {}
    for node_name in nodes:
        if node_name != name:
            children.setdefault(_parent(node_name, nodes) or name, []).append(node_name)
    rows: list[Step] = []

    def add(parent: str, depth: int) -> None:
        for child in children.get(parent, []):
            node = nodes[child]
            tried_again = node.get("phase") in FAILED and nodes.get(parent, {}).get("phase") not in FINISHED
            only_attempt = _attempt(child, nodes) and len(children[parent]) == 1 and not tried_again
            hidden = node.get("type") == "StepGroup" or only_attempt
            if not hidden:
                row = _step(name, parent, node, depth)
                if row.kind == "Retry" and row.phase == "Running" and status.get("phase") in FINISHED:
                    # Argo leaves it running when it stops a run
                    row = _step(name, parent, {**node, **_end(last_attempt(status, row))}, depth)
                if (
                    row.kind == "Retry" and row.phase in FAILED
                ):  # the cause of the failure, not the reason for not retrying
                    row = replace(row, message=last_attempt(status, row).get("message") or row.message)
                rows.append(row)
            add(child, depth + (not hidden))

    add(name, 0)
    if name in nodes and all(row.name.startswith("onExit") for row in rows):
        rows.insert(0, _step(name, "", nodes[name], 0))
    started = {row.name for row in rows if row.depth == 0}
    waiting = [Step(task, task, 0, "", "Waiting") for task in plan if task not in started]
    exits = [row for row in rows if row.name.startswith("onExit")]
    return [row for row in rows if row not in exits] + waiting + exits


def _end(node: Mapping[str, Any]) -> dict[str, Any]:
    return {key: node[key] for key in ("phase", "finishedAt", "message") if key in node}


def leaves(rows: Iterable[Step]) -> list[Step]:
    """The steps that did work: neither groups nor single attempts."""
    return [row for row in rows if row.kind not in GROUPS and not row.label.startswith("(") and row.phase != "Waiting"]


def failed_step(rows: list[Step]) -> Step | None:
    """The step that failed first, or else one that is running; failed attempts of a successful retry do not count."""
    whole = [row for row in rows if not row.label.startswith("(") and row.phase in FAILED]
    failed = leaves(whole) or whole or leaves([row for row in rows if row.phase == "Running"])
    return min(failed, key=lambda row: (row.name.startswith("onExit"), row.finished or "~"), default=None)


def last_attempt(status: Status, step: Step) -> Mapping[str, Any]:
    """The node that did the work of a step: that of its pod, not its Retry node."""
    name = step.node["name"] if step.node else ""
    attempts = [n for n in status["nodes"].values() if re.fullmatch(re.escape(name) + r"\(\d+\)", n["name"])]
    return max(attempts, key=lambda n: n.get("startedAt") or "", default=step.node or {})


def as_json(name: str, status: Status, **facts: Any) -> dict[str, Any]:
    """The object that `-o json` prints. `facts` adds or overrides keys (manifest_sha256, endpoint, status, ...)."""
    outputs = parameters(status)
    result: dict[str, Any] = {"workflow": name, "phase": status.get("phase")}
    if status.get("message"):
        result["message"] = status["message"]
    result |= {"manifest_sha256": None, "model_sha256": outputs.get("model_sha256"), "verdict": outputs.get("verdict")}
    result |= {"reason": outputs.get("reason"), "metrics": metrics(outputs), "verdicts": verdicts(status)}
    result |= {"endpoint": None, "run_id": outputs.get("run_id")}
    result["steps"] = [
        {key: getattr(row, key) for key in ("name", "phase", "started", "finished", "seconds", "message")}
        for row in leaves(steps(name, status))
    ]
    result["warnings"] = warnings((status.get("nodes") or {}).values())
    return result | facts


def parameters(status: Status) -> dict[str, str]:
    """The global outputs of the workflow (globalName), by name; what a canary found replaces the gate's verdict."""
    outputs = _outputs(status)
    for node in list((status.get("nodes") or {}).values()):
        for p in (node.get("outputs") or {}).get("parameters") or []:
            verdict, _, reason = str(p.get("value", "")).partition(": ")
            if p["name"] == "run_id" and p.get("value"):
                outputs.setdefault("run_id", p["value"])  # of the last step, where no other made it
            if p["name"] == "canary" and verdict == "taken back":
                outputs |= {"verdict": verdict, "reason": reason}
    return outputs


def _outputs(node: Mapping[str, Any]) -> dict[str, str]:
    """The output parameters of a node, or of the whole workflow, by name."""
    return {p["name"]: p.get("value", "") for p in (node.get("outputs") or {}).get("parameters") or []}


def warnings(nodes: Iterable[Mapping[str, Any]]) -> list[str]:
    """The texts of the outputs `warnings`, which are JSON lists, each once."""
    texts: list[str] = []
    for node in list(nodes):
        for p in (node.get("outputs") or {}).get("parameters") or []:
            if p["name"] == "warnings":
                with suppress(ValueError):
                    found = json.loads(p.get("value") or "")
                    texts += map(str, found) if isinstance(found, list) else []
    return list(dict.fromkeys(texts))


def verdicts(status: Status) -> list[dict[str, Any]]:
    """Return the task, verdict, reason and metrics of each evaluation of the run."""
    found = []
    for node in list((status.get("nodes") or {}).values()):
        outputs = _outputs(node)
        if node.get("type") == "Pod" and outputs.get("verdict") in VERDICTS and "metrics" in outputs:
            task = node["displayName"].partition("(")[0]
            facts = {"verdict": outputs["verdict"], "reason": outputs.get("reason"), "metrics": metrics(outputs)}
            found.append({"task": task, **facts})
    return sorted(found, key=lambda verdict: verdict["task"])


def metrics(outputs: Mapping[str, str]) -> dict[str, float | None]:
    """The metrics of the candidate by name, None for what is not a number; empty if nothing was judged."""
    try:
        values = json.loads(outputs.get("metrics") or "{}")
    except ValueError:
        return {}
    return {name: value if math.isfinite(value) else None for name, value in values.items()}


def log_of(name: str, status: Status, step: Step | None, logs: Path, deployments: Path) -> Path | None:
    """The log that explains the outcome of a step: of its pod, or of a pod of the job or deployment it applied."""
    if step is None:
        return None
    node = last_attempt(status, step)
    pod = f"{name}-{node.get('templateName', '')}-{node.get('id', '').rpartition('-')[2]}"
    if (logs / f"{pod}.log").exists():
        return logs / f"{pod}.log"
    paths = list(logs.glob(f"{name}-{step.label}-*.log"))
    if node.get("templateName") == "deployment":
        paths = sorted(deployments.glob("*/logs/*.log"), key=lambda path: path.stat().st_mtime)[-1:]
    return with_first_error(paths)


def with_first_error(paths: list[Path]) -> Path | None:
    """The oldest of these logs that holds an error, else the oldest."""
    errors = [path for path in paths if ERROR.search(end_of(path, 65536))]
    return min(errors or paths, key=lambda path: path.stat().st_mtime, default=None)


def end_of(path: Path, size: int) -> str:
    """The last `size` bytes of a file as text."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - size))
        return file.read().decode(errors="replace")


def log_tail(text: str, lines: int) -> list[str]:
    """The last lines of a log; from the last `error: ...` line, if there is one."""
    nonempty = [line.rstrip() for line in text.splitlines() if line.strip()]
    last = max((i for i, line in enumerate(nonempty) if line.startswith("error: ")), default=None)
    return nonempty[-lines:] if last is None else nonempty[last : last + lines]


def success(status: Status, facts: Mapping[str, str | None], ours: bool) -> str:
    """The outcome, one line per fact. `facts` (endpoint, where to look, ...) precede the duration.

    Only if `ours`, the outputs are a verdict and metrics.
    """
    outputs = parameters(status) if ours else {}
    took = timestamp(status["finishedAt"]) - timestamp(status["startedAt"])
    figures = [f"{name} {value:.4g}" for name, value in metrics(outputs).items() if value is not None]
    lines = {
        "verdict": _verdict(status, outputs.get("verdict", "")),
        "reason": outputs.get("reason"),
        "metrics": "  ".join(figures),
        **facts,
        "took": duration(took),
    }
    several = verdicts(status) if ours and not outputs.get("verdict") else []
    judged = [f"{verdict['task']}: {verdict['verdict']}. {verdict['reason']}" for verdict in several]
    rows = [("judged", text) for text in judged] + [(name, text) for name, text in lines.items() if text]
    rows += [("warning", text) for text in warnings((status.get("nodes") or {}).values()) if ours]
    return "\n" + "".join(f"{name:9} {visible(text)}\n" for name, text in rows)


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
    outputs = _outputs(node)
    return outputs.get("version", "") if {"model_uri", "content"} <= outputs.keys() else ""


def failure(name: str, status: Status, log: str, place: str | None, resume: str, why: str = "") -> str:
    """At most 15 lines: the step, the cause, the end and location of its log, and the command that resumes the run.

    `why` (the error of the runner itself, if any) takes precedence over the failure of a step.
    """
    row = failed_step(steps(name, status))
    lines = [f"{name}: {status.get('phase') or 'stopped'}" + (f" in step {row.name}" if row else "")]
    lines += [f"  {line}" for line in log_tail(log, 7)]
    message = (row and row.message) or status.get("message") or ""
    cause = why or last_error(log) or message
    rest = str(message).replace(cause, "").rstrip(": ")  # which holds what the step told the kubelet
    cause += f" ({rest})" if rest else ""
    lines += [
        f"step    {row.name if row else 'none: ' + str(status.get('message') or '')}",
        f"cause   {' '.join(str(cause).split())[:600]}",
        f"log     {place}" if place else "",
        f"resume  {resume}",
    ]
    return visible("\n".join(line for line in lines if line))


def last_error(log: str) -> str:
    """The last error that a step of ours wrote in its log: of a job, more than its failed condition says."""
    errors = [line.removeprefix("error: ") for line in log.splitlines() if line.startswith("error: ")]
    return errors[-1] if errors else ""


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


def _parent(name: str, nodes: Mapping[str, Any]) -> str | None:
    """The longest other node name that is a prefix of `name` before `.`, `[` or `(`."""
    cuts = [i for i, c in enumerate(name) if c in ".[("]
    return next((name[:i] for i in reversed(cuts) if name[:i] in nodes), None)


def _attempt(name: str, nodes: Mapping[str, Any]) -> bool:
    parent = _parent(name, nodes)
    return parent is not None and nodes[parent].get("type") == "Retry" and name[len(parent)] == "("


def _step(workflow: str, parent: str, node: Mapping[str, Any], depth: int) -> Step:
    name = node["name"]
    path = re.sub(r"^\[\d+\]|(?<=[^.])\[\d+\](?=\.)", "", name.removeprefix(workflow)).lstrip(".") or workflow
    label = re.sub(r"^\[\d+\]", "", name.removeprefix(parent)).lstrip(".") or path
    known = KNOWN.fullmatch(node.get("message") or "")
    return Step(
        name=path,
        label=label,
        depth=depth,
        kind=node.get("type", ""),
        phase="Cached" if known else node.get("phase") or "Pending",
        started=node.get("startedAt"),
        finished=node.get("finishedAt"),
        message=f"by {known[1]}" if known else node.get("message") or "",
        node=node,
    )
