"""The details of one step: its state, attempts, parameters, log, artifacts and manifest."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlencode

import yaml

from argolocal.common import causes
from argolocal.common.wording import shorten
from argolocal.page.failure import LOG_BYTES, address_of, lines_around_error, step_name
from argolocal.page.log_files import LogFile, find_log_with_error, read_end
from argolocal.page.tabs.artifact_source import ArtifactRow
from argolocal.page.tabs.artifacts import Listed, list_artifacts
from argolocal.page.tabs.graph import Drawing, describe_condition, duration_of
from argolocal.page.tabs.graph_fold import Member, order_by_phase
from argolocal.page.tabs.graph_plan import Plan, PlannedStep
from argolocal.page.tabs.graph_words import (
    describe_counts,
    describe_omission,
    describe_reuse,
    simplify_condition,
)
from argolocal.view import summary
from argolocal.view.summary import Step

STEPS_PER_PAGE = 100
MAX_YAML_CHARACTERS = 20_000


@dataclass(frozen=True)
class Value:
    """A parameter or artifact of a step."""

    name: str
    value: str


@dataclass(frozen=True)
class Attempt:
    """One attempt of a retried step."""

    number: int
    phase: str
    message: str
    started: str | None
    seconds: float | None
    log: str


@dataclass(frozen=True)
class Item:
    """A step that a loop, a group or a folded box contains."""

    label: str
    phase: str
    message: str
    seconds: float | None
    link: str


@dataclass(frozen=True)
class NodeDetails:
    """One step.

    `name`: identifier of the step. `condition`: the step's dependencies and its condition in words.
    `unmet_condition`: the condition that was not true, for a skipped step. `log`: lines around the
    error, or the last lines. `log_link` is the URL of the full log. `items`: a page of the inner
    steps, failed steps first. `progress`: progress that the running pod has reported, such as
    30/100. `counts`: the counts of the inner steps in words. `graph_link` is the URL of the graph
    of the inner steps. `close_link` is the URL of the page without these details.
    """

    name: str
    label: str
    phase: str
    kind: str
    template: str
    condition: str = ""
    unmet_condition: str = ""
    message: str = ""
    started: str | None = None
    finished: str | None = None
    seconds: float | None = None
    progress: str = ""
    pod: str = ""
    host: str = ""
    attempts: list[Attempt] = field(default_factory=list)
    inputs: list[Value] = field(default_factory=list)
    outputs: list[Value] = field(default_factory=list)
    artifacts: list[Listed] = field(default_factory=list)
    log: list[str] = field(default_factory=list)
    error_line: int = -1
    log_link: str = ""
    manifest: str = ""
    counts: str = ""
    items: list[Item] = field(default_factory=list)
    page: int = 1
    pages: int = 1
    previous_link: str = ""
    next_link: str = ""
    graph_link: str = ""
    close_link: str = ""


class NodeReader:
    """Reads the details of the steps of one run."""

    def __init__(
        self,
        plan: Plan,
        drawing: Drawing,
        logs: Mapping[str, LogFile],
        artifacts: Sequence[ArtifactRow],
        log_tab: str | None,
    ) -> None:
        """`log_tab`: name of the tab that shows logs, or None if the page has no such tab."""
        self.plan = plan
        self.run = plan.run
        self.drawing = drawing
        self.logs = logs
        self.artifacts = artifacts
        self.log_tab = log_tab

    def read(self, address: str, page: int) -> NodeDetails | None:
        """Return the details of the step or folded box with the identifier `address`, or None if no
        step has this identifier. `page`: number of the page of the inner steps of the step."""
        step = self.plan.find(address)
        if step:
            return self._describe_step(step, address, page)
        member = self.drawing.find_fold(address)
        if member:
            return self._describe_fold(member, page)
        return None

    def _describe_fold(self, member: Member, page: int) -> NodeDetails:
        return NodeDetails(
            name=member.address,
            label=member.label,
            phase=member.phase,
            kind="fold",
            template=str(member.steps[0].template.get("name") or ""),
            counts=describe_counts(member.counts),
            close_link=self.drawing.links.to(node=None),
            **self._page_of(member.steps, member.address, page),
        )

    def _describe_step(self, step: PlannedStep, address: str, page: int) -> NodeDetails:
        node = step.node or {}
        pod_node = self.plan.pod_node(step) or {}
        is_leaf = not step.is_group and step.kind != "suspend"
        pod = summary.make_pod_name(self.run.name, pod_node) if pod_node and is_leaf else ""
        log, error_line, log_pod = self._read_log(step, pod)

        condition = str(step.task.get("when") or "")
        unmet_condition = ""
        if step.phase == "Skipped" and condition:
            unmet_condition = simplify_condition(condition)

        items: dict[str, Any] = {}
        counts = ""
        if step.is_group:
            children = [
                child
                for child in self.plan.children(step)
                if step.kind == "loop" or not self.drawing.is_hidden(child)
            ]
            items = self._page_of(children, address, page)
            counts = describe_counts(self.drawing.counts(step)) if children else ""

        return NodeDetails(
            name=self.plan.address(step),
            label=step_name(self.run.name, step.node_name)
            if not step.task.get("expression")
            else step.label,
            phase=step.phase,
            kind=step.kind,
            template=str(step.template.get("name") or ""),
            condition=describe_condition(step),
            unmet_condition=unmet_condition,
            message=self._message(step),
            started=node.get("startedAt"),
            finished=node.get("finishedAt"),
            seconds=duration_of(step),
            progress=summary.find_reported_progress(pod_node),
            pod=log_pod or pod,
            host=str(pod_node.get("hostNodeName") or ""),
            attempts=self._attempts(step),
            inputs=_values(node or pod_node, "inputs"),
            outputs=_values(pod_node or node, "outputs"),
            artifacts=list_artifacts(self.run, self._artifacts_of(step)),
            log=log,
            error_line=error_line,
            log_link=self.link_log(log_pod),
            manifest=manifest_of(step),
            counts=counts,
            graph_link=self.drawing.links.to(root=address, open=None, node=None)
            if step.is_group
            else "",
            close_link=self.drawing.links.to(node=None),
            **items,
        )

    def _message(self, step: PlannedStep) -> str:
        node = step.node or {}
        message = str(node.get("message") or "")
        if step.phase == "Succeeded":
            return shorten(message)
        if step.phase == "Cached":
            return shorten(describe_reuse(message))
        if step.phase == "Omitted" and step.needs:
            message = describe_omission(step.task, self.plan.dependency_phases(step)) or message
        attempt_messages = [
            str(attempt.get("message") or "") for attempt in self.plan.attempts_of(step)
        ]
        return shorten(causes.extract_cause(causes.find_root_message(message, attempt_messages)))

    def _read_log(self, step: PlannedStep, pod: str) -> tuple[list[str], int, str]:
        """Return the lines of the step's log around its error, the index of the line with the error
        (or -1), and the name of the pod. For a job, read the log of the pod that has failed."""
        log = self.logs.get(pod) if pod else None
        if log is None and "resource" in step.template:
            prefix = f"{self.run.name}-{step.label}-"
            log = find_log_with_error(
                log for name, log in self.logs.items() if name.startswith(prefix)
            )
        if log is None:
            return [], -1, ""
        lines, error_line = lines_around_error(read_end(log, LOG_BYTES))
        return lines, error_line, log.name

    def link_log(self, pod: str) -> str:
        """Return the URL of the log of a pod, or "" if no log can be shown."""
        if not pod or self.log_tab is None:
            return ""
        return f"/runs/{self.run.name}/{self.log_tab}?{urlencode({'pod': pod})}"

    def _attempts(self, step: PlannedStep) -> list[Attempt]:
        attempts = self.plan.attempts_of(step)
        if len(attempts) < 2:
            return []
        return [
            Attempt(
                number=number,
                phase=self.plan.phase_of(node),
                message=shorten(causes.extract_cause(str(node.get("message") or ""))),
                started=node.get("startedAt"),
                seconds=Step(
                    "", "", 0, "", "", node.get("startedAt"), node.get("finishedAt")
                ).seconds,
                log=self.link_log(summary.make_pod_name(self.run.name, node)),
            )
            for number, node in enumerate(attempts, 1)
        ]

    def _artifacts_of(self, step: PlannedStep) -> list[ArtifactRow]:
        names = {node["name"] for node in (step.node, *self.plan.attempts_of(step)) if node}
        addresses = {address_of(self.run.name, name) for name in names}
        return [row for row in self.artifacts if row.node in addresses]

    def _page_of(self, steps: Sequence[PlannedStep], address: str, page: int) -> dict[str, Any]:
        """Return the fields of NodeDetails about one page of inner steps."""
        pages = max(1, -(-len(steps) // STEPS_PER_PAGE))
        page = min(page, pages)
        links = self.drawing.links
        first_index = (page - 1) * STEPS_PER_PAGE
        shown_steps = order_by_phase(steps)[first_index : first_index + STEPS_PER_PAGE]

        def link_to(number: int) -> str:
            return links.to("#node", node=address, items=str(number))

        return {
            "items": [
                Item(
                    label=step.label,
                    phase=step.phase,
                    message=self._message(step),
                    seconds=duration_of(step),
                    link=links.to("#node", node=self.plan.address(step)),
                )
                for step in shown_steps
            ],
            "page": page,
            "pages": pages,
            "previous_link": link_to(page - 1) if page > 1 else "",
            "next_link": link_to(page + 1) if page < pages else "",
        }


def _values(node: Mapping[str, Any], direction: str) -> list[Value]:
    """Return the inputs or the outputs of a node: parameters, artifacts of the inputs, the result
    and the exit code. `direction`: inputs or outputs."""
    values: list[Value] = []
    data = node.get(direction) or {}
    for parameter in data.get("parameters") or []:
        values.append(Value(parameter["name"], _text_of(parameter)))
    if data.get("result"):
        values.append(Value("result", shorten(str(data["result"]))))
    if direction == "outputs" and data.get("exitCode"):
        values.append(Value("exit code", str(data["exitCode"])))
    if direction == "inputs":
        for artifact in data.get("artifacts") or []:
            values.append(Value(str(artifact.get("name")), _location_of(artifact)))
    return values


def _text_of(parameter: Mapping[str, Any]) -> str:
    value = parameter.get("value", parameter.get("default"))
    if value is None:
        return "not set"
    return shorten(str(value))


def _location_of(artifact: Mapping[str, Any]) -> str:
    if artifact.get("raw"):
        return shorten(str((artifact["raw"] or {}).get("data", "")))
    location = artifact.get("s3") or artifact.get("http") or {}
    return f"artifact {location.get('key') or location.get('url') or 'without a location'}"


class _Dumper(yaml.SafeDumper):
    """A YAML dumper that writes multi-line texts as block scalars."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)


def manifest_of(step: PlannedStep) -> str:
    """Return the task and the template of a step as YAML."""
    documents: list[Any] = []
    if step.task and step.parent is not None:
        documents.append({"task": dict(step.task)})
    if step.template and "inline" not in step.task:
        documents.append({"template": dict(step.template)})

    text = "\n".join(
        yaml.dump(document, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)
        for document in documents
    )
    excess = len(text) - MAX_YAML_CHARACTERS
    if excess > 0:
        return f"{text[:MAX_YAML_CHARACTERS]}\n# {excess:,} characters more"
    return text
