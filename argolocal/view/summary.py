"""Summarize Argo's WorkflowStatus (plain data) of a run as text and as a JSON object.

In Argo, the name of a node starts with the name of its parent in the tree: a DAG task is
`PARENT.TASK`, a step `PARENT[GROUP].STEP`, and an attempt of a retried node `NAME(N)`.
"""

import re
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from argolocal.common import causes
from argolocal.common.json_text import loads
from argolocal.common.wording import escape_control_chars, format_duration
from argolocal.errors import ConfigError, suggest_similar
from argolocal.manifest.allowed_values import FAILED_PHASES, FULFILLED_PHASES
from argolocal.state.progress import parse_progress

Status = Mapping[str, Any]

FINISHED_PHASES = FULFILLED_PHASES | {"Cached"}
# Argo's message for a task with a cached result
CACHED_MESSAGE = re.compile(r"when ''([^' ]+)' == ''' evaluated false")
# start of an error in the log of a step
ERROR_LINE = re.compile(r"^(error: |Traceback)", re.MULTILINE)
GROUP_TYPES = ("DAG", "Steps", "StepGroup", "TaskGroup")


@dataclass(frozen=True)
class Step:
    """One node of a run.

    `name`: name of the node without the name of the run, such as `ship.release` for the node
    `demo-4k2xp.ship.release`. `label`: name without the names of its parents, such as `release`.
    `depth`: number of the node's parents. `kind`: type of the node, such as Pod or DAG. `started`
    and `finished`: times in the format of RFC 3339. `progress`: progress that the running pod of
    the step has reported, such as 30/100, or "".
    """

    name: str
    label: str
    depth: int
    kind: str
    phase: str
    started: str | None = None
    finished: str | None = None
    message: str = ""
    node: Mapping[str, Any] | None = None
    progress: str = ""

    @property
    def seconds(self) -> float | None:
        """The number of seconds until the end of the step, or until now if the step has not ended.
        The value is None if the step has not started."""
        if not self.started:
            return None
        end_seconds = parse_timestamp(self.finished) if self.finished else time.time()
        return round(end_seconds - parse_timestamp(self.started), 3)


def parse_timestamp(text: str) -> float:
    """Convert a time in the format of RFC 3339 to unix seconds."""
    return datetime.fromisoformat(text).timestamp()


def _list_task_names(template: Mapping[str, Any]) -> list[str]:
    """Return the names of the tasks or steps of a template."""
    task_groups = [(template.get("dag") or {}).get("tasks") or [], *(template.get("steps") or [])]
    return [task["name"] for task_group in task_groups for task in task_group]


def list_planned_tasks(manifest: Mapping[str, Any]) -> list[str]:
    """Return the names of the entrypoint's tasks in the order of the manifest."""
    spec = manifest.get("spec", {})
    entry_templates = (
        template
        for template in spec.get("templates", [])
        if template.get("name") == spec.get("entrypoint")
    )
    return _list_task_names(next(entry_templates, {}))


def check_step(
    known_name: str, step_text: str, manifest: Mapping[str, Any], log_names: Iterable[str] = ()
) -> None:
    """Raise ConfigError unless `step_text`, a step or part of its name, exists in the workflow
    `known_name`: the name of a task or log contains it, or it contains the name of a task."""
    spec = (
        (manifest.get("status") or {}).get("storedWorkflowTemplateSpec")
        or manifest.get("spec")
        or {}
    )

    task_names = {
        task_name
        for template in spec.get("templates") or []
        for task_name in _list_task_names(template)
    }
    # a workflow without tasks consists of a single template, whose node has the workflow's name
    task_names = task_names or {known_name}

    # matches longer names that contain a task's name, such as `ship.release`, `prepare(0)` or
    # `train-worker-1`
    task_name_pattern = re.compile(rf"(^|\.)({'|'.join(map(re.escape, task_names))})($|[-.(\[])")
    if not any(
        step_text in known_name for known_name in (*task_names, *log_names)
    ) and not task_name_pattern.search(step_text):
        hint = suggest_similar(step_text, task_names)
        raise ConfigError(
            f'the step "{step_text}" does not exist in {known_name}.{hint} Steps:'
            f" {', '.join(sorted(task_names))}."
        )


def list_steps(run_name: str, status: Status, planned_tasks: Iterable[str] = ()) -> list[Step]:
    """Return the steps of run `run_name`: its nodes, each after its parent, then the tasks of
    `planned_tasks` that have not started, then the nodes of exit handlers."""
    tree = _NodeTree(run_name, status)
    run_steps = list(tree.walk(run_name, 0))
    if run_name in tree.nodes and all(step.name.startswith("onExit") for step in run_steps):
        # the entrypoint is a single template, whose node is the node of the run
        run_steps.insert(0, _make_step(run_name, "", tree.nodes[run_name], 0))

    started_names = {step.name for step in run_steps if step.depth == 0}
    waiting_steps = [
        Step(task, task, 0, "", "Waiting") for task in planned_tasks if task not in started_names
    ]
    exit_steps = [step for step in run_steps if step.name.startswith("onExit")]
    other_steps = [step for step in run_steps if not step.name.startswith("onExit")]

    return other_steps + waiting_steps + exit_steps


class _NodeTree:
    """The nodes of a run by name, and the names of their children in the order of their start."""

    def __init__(self, run_name: str, status: Status) -> None:
        self.run_name = run_name
        self.status = status

        # copy the nodes, because the runner may add a node at any time
        nodes_by_start = sorted(
            list((status.get("nodes") or {}).values()),
            key=lambda node: node.get("startedAt") or "~",
        )
        self.nodes = {node["name"]: node for node in nodes_by_start}

        name_lengths = {len(name) for name in self.nodes}
        self.parent_names = {
            name: _find_parent_name(name, self.nodes, name_lengths) for name in self.nodes
        }
        self.child_names: dict[str, list[str]] = {}
        for name, parent_name in self.parent_names.items():
            if name != run_name:
                self.child_names.setdefault(parent_name or run_name, []).append(name)

    def walk(self, parent_name: str, depth: int) -> Iterator[Step]:
        """Yield the steps below a node, each before its children. `depth`: depth of the node's
        children. Step groups, and attempts that were not repeated, are replaced by their
        children."""
        for name in self.child_names.get(parent_name, []):
            if self.nodes[name].get("type") == "StepGroup" or self._is_only_attempt(name):
                yield from self.walk(name, depth)
            else:
                yield self._make_retry_aware_step(parent_name, self.nodes[name], depth)
                yield from self.walk(name, depth + 1)

    def _is_only_attempt(self, name: str) -> bool:
        """Return True if a node is the only attempt of its Retry node, and will not be repeated."""
        parent_name = self.parent_names[name]
        if parent_name is None:
            return False

        parent = self.nodes[parent_name]
        is_attempt = parent.get("type") == "Retry" and name[len(parent_name)] == "("
        will_be_repeated = (
            self.nodes[name].get("phase") in FAILED_PHASES
            and parent.get("phase") not in FINISHED_PHASES
        )
        return is_attempt and len(self.child_names[parent_name]) == 1 and not will_be_repeated

    def _make_retry_aware_step(self, parent_name: str, node: Mapping[str, Any], depth: int) -> Step:
        """Return the step of a node. A Retry node shows the phase and message of its attempts."""
        step = _make_step(self.run_name, parent_name, node, depth)
        if step.kind != "Retry":
            return step

        if step.phase == "Running" and self.status.get("phase") in FINISHED_PHASES:
            # Argo leaves the Retry node of a stopped run incomplete, so use the last attempt
            last_node = find_last_attempt(self.status, step)
            final_fields = {
                node_field: last_node[node_field]
                for node_field in ("phase", "finishedAt", "message")
                if node_field in last_node
            }
            step = _make_step(self.run_name, parent_name, {**node, **final_fields}, depth)

        if step.phase == "Running":
            step = replace(
                step, progress=find_reported_progress(find_last_attempt(self.status, step))
            )
            return _with_waiting_attempt(step, self.status)
        if step.phase in FAILED_PHASES:
            return replace(step, message=_find_root_message(step, self.status))
        return step


def _find_root_message(step: Step, status: Status) -> str:
    """Return the message of the attempt that made a retried step fail."""
    return causes.find_root_message(
        step.message, [str(node.get("message") or "") for node in _list_attempts(status, step)]
    )


def find_run_message(name: str, status: Status) -> str:
    """Return the message of a run from its status. If the message of the run only refers to a node,
    return the message of the failed step instead."""
    message = str(status.get("message") or "")
    if not message or not causes.is_secondary_message(message):
        return message
    root_node = next(
        (node for node in list((status.get("nodes") or {}).values()) if node["name"] == name), None
    )
    step = find_failed_step(list_steps(name, status)) or (
        _make_step(name, "", root_node, 0) if root_node else None
    )
    return (_find_root_message(step, status) if step else "") or message


def _with_waiting_attempt(step: Step, status: Status) -> Step:
    """If the last attempt of a retried step is active and has a message, return the step with this
    attempt's phase and message."""
    last_node = find_last_attempt(status, step)
    message = str(last_node.get("message") or "")
    if last_node.get("phase") not in ("Pending", "Running") or not message:
        return step
    return replace(step, phase=last_node["phase"], message=message)


def list_leaf_steps(run_steps: Iterable[Step]) -> list[Step]:
    """Return the steps that have started, without groups of steps and without the attempts of
    retried steps, whose labels start with `(`."""
    return [
        step
        for step in run_steps
        if step.kind not in GROUP_TYPES
        and not step.label.startswith("(")
        and step.phase != "Waiting"
    ]


def find_failed_step(run_steps: list[Step]) -> Step | None:
    """Return the step that failed first, or else a running step, or else None. A step that
    succeeded in a later attempt does not count as failed. Failed steps of exit handlers are
    considered last."""
    failed_steps = [
        step for step in run_steps if not step.label.startswith("(") and step.phase in FAILED_PHASES
    ]
    failed_leaves = (
        list_leaf_steps(failed_steps)
        or failed_steps
        or list_leaf_steps([step for step in run_steps if step.phase == "Running"])
    )
    return min(
        failed_leaves,
        key=lambda step: (step.name.startswith("onExit"), step.finished or "~"),
        default=None,
    )


def find_last_attempt(status: Status, step: Step) -> Mapping[str, Any]:
    """Return the node of the last attempt of a step, or the step's own node if the step is not
    retried."""
    attempts = _list_attempts(status, step)
    if attempts:
        return attempts[-1]
    return step.node or {}


def _list_attempts(status: Status, step: Step) -> list[Mapping[str, Any]]:
    """Return the nodes of a step's attempts, from the first to the last attempt."""
    node = step.node or {}
    node_name = node.get("name", "")
    nodes = status["nodes"]
    # search only the children of the node, because a search through all nodes is slow in a large
    # run
    children = [nodes[node_id] for node_id in node.get("children") or [] if node_id in nodes]
    attempts = [
        other_node
        for other_node in children or list(nodes.values())
        if causes.parse_attempt_number(other_node["name"]) >= 0
        and other_node["name"].rpartition("(")[0] == node_name
    ]
    return sorted(attempts, key=lambda node: causes.parse_attempt_number(node["name"]))


def make_json_object(name: str, status: Status, **extra_fields: Any) -> dict[str, Any]:
    """Return the object that `-o json` prints. `extra_fields`: fields to add before the field
    `steps`; they override fields of the same name."""
    json_object: dict[str, Any] = {"workflow": name, "phase": status.get("phase")}

    message = find_run_message(name, status)
    if message:
        json_object["message"] = causes.extract_cause(message)

    json_object.update(extra_fields)
    json_object["steps"] = [
        {
            step_field: getattr(step, step_field)
            for step_field in ("name", "phase", "started", "finished", "seconds")
        }
        | {"message": causes.extract_cause(step.message)}
        | ({"progress": step.progress} if step.progress else {})
        for step in list_leaf_steps(list_steps(name, status))
    ]
    return json_object | {"warnings": list_warnings((status.get("nodes") or {}).values())}


def list_outputs(node: Mapping[str, Any]) -> dict[str, str]:
    """Return the values of the output parameters in a node, or in a workflow's status, by name."""
    parameters = (node.get("outputs") or {}).get("parameters") or []
    return {parameter["name"]: parameter.get("value", "") for parameter in parameters}


def list_warnings(nodes: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the distinct warnings of the nodes. A step reports its warnings as a JSON list in its
    output `warnings`."""
    warning_texts: list[str] = []
    for node in list(nodes):
        with suppress(ValueError):
            warning_values = loads(str(list_outputs(node).get("warnings") or ""))
            warning_texts += map(str, warning_values) if isinstance(warning_values, list) else []

    return list(dict.fromkeys(warning_texts))


def list_named_warnings(nodes: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the distinct warnings of all steps, each with the name of its step."""
    step_by_warning: dict[str, str] = {}
    for node in list(nodes):
        # show warnings of an attempt, such as prepare(0), under the name of its step
        step_name = re.sub(
            r"\(\d+\)$",
            "",
            str(node.get("displayName") or node.get("name") or "").rpartition(".")[2],
        )
        for text in list_warnings([node]):
            step_by_warning.setdefault(text, step_name)
    return [
        f"{step_name}: {text}" if step_name else text for text, step_name in step_by_warning.items()
    ]


def make_pod_name(run_name: str, node: Mapping[str, Any]) -> str:
    """Return the name of a node's pod."""
    if node.get("name") == run_name:
        return run_name
    template_name = (node.get("templateRef") or {}).get("template") or node.get("templateName", "")
    return f"{run_name}-{template_name}-{node.get('id', '').rpartition('-')[2]}"


def find_log(
    name: str, status: Status, step: Step | None, log_folder: Path, deployments_folder: Path
) -> Path | None:
    """Return the log that explains the outcome of a step: the log of its pod, or of a pod of its
    job or Deployment. Return None if no log of the step exists."""
    if step is None:
        return None
    node = find_last_attempt(status, step)
    log_path = log_folder / f"{make_pod_name(name, node)}.log"
    if log_path.exists():
        return log_path
    return find_applied_log(name, node, step.label, log_folder, deployments_folder)


def find_applied_log(
    name: str, node: Mapping[str, Any], task_name: str, log_folder: Path, deployments_folder: Path
) -> Path | None:
    """Return the log that explains the outcome of the job or Deployment that the step `task_name`
    of the run `name` has applied, or None if no log exists."""
    log_paths = list(log_folder.glob(f"{name}-{task_name}-*.log"))
    if str(node.get("templateName")).startswith("deployment"):
        log_paths = sorted(
            deployments_folder.glob("*/logs/*.log"), key=lambda log_path: log_path.stat().st_mtime
        )[-1:]
    return find_first_error(log_paths)


def find_first_error(log_paths: list[Path]) -> Path | None:
    """Return the log with an error that was modified first, or else the log that was modified
    first. Return None if `log_paths` is empty."""
    error_logs = [
        log_path for log_path in log_paths if ERROR_LINE.search(read_end(log_path, 65536))
    ]
    return min(error_logs or log_paths, key=lambda log_path: log_path.stat().st_mtime, default=None)


def read_end(path: Path, max_bytes: int) -> str:
    """Return the last `max_bytes` bytes of a file as text."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - max_bytes))
        return file.read().decode(errors="replace")


def select_log_tail(log_text: str, max_lines: int) -> list[str]:
    """Return up to `max_lines` lines of a log, starting at the last `error: ...` line, or else
    the last lines."""
    nonempty_lines = [line.rstrip() for line in log_text.splitlines() if line.strip()]
    last_error_index = max(
        (index for index, line in enumerate(nonempty_lines) if line.startswith("error: ")),
        default=None,
    )
    if last_error_index is None:
        return nonempty_lines[-max_lines:]
    return nonempty_lines[last_error_index : last_error_index + max_lines]


def describe_success(status: Status, facts: Mapping[str, str | None]) -> str:
    """Return the outcome of a successful run as a text: one line for each fact, then the duration
    and the warnings of the run."""
    elapsed_text = format_duration(
        parse_timestamp(status["finishedAt"]) - parse_timestamp(status["startedAt"])
    )
    warning_facts = [
        ("warning", text) for text in list_named_warnings((status.get("nodes") or {}).values())
    ]
    return format_facts([*facts.items(), ("took", elapsed_text), *warning_facts])


def format_facts(facts: Iterable[tuple[str, str | None]]) -> str:
    """Return one line with name and value for each fact. A fact without a value is left out."""
    return "\n" + "".join(
        f"{fact_name:9} {escape_control_chars(fact_text)}\n"
        for fact_name, fact_text in facts
        if fact_text
    )


def failure(
    name: str,
    status: Status,
    log_text: str,
    log_path: str | None,
    resume_command: str,
    runner_error: str = "",
) -> str:
    """Describe a failed run in at most 15 lines: the failed step, the end of its log, the cause,
    the path of the log, up to two warnings, and the command that resumes the run.

    `runner_error`: error of the runner itself. If `runner_error` is not empty, it is shown as the
    cause.
    """
    step = find_failed_step(list_steps(name, status))
    warning_texts = list_warnings((status.get("nodes") or {}).values())
    lines = [
        f"{name}: {status.get('phase') or 'stopped'}" + (f" in step {step.name}" if step else "")
    ]
    lines += [f"  {line}" for line in select_log_tail(log_text, 7)]
    message = str((step and step.message) or find_run_message(name, status))
    cause_text = runner_error or find_last_error(log_text) or causes.extract_cause(message)

    # if the message has parts other than the cause, such as a termination message, show these
    # parts, too
    if causes.extract_cause(message) != message:
        detail_text = ""
    else:
        detail_text = message.replace(cause_text, "").rstrip(": ")

    if detail_text:
        cause_text += f" ({detail_text})"

    lines += [
        f"step    {step.name if step else 'none: ' + find_run_message(name, status)}",
        f"cause   {' '.join(str(cause_text).split())[:600]}",
        f"log     {log_path}" if log_path else "",
        *(f"warning {' '.join(warning_text.split())[:300]}" for warning_text in warning_texts[:2]),
        f"resume  {resume_command}",
    ]
    return escape_control_chars("\n".join(line for line in lines if line))


def find_last_error(log_text: str) -> str:
    """Return the text of the last `error: ...` line of a log, or ""."""
    error_texts = [
        line.removeprefix("error: ") for line in log_text.splitlines() if line.startswith("error: ")
    ]
    if error_texts:
        return error_texts[-1]
    return ""


def _find_parent_name(
    name: str, nodes: Mapping[str, Any], name_lengths: Collection[int]
) -> str | None:
    """Return the name of the parent node: the longest node name that is a prefix of `name` and is
    followed by `.`, `[` or `(` in `name`. Return None if no other node has such a name.
    `name_lengths`: the lengths of all node names. The lengths limit the search, because a loop item
    in a name may contain `.`, `[` or `(` many times."""
    cut_indexes = [
        index
        for index, character in enumerate(name)
        if character in ".[(" and index in name_lengths
    ]
    return next((name[:index] for index in reversed(cut_indexes) if name[:index] in nodes), None)


def _make_step(run_name: str, parent_name: str, node: Mapping[str, Any], depth: int) -> Step:
    """Return the step of a node, without the indexes of step groups in its name."""
    name = node["name"]
    step_path = (
        re.sub(r"^\[\d+\]|(?<=[^.])\[\d+\](?=\.)", "", name.removeprefix(run_name)).lstrip(".")
        or run_name
    )
    label = re.sub(r"^\[\d+\]", "", name.removeprefix(parent_name)).lstrip(".") or step_path
    cached_match = CACHED_MESSAGE.fullmatch(node.get("message") or "")

    return Step(
        name=step_path,
        label=label,
        depth=depth,
        kind=node.get("type", ""),
        phase="Cached" if cached_match else node.get("phase") or "Pending",
        started=node.get("startedAt"),
        finished=node.get("finishedAt"),
        message=f"by {cached_match[1]}" if cached_match else node.get("message") or "",
        node=node,
        progress=find_reported_progress(node),
    )


def find_reported_progress(node: Mapping[str, Any]) -> str:
    """Return the progress that a running pod has reported, or "". A total of 1 is Argo's default
    for pods without a report."""
    progress = parse_progress(node.get("progress"))
    is_running_pod = node.get("type") == "Pod" and node.get("phase") == "Running"
    return str(node["progress"]) if is_running_pod and progress and progress[1] > 1 else ""


def describe_progress(step: Step) -> str:
    """Return the reported progress of a step in words, or ""."""
    return f"progress {step.progress}" if step.progress else ""
