"""Summarize Argo's WorkflowStatus (plain data) of a run as text and as a JSON object.

In Argo, the name of a node starts with the name of its parent in the tree: a DAG task is
`PARENT.TASK`, a step `PARENT[GROUP].STEP`, and an attempt of a retried node `NAME(N)`.
"""

import re
import time
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from argolocal.common import causes
from argolocal.common.json_text import loads
from argolocal.common.wording import format_duration, visible
from argolocal.errors import ConfigError, did_you_mean
from argolocal.manifest.allowed_values import FAILED, FULFILLED

Status = Mapping[str, Any]

FINISHED = FULFILLED | {"Cached"}
# Argo's message for a task with a cached result
CACHED_MESSAGE = re.compile(r"when ''([^' ]+)' == ''' evaluated false")
ERROR = re.compile(r"^(error: |Traceback)", re.MULTILINE)  # start of an error in the log of a step
GROUP_TYPES = ("DAG", "Steps", "StepGroup", "TaskGroup")


@dataclass(frozen=True)
class Step:
    """One node of a run. Its `name` does not start with the name of the run: it is `ship.release`
    instead of `demo-4k2xp.ship.release`."""

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
        """Duration of the step until its end, or until now. None if the step has not started."""
        if not self.started:
            return None
        end = timestamp(self.finished) if self.finished else time.time()
        return round(end - timestamp(self.started), 3)


def timestamp(text: str) -> float:
    """Convert a time in the format of RFC 3339 to unix seconds."""
    return datetime.fromisoformat(text).timestamp()


def _tasks(template: Mapping[str, Any]) -> list[str]:
    """Return the names of the tasks or steps of a template."""
    groups = [(template.get("dag") or {}).get("tasks") or [], *(template.get("steps") or [])]
    return [task["name"] for group in groups for task in group]


def list_planned_tasks(manifest: Mapping[str, Any]) -> list[str]:
    """Return the names of the entrypoint's tasks in the order of the manifest."""
    spec = manifest.get("spec", {})
    entries = (
        template
        for template in spec.get("templates", [])
        if template.get("name") == spec.get("entrypoint")
    )
    return _tasks(next(entries, {}))


def check_step(name: str, step: str, manifest: Mapping[str, Any], logs: Iterable[str] = ()) -> None:
    """Raise ConfigError if `step` is unknown. It is known if a task or log has a name that contains
    `step`, or if `step` contains the name of a task."""
    spec = (
        (manifest.get("status") or {}).get("storedWorkflowTemplateSpec")
        or manifest.get("spec")
        or {}
    )

    tasks = {task for template in spec.get("templates") or [] for task in _tasks(template)}
    tasks = tasks or {name}  # the workflow has no tasks, because it consists of a single template

    # matches longer names that contain a task's name, such as `ship.release`, `prepare(0)` or
    # `train-worker-1`
    longer_name = re.compile(rf"(^|\.)({'|'.join(map(re.escape, tasks))})($|[-.(\[])")
    if not any(step in name for name in (*tasks, *logs)) and not longer_name.search(step):
        hint = did_you_mean(step, tasks)
        raise ConfigError(
            f'the step "{step}" does not exist in {name}.{hint} Steps: {", ".join(sorted(tasks))}.'
        )


def steps(name: str, status: Status, plan: Iterable[str] = ()) -> list[Step]:
    """Return the steps of run `name`: its nodes, each after its parent, then the tasks of `plan`
    that have not started."""
    # copy the nodes, because the runner may add a node at any time
    nodes_by_start = sorted(
        list((status.get("nodes") or {}).values()), key=lambda node: node.get("startedAt") or "~"
    )
    nodes = {node["name"]: node for node in nodes_by_start}
    children: dict[str, list[str]] = {}

    lengths = {len(node_name) for node_name in nodes}
    parents = {node_name: _parent(node_name, nodes, lengths) for node_name in nodes}

    for node_name, parent in parents.items():
        if node_name != name:
            children.setdefault(parent or name, []).append(node_name)

    rows: list[Step] = []

    def add(parent: str, depth: int) -> None:
        for child in children.get(parent, []):
            node = nodes[child]
            will_be_retried = (
                node.get("phase") in FAILED and nodes.get(parent, {}).get("phase") not in FINISHED
            )
            is_only_attempt = (
                _is_attempt(child, parents[child], nodes)
                and len(children[parent]) == 1
                and not will_be_retried
            )

            is_hidden = node.get("type") == "StepGroup" or is_only_attempt
            if not is_hidden:
                row = _step(name, parent, node, depth)
                if (
                    row.kind == "Retry"
                    and row.phase == "Running"
                    and status.get("phase") in FINISHED
                ):
                    # Argo leaves the Retry node of a stopped run incomplete, so use the last
                    # attempt
                    last = last_attempt(status, row)
                    end = {
                        key: last[key] for key in ("phase", "finishedAt", "message") if key in last
                    }
                    row = _step(name, parent, {**node, **end}, depth)

                if row.kind == "Retry" and row.phase == "Running":
                    row = _with_waiting_attempt(row, status)
                if row.kind == "Retry" and row.phase in FAILED:  # show why the last attempt failed
                    row = replace(row, message=_root_message(row, status))

                rows.append(row)

            add(child, depth + (not is_hidden))

    add(name, 0)
    if name in nodes and all(row.name.startswith("onExit") for row in rows):
        rows.insert(0, _step(name, "", nodes[name], 0))

    started = {row.name for row in rows if row.depth == 0}
    waiting = [Step(task, task, 0, "", "Waiting") for task in plan if task not in started]
    exit_rows = [row for row in rows if row.name.startswith("onExit")]

    return [row for row in rows if row not in exit_rows] + waiting + exit_rows


def _root_message(row: Step, status: Status) -> str:
    """Return the message of the attempt that made a retried step fail."""
    return causes.find_root_message(
        row.message, [str(node.get("message") or "") for node in _attempts(status, row)]
    )


def run_message(name: str, status: Status) -> str:
    """Return the message of a run. If it only refers to a node, return the message of the failed
    step."""
    message = str(status.get("message") or "")
    if not message or not causes.is_secondary(message):
        return message
    root = next(
        (node for node in list((status.get("nodes") or {}).values()) if node["name"] == name), None
    )
    row = failed_step(steps(name, status)) or (_step(name, "", root, 0) if root else None)
    return (_root_message(row, status) if row else "") or message


def _with_waiting_attempt(row: Step, status: Status) -> Step:
    """If the last attempt of a retried step is active and has a message, return the step with this
    attempt's phase and message."""
    last = last_attempt(status, row)
    message = str(last.get("message") or "")
    if last.get("phase") not in ("Pending", "Running") or not message:
        return row
    return replace(row, phase=last["phase"], message=message)


def leaves(rows: Iterable[Step]) -> list[Step]:
    """Return the steps that have started. Groups of steps, and the attempts of retried steps, are
    left out."""
    return [
        row
        for row in rows
        if row.kind not in GROUP_TYPES and not row.label.startswith("(") and row.phase != "Waiting"
    ]


def failed_step(rows: list[Step]) -> Step | None:
    """Return the step that failed first, or else a running step. A step that succeeded in a retry
    does not count as failed."""
    failed_steps = [row for row in rows if not row.label.startswith("(") and row.phase in FAILED]
    failed = (
        leaves(failed_steps)
        or failed_steps
        or leaves([row for row in rows if row.phase == "Running"])
    )
    return min(
        failed, key=lambda row: (row.name.startswith("onExit"), row.finished or "~"), default=None
    )


def last_attempt(status: Status, step: Step) -> Mapping[str, Any]:
    """Return the node of the last attempt of a step, or the step's own node if the step is not
    retried."""
    attempts = _attempts(status, step)
    if attempts:
        return attempts[-1]
    return step.node or {}


def _attempts(status: Status, step: Step) -> list[Mapping[str, Any]]:
    """Return the nodes of a step's attempts, from the first to the last attempt."""
    node = step.node or {}
    name = node.get("name", "")
    nodes = status["nodes"]
    # search only the children of the node, because a search of all nodes is slow in a large run
    children = [nodes[id] for id in node.get("children") or [] if id in nodes]
    attempts = [
        other
        for other in children or list(nodes.values())
        if causes.attempt_number(other["name"]) >= 0 and other["name"].rpartition("(")[0] == name
    ]
    return sorted(attempts, key=lambda node: causes.attempt_number(node["name"]))


def as_json(name: str, status: Status, **facts: Any) -> dict[str, Any]:
    """Return the object that `-o json` prints. `facts`: keys to add or to override. They come
    before the key `steps`."""
    result: dict[str, Any] = {"workflow": name, "phase": status.get("phase")}

    message = run_message(name, status)
    if message:
        result["message"] = causes.extract_cause(message)

    result.update(facts)
    result["steps"] = [
        {key: getattr(row, key) for key in ("name", "phase", "started", "finished", "seconds")}
        | {"message": causes.extract_cause(row.message)}
        for row in leaves(steps(name, status))
    ]
    return result | {"warnings": warnings((status.get("nodes") or {}).values())}


def outputs(node: Mapping[str, Any]) -> dict[str, str]:
    """Return the values of the output parameters in a node, or in a workflow's status, by name."""
    parameters = (node.get("outputs") or {}).get("parameters") or []
    return {parameter["name"]: parameter.get("value", "") for parameter in parameters}


def warnings(nodes: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the distinct texts in the outputs named `warnings`, which are JSON lists."""
    texts: list[str] = []
    for node in list(nodes):
        with suppress(ValueError):
            values = loads(str(outputs(node).get("warnings") or ""))
            texts += map(str, values) if isinstance(values, list) else []

    return list(dict.fromkeys(texts))


def named_warnings(nodes: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the distinct warnings of all steps, each with the name of its step."""
    steps_of: dict[str, str] = {}
    for node in list(nodes):
        # show warnings of an attempt, such as prepare(0), under the name of its step
        step_name = re.sub(
            r"\(\d+\)$",
            "",
            str(node.get("displayName") or node.get("name") or "").rpartition(".")[2],
        )
        for text in warnings([node]):
            steps_of.setdefault(text, step_name)
    return [f"{step_name}: {text}" if step_name else text for text, step_name in steps_of.items()]


def pod_of(name: str, node: Mapping[str, Any]) -> str:
    """Return the name of a node's pod."""
    if node.get("name") == name:
        return name
    template = (node.get("templateRef") or {}).get("template") or node.get("templateName", "")
    return f"{name}-{template}-{node.get('id', '').rpartition('-')[2]}"


def log_of(
    name: str, status: Status, step: Step | None, logs: Path, deployments: Path
) -> Path | None:
    """Return the log that explains the outcome of a step: the log of its pod, or of a pod of its
    job or Deployment."""
    if step is None:
        return None
    node = last_attempt(status, step)
    log = logs / f"{pod_of(name, node)}.log"
    if log.exists():
        return log
    return applied_log(name, node, step.label, logs, deployments)


def applied_log(
    name: str, node: Mapping[str, Any], task: str, logs: Path, deployments: Path
) -> Path | None:
    """Return the log that explains the outcome of the job or Deployment that a step has applied."""
    paths = list(logs.glob(f"{name}-{task}-*.log"))
    if str(node.get("templateName")).startswith("deployment"):
        paths = sorted(deployments.glob("*/logs/*.log"), key=lambda path: path.stat().st_mtime)[-1:]
    return find_first_error(paths)


def find_first_error(paths: list[Path]) -> Path | None:
    """Return the least recently written log that contains an error, or else the least recently
    written log."""
    errors = [path for path in paths if ERROR.search(read_end(path, 65536))]
    return min(errors or paths, key=lambda path: path.stat().st_mtime, default=None)


def read_end(path: Path, size: int) -> str:
    """Return the last `size` bytes of a file as text."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - size))
        return file.read().decode(errors="replace")


def log_tail(text: str, lines: int) -> list[str]:
    """Return up to `lines` lines of a log, starting at the last `error: ...` line, or else the last
    lines."""
    nonempty = [line.rstrip() for line in text.splitlines() if line.strip()]
    last = max((i for i, line in enumerate(nonempty) if line.startswith("error: ")), default=None)
    if last is None:
        return nonempty[-lines:]
    return nonempty[last : last + lines]


def success(status: Status, facts: Mapping[str, str | None]) -> str:
    """Return the outcome of a run as a text: one line per fact, then its duration and its
    warnings."""
    elapsed = format_duration(timestamp(status["finishedAt"]) - timestamp(status["startedAt"]))
    warning_facts = [
        ("warning", text) for text in named_warnings((status.get("nodes") or {}).values())
    ]
    return lines_of([*facts.items(), ("took", elapsed), *warning_facts])


def lines_of(facts: Iterable[tuple[str, str | None]]) -> str:
    """Format facts as lines of name and value. Facts without a value are left out."""
    return "\n" + "".join(f"{name:9} {visible(text)}\n" for name, text in facts if text)


def failure(
    name: str,
    status: Status,
    log: str,
    log_path: str | None,
    resume_command: str,
    runner_error: str = "",
) -> str:
    """Describe a failed run in at most 15 lines: the step, the cause, the end and path of its log,
    two warnings, and how to resume.

    If the runner itself had an error (`runner_error`), this error is shown instead of the failure
    of a step.
    """
    row = failed_step(steps(name, status))
    warning_texts = warnings((status.get("nodes") or {}).values())
    lines = [
        f"{name}: {status.get('phase') or 'stopped'}" + (f" in step {row.name}" if row else "")
    ]
    lines += [f"  {line}" for line in log_tail(log, 7)]
    message = str((row and row.message) or run_message(name, status))
    cause = runner_error or last_error(log) or causes.extract_cause(message)

    # show the rest of the message, such as a termination message, unless the log already contains
    # it
    if causes.extract_cause(message) != message:
        details = ""
    else:
        details = message.replace(cause, "").rstrip(": ")

    cause += f" ({details})" if details else ""
    lines += [
        f"step    {row.name if row else 'none: ' + run_message(name, status)}",
        f"cause   {' '.join(str(cause).split())[:600]}",
        f"log     {log_path}" if log_path else "",
        *(f"warning {' '.join(text.split())[:300]}" for text in warning_texts[:2]),
        f"resume  {resume_command}",
    ]
    return visible("\n".join(line for line in lines if line))


def last_error(log: str) -> str:
    """Return the text of the last `error: ...` line of a log, or ""."""
    errors = [
        line.removeprefix("error: ") for line in log.splitlines() if line.startswith("error: ")
    ]
    if errors:
        return errors[-1]
    return ""


def _parent(name: str, nodes: Mapping[str, Any], lengths: Collection[int]) -> str | None:
    """Return the name of the parent node: the longest node name that is a prefix of `name` and is
    followed by `.`, `[` or `(`. `lengths`: the set of all name lengths. It limits the search,
    because a loop item may contain these characters many times."""
    cut_indexes = [i for i, c in enumerate(name) if c in ".[(" and i in lengths]
    return next((name[:i] for i in reversed(cut_indexes) if name[:i] in nodes), None)


def _is_attempt(name: str, parent: str | None, nodes: Mapping[str, Any]) -> bool:
    return parent is not None and nodes[parent].get("type") == "Retry" and name[len(parent)] == "("


def _step(workflow: str, parent: str, node: Mapping[str, Any], depth: int) -> Step:
    name = node["name"]
    path = (
        re.sub(r"^\[\d+\]|(?<=[^.])\[\d+\](?=\.)", "", name.removeprefix(workflow)).lstrip(".")
        or workflow
    )
    label = re.sub(r"^\[\d+\]", "", name.removeprefix(parent)).lstrip(".") or path
    cached = CACHED_MESSAGE.fullmatch(node.get("message") or "")

    return Step(
        name=path,
        label=label,
        depth=depth,
        kind=node.get("type", ""),
        phase="Cached" if cached else node.get("phase") or "Pending",
        started=node.get("startedAt"),
        finished=node.get("finishedAt"),
        message=f"by {cached[1]}" if cached else node.get("message") or "",
        node=node,
    )
