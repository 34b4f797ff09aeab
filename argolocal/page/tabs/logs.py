"""The tab `logs`: the logs of a run's pods, one or several side by side, and a search in them.

    ?pod=A&pod=B           the ends of two logs
    ?pod=A&offset=1000     the lines of a log from byte 1000
    ?pod=A&mark=1000       the lines around the one that contains byte 1000
    ?pod=A&mark=error      the lines around the first error
    ?find=TEXT&pod=A       the lines that contain a text; without a pod, in all logs

With several pods, an offset or a mark has the form POD:1000.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from starlette.datastructures import QueryParams

from argolocal.errors import ConfigError, suggest_similar
from argolocal.page.log_files import LogFile
from argolocal.page.logs.reading import (
    CONTEXT_BYTES,
    MAX_MATCHES,
    LogLine,
    LogPage,
    Match,
    count_lines,
    find_error,
    find_previous_page,
    read_end,
    read_page,
    search,
    split_lines,
)
from argolocal.page.sources import Run, RunSource
from argolocal.view import summary
from argolocal.view.summary import FAILED_PHASES, FINISHED_PHASES, Step

MAX_PODS_SIDE_BY_SIDE = 4
MAX_CHOICES = 100
MAX_TEXT_LENGTH = 1000
# phases of steps that have not ended; their logs come after the logs of failed steps
UNFINISHED_PHASES = ("Running", "Pending")


@dataclass(frozen=True)
class LogChoice:
    """A log of the run. `step`: name of the pod's step, or "" if the step is unknown. `address` is
    the URL that shows only this log. `address_next_to_others` is the URL that adds this log to the
    shown logs, or ""."""

    pod: str
    step: str
    phase: str
    size: int
    is_shown: bool
    address: str
    address_next_to_others: str
    download: str


@dataclass(frozen=True)
class LogView:
    """A part of a log, with the URLs of other parts of the log. A URL of the view is "" if it is
    not needed.

    `missing_error` is True if the user looked for the first error, but the log contains no error.
    `without` is the URL that shows the other logs without this log. `follow` is the URL of the
    events with new lines.
    """

    pod: str
    step: str
    phase: str
    size: int
    start: int
    end: int
    lines: list[LogLine]
    is_end: bool
    missing_error: bool
    first_page: str
    older_page: str
    newer_page: str
    last_page: str
    first_error: str
    without: str
    download: str
    follow: str


@dataclass(frozen=True)
class FoundLine:
    """A line that a search has found, with the URL of the page that marks this line."""

    pod: str
    step: str
    match: Match
    address: str


@dataclass(frozen=True)
class Search:
    """The result of a search in some logs. `more`: number of further matches."""

    text: str
    lines: list[FoundLine]
    more: int
    searched_logs: int


@dataclass(frozen=True)
class Logs:
    """The logs of a run.

    `choices`: the list of logs. `more_choices`: number of logs that are missing from the list.
    `step_filter`: text that the names in the list must contain. `is_chosen` is True if the URL
    names the shown logs; then a search covers only these logs. `without_search` is the URL of the
    same logs without the search.
    """

    choices: list[LogChoice]
    more_choices: int
    step_filter: str
    views: list[LogView]
    is_chosen: bool
    search: Search | None
    without_search: str


class LogsTab:
    """The tab `logs`."""

    name = "logs"
    title = "Logs"
    content = Logs

    def __init__(self, source: RunSource) -> None:
        self.source = source

    def is_shown(self, run: Run) -> bool:
        return True

    def build(self, run: Run, query: QueryParams) -> Any:
        logs = self.source.logs(run.name)
        steps = find_steps(run, logs)
        text = query.get("find", "")[:MAX_TEXT_LENGTH]

        pods = check_pods(query.getlist("pod"), logs)
        is_chosen = bool(pods)
        ordered_pods = _order_pods(logs, steps)
        search_result = None
        if text:
            search_result = _search(run, [logs[pod] for pod in pods or ordered_pods], steps, text)
        elif not pods:
            pods = ordered_pods[:1]

        addresses = Addresses(run.name, pods, text)
        views = [_make_view(run, logs[pod], steps.get(pod), addresses, query) for pod in pods]
        step_filter = query.get("step", "").strip()
        choices = [
            pod
            for pod in ordered_pods
            if step_filter in (steps[pod].name if pod in steps else pod) or step_filter in pod
        ]
        rows = [_make_choice(logs[pod], steps.get(pod), addresses) for pod in choices[:MAX_CHOICES]]
        return Logs(
            rows,
            max(0, len(choices) - MAX_CHOICES),
            step_filter,
            views,
            is_chosen,
            search_result,
            addresses.show(pods),
        )


@dataclass(frozen=True)
class Addresses:
    """Creates URLs of this tab. `pods`: the pods whose logs are shown. `text`: the searched
    text."""

    run: str
    pods: list[str]
    text: str

    def show(self, pods: Iterable[str], **position: object) -> str:
        """Return the URL that shows the logs of these pods. `position`: the parameter `offset` or
        `mark`."""
        pairs = [("pod", pod) for pod in pods]
        pairs += [(key, str(value)) for key, value in position.items()]
        anchor = "#marked" if "mark" in position else ""
        return f"/runs/{self.run}/logs?{urlencode(pairs)}{anchor}"

    def move(self, pod: str, **position: object) -> str:
        """Return the URL that shows the same pods, but another part of the log of `pod`."""
        if len(self.pods) > 1:
            position = {key: f"{pod}:{value}" for key, value in position.items()}
        return self.show(self.pods, **position)

    def download(self, pod: str) -> str:
        return f"/runs/{self.run}/logs/{pod}"

    def follow(self, pod: str, offset: int) -> str:
        pairs = {"pod": pod, "from": offset}
        return f"/runs/{self.run}/log-events?{urlencode(pairs)}"


def check_pods(names: list[str], logs: Mapping[str, LogFile]) -> list[str]:
    """Return the names of pods without duplicates. Raises ConfigError if a pod has no log, or if
    there are too many names."""
    pods = list(dict.fromkeys(name for name in names if name))
    for name in pods:
        if name not in logs:
            hint = suggest_similar(name[:100], set(list(logs)[:1000]))
            raise ConfigError(f"the log of the pod {name[:100]!r} does not exist.{hint}")
    if len(pods) > MAX_PODS_SIDE_BY_SIDE:
        raise ConfigError(f"at most {MAX_PODS_SIDE_BY_SIDE} logs are shown side by side.")
    return pods


def find_steps(run: Run, logs: Mapping[str, LogFile]) -> dict[str, Step]:
    """Return the steps to which the pods with logs belong, by the name of the pod."""
    steps = [step for step in summary.list_steps(run.name, run.status) if step.node]
    step_of_node = {step.node["name"]: step for step in steps if step.node}
    step_of_pod: dict[str, Step] = {}
    for node in run.status.get("nodes", {}).values():
        pod = summary.make_pod_name(run.name, node)
        # the list may contain only the retried step of an attempt
        retried_name = re.sub(r"\(\d+\)$", "", node["name"])
        step = step_of_node.get(node["name"]) or step_of_node.get(retried_name)
        if step and pod in logs:
            step_of_pod[pod] = step

    # the names of a job's pods start with the name of the job's step
    step_of_label = {step.label: step for step in steps}
    for pod in logs.keys() - step_of_pod.keys():
        words = pod.removeprefix(f"{run.name}-").split("-")
        labels = ["-".join(words[:count]) for count in range(len(words), 0, -1)]
        label = next((label for label in labels if label in step_of_label), None)
        if label:
            step_of_pod[pod] = step_of_label[label]
    return step_of_pod


def _order_pods(logs: Mapping[str, LogFile], steps: Mapping[str, Step]) -> list[str]:
    """Return the names of the pods: failed pods first, then running pods, then all others. Of the
    failed pods, of the running pods and of the others, newer pods are first."""

    def rank(pod: str) -> int:
        phase = steps[pod].phase if pod in steps else ""
        if phase in FAILED_PHASES:
            return 0
        if phase in UNFINISHED_PHASES:
            return 1
        return 2

    newest_first = sorted(
        logs, key=lambda pod: (steps[pod].started or "") if pod in steps else "", reverse=True
    )
    return sorted(newest_first, key=rank)


def _make_choice(log: LogFile, step: Step | None, addresses: Addresses) -> LogChoice:
    is_shown = log.name in addresses.pods
    can_be_added = not is_shown and addresses.pods and len(addresses.pods) < MAX_PODS_SIDE_BY_SIDE
    return LogChoice(
        log.name,
        step.name if step else "",
        step.phase if step else "",
        log.size(),
        is_shown,
        addresses.show([log.name]),
        addresses.show([*addresses.pods, log.name]) if can_be_added else "",
        addresses.download(log.name),
    )


def _read_position(parameters: QueryParams, key: str, pod: str, is_only_pod: bool) -> str:
    """Return the value of the query parameter `offset` or `mark` for a pod, or ""."""
    for text in parameters.getlist(key):
        name, colon, value = text.rpartition(":")
        if (colon and name == pod) or (not colon and is_only_pod):
            return value
    return ""


def _parse_offset(text: str) -> int:
    if not text.isdecimal() or len(text) > 15:
        raise ConfigError(f"the position is {text[:40]!r}: it must be a number of bytes.")
    return int(text)


def _make_view(
    run: Run,
    log: LogFile,
    step: Step | None,
    addresses: Addresses,
    parameters: QueryParams,
) -> LogView:
    is_only_pod = len(addresses.pods) == 1
    offset_text = _read_position(parameters, "offset", log.name, is_only_pod)
    mark_text = _read_position(parameters, "mark", log.name, is_only_pod)

    mark = None
    if mark_text == "error":
        mark = find_error(log)
    elif mark_text:
        mark = _parse_offset(mark_text)

    if mark is not None:
        page = read_page(log, find_previous_page(log, mark, CONTEXT_BYTES))
    elif offset_text:
        page = read_page(log, _parse_offset(offset_text))
    else:
        page = read_end(log)

    return _describe(run, log, step, addresses, page, mark, mark_text == "error" and mark is None)


def _describe(
    run: Run,
    log: LogFile,
    step: Step | None,
    addresses: Addresses,
    page: LogPage,
    mark: int | None,
    missing_error: bool,
) -> LogView:
    line_break_count = count_lines(log, page.start)
    first_number = None if line_break_count is None else line_break_count + 1
    is_end = page.end >= page.size
    is_live = is_end and mark is None and run.phase not in FINISHED_PHASES
    # new lines are followed from the start of the incomplete last line, which is sent again when it
    # is complete
    next_line = page.start + page.data.rfind(b"\n") + 1
    pod = log.name
    other_pods = [other for other in addresses.pods if other != pod]

    return LogView(
        pod,
        step.name if step else "",
        step.phase if step else "",
        page.size,
        page.start,
        page.end,
        split_lines(page, first_number, mark),
        is_end,
        missing_error,
        first_page=addresses.move(pod, offset=0) if page.start else "",
        older_page=(
            addresses.move(pod, offset=find_previous_page(log, page.start)) if page.start else ""
        ),
        newer_page="" if is_end else addresses.move(pod, offset=page.end),
        last_page="" if is_end else addresses.move(pod),
        first_error=addresses.move(pod, mark="error"),
        without=addresses.show(other_pods) if other_pods else "",
        download=addresses.download(pod),
        follow=addresses.follow(pod, next_line) if is_live else "",
    )


def _search(run: Run, logs: list[LogFile], steps: Mapping[str, Step], text: str) -> Search:
    addresses = Addresses(run.name, [], text)
    lines: list[FoundLine] = []
    more = 0
    for log in logs:
        matches = search(log, text, MAX_MATCHES - len(lines))
        more += matches.more
        step = steps.get(log.name)
        for match in matches.lines:
            address = addresses.show([log.name], find=text, mark=match.offset)
            lines.append(FoundLine(log.name, step.name if step else "", match, address))
    return Search(text, lines, more, len(logs))
