"""The failure of a run: the step that failed, its message, the line of the user's code, and the
lines of the log around the error."""

import re
import sysconfig
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from argolocal.common import causes, program
from argolocal.engine.order import NAME_OR_RESULT
from argolocal.manifest.allowed_values import FAILED_PHASES, SCRIPT_PATH
from argolocal.page.log_files import LogFile, find_log_with_error, read_end
from argolocal.page.sources import Run
from argolocal.view import summary
from argolocal.view.summary import FINISHED_PHASES

GROUP_TYPES = (*summary.GROUP_TYPES, "Retry")
LOG_BYTES = 65_536
LINES_BEFORE_ERROR = 3
MAX_LOG_LINES = 18
MAX_CAUSE_CHARACTERS = 600

FRAME = re.compile(r'^\s*File "([^"]+)", line (\d+)', re.MULTILINE)
# a location in a message, such as "(train.py, line 12)"
LOCATION = re.compile(r"\(([^()\s,]+\.\w+), line (\d+)\)")
SHELL_LOCATION = re.compile(
    rf"^(\S+\.sh|bash|sh|\S*{re.escape(SCRIPT_PATH)}): (?:line )?(\d+): ", re.MULTILINE
)
# matches the paths of files that the user has not written
LIBRARIES = re.compile(r"/(site|dist)-packages/|/lib/python3|^<")
# matches the last line of a traceback
EXCEPTION = re.compile(r"^[A-Za-z_][\w.]*(: .*)?$")


@dataclass(frozen=True)
class Failure:
    """A failed step.

    `node`: the identifier of the step in URLs of the graph. `location` is FILE:LINE of the user's
    code, or "". `log`: lines around the error in the log of `pod`. `error_line`: index of the
    error's line in `log`, or -1. `other_failures`: identifiers of the other failed steps.
    """

    step: str
    node: str
    cause: str
    message: str
    location: str = ""
    pod: str = ""
    log: list[str] = field(default_factory=list)
    error_line: int = -1
    other_failures: list[str] = field(default_factory=list)

    @property
    def sentence(self) -> str:
        """The failure in one line: step, cause and location."""
        details = f" ({self.message})" if self.message and self.message not in self.cause else ""
        location = f" at {self.location}" if self.location else ""
        return f"{self.step}: {self.cause or 'failed'}{details}{location}"


def describe_failure(run: Run, logs: Mapping[str, LogFile] | None = None) -> str:
    """Return the failure of a run in one line, or the run's message if no step has failed.

    `logs`: the logs of the run by pod. Without `logs`, the line contains only the message of the
    step, not the error in its log.
    """
    failure = find_failure(run, logs or {})
    if failure:
        return failure.sentence
    return run_message(run)


def run_message(run: Run) -> str:
    """Return the message of the run itself."""
    return causes.extract_cause(str(run.status.get("message") or ""))


def find_failure(run: Run, logs: Mapping[str, LogFile]) -> Failure | None:
    """Return the failure that made a run fail, or None if the run has not failed."""
    if run.phase not in FAILED_PHASES:
        return None

    failed_nodes = find_failed_nodes(run)
    if not failed_nodes:
        return None

    node = failed_nodes[0]
    pod = summary.make_pod_name(run.name, node)
    log = logs.get(pod) or _log_of_job(run, node, logs)
    text = read_end(log, LOG_BYTES) if log else ""
    lines, error_line = lines_around_error(text)

    message = causes.extract_cause(_root_message(run, node))
    cause = _error_of_log(text) or message
    return Failure(
        step=step_name(run.name, node["name"]),
        node=address_of(run.name, node["name"]),
        cause=cause[:MAX_CAUSE_CHARACTERS],
        message=message[:MAX_CAUSE_CHARACTERS],
        location=find_location(text) or find_location(message),
        pod=log.name if log else "",
        log=lines,
        error_line=error_line,
        other_failures=[address_of(run.name, other["name"]) for other in failed_nodes[1:]],
    )


def address_of(run: str, node_name: str) -> str:
    """Return the identifier of a node in URLs of the graph: its name without the name of the
    run."""
    return node_name.removeprefix(run).lstrip(".") or run


def step_name(run: str, node_name: str) -> str:
    """Return the name of a step that users see: without the numbers of step groups and attempts."""
    name = re.sub(r"\[\d+\]\.?", ".", address_of(run, node_name))
    return causes.ATTEMPT_NUMBER.sub("", name).strip(".").replace("..", ".")


def find_failed_nodes(run: Run) -> list[Mapping[str, Any]]:
    """Return the nodes of the failed steps. The first of the nodes is the step that made the run
    fail.

    A step that succeeded in a later attempt is not among the nodes. Exit handlers, and steps whose
    failure the manifest allows, are the last nodes.
    """
    nodes = {node["name"]: node for node in list((run.status.get("nodes") or {}).values())}
    tolerated_tasks = _tolerated_tasks(run)
    failures: dict[str, Mapping[str, Any]] = {}

    for name, node in nodes.items():
        if node["phase"] not in FAILED_PHASES or node["type"] in GROUP_TYPES:
            continue

        step = causes.ATTEMPT_NUMBER.sub("", name)
        retry = nodes.get(step, {})
        is_attempt = step != name and retry.get("type") == "Retry"
        if is_attempt and retry["phase"] in FINISHED_PHASES - FAILED_PHASES:
            continue
        # keep only the last attempt of a retried step, because it explains the failure
        attempt_number = causes.parse_attempt_number(name)
        other = failures.get(step)
        if not other or causes.parse_attempt_number(other["name"]) < attempt_number:
            failures[step] = node

    def order(node: Mapping[str, Any]) -> tuple[bool, bool, bool, str]:
        is_hook = ".onExit" in node["name"] or ".hooks." in node["name"]
        task = str(node.get("displayName")).partition("(")[0]
        message = str(node.get("message") or "")
        was_stopped = causes.STOPPED_MESSAGE.search(message) is not None
        return is_hook, task in tolerated_tasks, was_stopped, node.get("finishedAt") or "~"

    return sorted(failures.values(), key=order)


def _tolerated_tasks(run: Run) -> set[str]:
    """Return the names of the tasks that may fail without ending the run."""
    tolerated_tasks: set[str] = set()
    spec = run.status.get("storedWorkflowTemplateSpec") or run.spec
    for template in spec.get("templates") or []:
        groups = [(template.get("dag") or {}).get("tasks") or [], *(template.get("steps") or [])]
        for task in (task for parallel_tasks in groups for task in parallel_tasks):
            if any((task.get("continueOn") or {}).values()):
                tolerated_tasks.add(task["name"])
            for match in NAME_OR_RESULT.finditer(task.get("depends") or ""):
                name, _, result = match[0].partition(".")
                if result in ("Failed", "Errored", "AllFailed"):
                    tolerated_tasks.add(name)
    return tolerated_tasks


def _root_message(run: Run, node: Mapping[str, Any]) -> str:
    """Return the message of a node. If the node's message only refers to other attempts, return the
    message of the last attempt that states a reason."""
    message = str(node.get("message") or "")
    if not causes.is_secondary_message(message):
        return message
    step = causes.ATTEMPT_NUMBER.sub("", node["name"])
    attempts = [
        str(other.get("message") or "")
        for other in list(run.status["nodes"].values())
        if causes.ATTEMPT_NUMBER.sub("", other["name"]) == step
    ]
    return causes.find_root_message(message, attempts)


def _log_of_job(run: Run, node: Mapping[str, Any], logs: Mapping[str, LogFile]) -> LogFile | None:
    """Return the log that explains the failure of a job or Deployment that a step has applied."""
    prefix = f"{run.name}-{causes.ATTEMPT_NUMBER.sub('', str(node.get('displayName')))}-"
    return find_log_with_error(log for pod, log in logs.items() if pod.startswith(prefix))


def lines_around_error(text: str) -> tuple[list[str], int]:
    """Return the lines around the last error of a log and the index of the error's line. If the log
    contains no error, return the last lines and -1."""
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    errors = [index for index, line in enumerate(lines) if summary.ERROR_LINE.match(line)]
    if not errors:
        return lines[-10:], -1

    error = errors[-1]
    first = error
    # an `error:` line after a traceback is a summary of the traceback, so show the traceback, too
    if len(errors) > 1 and first - errors[-2] < MAX_LOG_LINES - LINES_BEFORE_ERROR:
        first = errors[-2]

    start = max(0, first - LINES_BEFORE_ERROR)
    shown_lines = lines[start : start + MAX_LOG_LINES]
    if lines[error].startswith("Traceback"):
        following = enumerate(lines[error + 1 :], error + 1)
        error = next((index for index, line in following if EXCEPTION.match(line)), error)
    return shown_lines, error - start if error - start < len(shown_lines) else -1


def _error_of_log(text: str) -> str:
    """Return the error at the end of a log: the text of its last line `error: ...`, or the
    exception of its last traceback."""
    error = summary.find_last_error(text)
    if error:
        return error
    _, traceback_start, traceback = text.rpartition("Traceback (most recent call last)")
    if not traceback_start:
        return ""
    lines = traceback.splitlines()[1:]
    return next((line for line in lines if EXCEPTION.match(line)), "")


def find_location(text: str) -> str:
    """Return FILE:LINE of the user's code in a log or message, or "". The file of a script
    template is `script`."""
    frames = FRAME.findall(text)
    match = LOCATION.search(text) or SHELL_LOCATION.search(text)
    if frames:
        file, line = _last_frame_of_user(frames)
    elif match:
        file, line = match[1], match[2]
    else:
        return ""

    if file.endswith(SCRIPT_PATH):
        file = "script"
    return f"{file}:{line}"


def _last_frame_of_user(frames: Iterable[tuple[str, str]]) -> tuple[str, str]:
    """Return (file, line) of the innermost call in the user's code, or else in a library."""
    frames = list(frames)
    packages = Path(__file__).parents[2]
    library_folders = (
        sysconfig.get_path("stdlib"),
        f"{packages}/argolocal/",
        f"{packages}/{program.name}/",
    )
    users_frames = [
        frame
        for frame in frames
        if not LIBRARIES.search(frame[0]) and not frame[0].startswith(library_folders)
    ]
    return (users_frames or frames)[-1]
