"""The first tab of a run: its state in sentences, its failure, its graph and its steps."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from argolocal.common import causes
from argolocal.common.wording import format_duration, shorten
from argolocal.errors import ConfigError
from argolocal.page.failure import Failure, find_failure, run_message, step_name
from argolocal.page.sources import Run, RunSource
from argolocal.page.tabs.artifact_source import ArtifactSource
from argolocal.page.tabs.graph import Drawing, Graph, describe_condition, duration_of
from argolocal.page.tabs.graph_fold import FindInternal
from argolocal.page.tabs.graph_plan import Plan, PlannedStep
from argolocal.page.tabs.graph_words import (
    describe_omission,
    describe_reuse,
    simplify_condition,
)
from argolocal.page.tabs.node import NodeDetails, NodeReader, Value
from argolocal.page.tabs.waiting import describe_waiting
from argolocal.view import summary
from argolocal.view.summary import parse_timestamp

ROWS_PER_PAGE = 200
# a table of at most this number of steps is open when the page is loaded
MAX_OPEN_ROWS = 40
MAX_WALKED_STEPS = 50_000


@dataclass(frozen=True)
class StepRow:
    """One step of a run. A step that has not started has the phase Planned."""

    name: str
    label: str
    depth: int
    phase: str
    started: str | None
    seconds: float | None
    message: str
    link: str = ""


@dataclass(frozen=True)
class Overview:
    """The state of a run, its graph, and its steps.

    `headlines`: the main results, such as a verdict. `sentences`: how the run has ended.
    `failure_link`, `log_link` are the URLs of the failed step and of its log. `waiting`: what the
    run waits for. `node`: the selected step. `steps`: one page of the steps.
    """

    phase: str
    headlines: list[str]
    sentences: list[str]
    failure: Failure | None
    failure_link: str
    log_link: str
    message: str
    waiting: list[str]
    warnings: list[str]
    outputs: list[Value]
    graph: Graph
    node: NodeDetails | None
    steps: list[StepRow]
    step_count: int
    page: int
    pages: int
    is_table_open: bool
    other_failures: list[StepRow] = field(default_factory=list)


FindHeadlines = Callable[[Run], list[str]]


class OverviewTab:
    """The tab `overview`.

    `headline`: function that returns sentences to show at the top, such as a verdict.
    `find_internal`: function that recognizes internal steps, which a program adds to each workflow;
    they are hidden until the user wants to see them. `log_tab`: name of the tab with logs, or None.
    """

    name = "overview"
    title = "Overview"
    content = Overview

    def __init__(
        self,
        source: RunSource,
        artifacts: ArtifactSource | None = None,
        headline: FindHeadlines = lambda run: [],
        find_internal: FindInternal = lambda plan: lambda step: False,
        log_tab: str | None = "logs",
    ) -> None:
        self.source = source
        self.artifacts = artifacts
        self.headline = headline
        self.find_internal = find_internal
        self.log_tab = log_tab

    def is_shown(self, run: Run) -> bool:
        return True

    def build(self, run: Run, query: Mapping[str, str]) -> Any:
        plan = Plan(run)
        drawing = Drawing(plan, query, self.find_internal(plan))
        graph = drawing.draw()

        logs = self.source.logs(run.name)
        failure = find_failure(run, logs)
        artifacts = self.artifacts.list(run) if self.artifacts and query.get("node") else []
        reader = NodeReader(plan, drawing, logs, artifacts, self.log_tab)
        details = self._read_details(reader, query)

        walked_steps = plan.walk(plan.root, drawing.is_hidden)
        steps = list(islice(walked_steps, MAX_WALKED_STEPS)) or [plan.root]
        pages = max(1, -(-len(steps) // ROWS_PER_PAGE))
        page = min(pages, parse_page(query.get("page")))
        shown_steps = steps[(page - 1) * ROWS_PER_PAGE : page * ROWS_PER_PAGE]
        nodes = list((run.status.get("nodes") or {}).values())

        return Overview(
            phase=run.phase,
            headlines=self.headline(run),
            sentences=_outcome(plan),
            failure=failure,
            failure_link=drawing.links.to("#node", node=failure.node) if failure else "",
            log_link=reader.link_log(failure.pod) if failure else "",
            message="" if failure else run_message(run) if run.is_finished else "",
            waiting=describe_waiting(run, lambda name: _suspend_duration(plan, name)),
            warnings=summary.list_named_warnings(nodes),
            outputs=[
                Value(name, shorten(str(value)))
                for name, value in summary.list_outputs(run.status).items()
            ],
            graph=graph,
            node=details,
            steps=[_make_row(plan, drawing, step) for step in shown_steps],
            step_count=len(steps),
            page=page,
            pages=pages,
            is_table_open=len(steps) <= MAX_OPEN_ROWS or "page" in query,
            other_failures=_other_failures(plan, drawing, failure),
        )

    def _read_details(self, reader: NodeReader, query: Mapping[str, str]) -> NodeDetails | None:
        address = query.get("node")
        if not address:
            return None
        details = reader.read(address, parse_page(query.get("items")))
        if details is None:
            raise ConfigError(f'the step "{address[:100]}" does not exist in this run.')
        return details


def parse_page(text: str | None) -> int:
    """Parse the page number in a query parameter. Return 1 for an invalid page number."""
    if text and text.isdecimal() and text.isascii() and len(text) < 9:
        return max(1, int(text))
    return 1


def _make_row(plan: Plan, drawing: Drawing, step: PlannedStep) -> StepRow:
    node = step.node or {}
    message = causes.extract_cause(str(node.get("message") or ""))
    attempt_messages = [str(attempt.get("message") or "") for attempt in plan.attempts_of(step)]
    if step.phase == "Cached":
        message = describe_reuse(message)
    elif step.phase == "Skipped" and step.task.get("when"):
        message = f"not true: {simplify_condition(str(step.task['when']))}"
    elif step.phase == "Omitted" and step.needs:
        message = describe_omission(step.task, plan.dependency_phases(step)) or message
    elif step.phase == "Planned":
        message = describe_condition(step)
    elif attempt_messages:
        message = causes.extract_cause(causes.find_root_message(message, attempt_messages))
    if len(attempt_messages) > 1:
        message = f"{len(attempt_messages)} attempts{': ' if message else ''}{message}"

    address = plan.address(step)
    return StepRow(
        name=address,
        label=step.label,
        depth=step.depth - 2 if step.depth > 1 else 0,
        phase=step.phase,
        started=node.get("startedAt"),
        seconds=duration_of(step),
        message=shorten(message),
        link=drawing.links.to("#node", node=address),
    )


def _other_failures(
    plan: Plan, drawing: Drawing, failure: Failure | None, limit: int = 5
) -> list[StepRow]:
    """Return the rows of the failed steps of a failed run, without the step that made it fail."""
    addresses = failure.other_failures[:limit] if failure else []
    steps = [plan.find(address) for address in addresses]
    return [_make_row(plan, drawing, step) for step in steps if step]


def _suspend_duration(plan: Plan, node_name: str) -> str:
    """Return the duration of a suspend step, or "" if the step waits for a user."""
    step = plan.find(node_name.removeprefix(plan.run.name).lstrip("."))
    if not step:
        return ""
    return str((step.template.get("suspend") or {}).get("duration") or "")


def _outcome(plan: Plan) -> list[str]:
    """Return sentences about the end of a run and about a failure of its exit handler."""
    run = plan.run
    sentences: list[str] = []
    start = run.status.get("startedAt")
    end = run.status.get("finishedAt")
    if run.phase == "Succeeded" and start and end:
        duration = format_duration(parse_timestamp(end) - parse_timestamp(start))
        sentences.append(f"The run succeeded in {duration}.")

    for hook in plan.hooks(plan.root):
        if hook.node_name.endswith(".onExit") and hook.phase in ("Failed", "Error"):
            message = str((hook.node or {}).get("message") or "")
            name = step_name(run.name, hook.node_name)
            sentences.append(f"The exit handler {hook.label} ({name}) failed: {message}.")
    return sentences
