"""The steps of a run according to its manifest. Each step that has started also has a node.

    plan = Plan(run)
    for step in plan.children(plan.root):
        print(step.label, step.phase, step.needs)

The names of nodes are those of Argo (see engine/nodes.py): PARENT.TASK for a task,
PARENT[GROUP].STEP for a step, NAME(INDEX:ITEM) for an item of a loop, NAME(N) for an attempt, and
NAME.hooks.KEY for a hook.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from argolocal.engine.order import parse_dependencies
from argolocal.manifest.allowed_values import FAILED_PHASES, TEMPLATE_TYPES
from argolocal.manifest.loops import has_loop
from argolocal.page.failure import address_of
from argolocal.page.sources import Run
from argolocal.page.tabs.graph_words import PHASE_WORDS, without_loop
from argolocal.view.summary import CACHED_MESSAGE, FINISHED_PHASES

ITEM = re.compile(r"(?s)(.*)\((\d+):([^()]*)\)")
ATTEMPT = re.compile(r"(?s)(.*)\((\d+)\)")
MAX_DEPTH = 12


@dataclass(frozen=True)
class PlannedStep:
    """A step of the manifest.

    `node_name` is Argo's name for the step's node, even if the node does not exist yet. `task`: the
    entry in the manifest, which is a task, a step or a hook. `template`: the template that the step
    calls. `scope`: prefix of the names of templates that the step's template calls. `needs`: labels
    of the steps in the same group on which the step depends. `kind` is `loop`, or the field that
    defines the template, such as `dag`. `parent`: template that contains the step. `depth`: nesting
    level of the template.
    """

    node_name: str
    label: str
    task: Mapping[str, Any]
    template: Mapping[str, Any]
    scope: str = ""
    kind: str = ""
    node: Mapping[str, Any] | None = None
    phase: str = "Planned"
    needs: tuple[str, ...] = ()
    parent: Mapping[str, Any] | None = None
    depth: int = 0

    @property
    def is_group(self) -> bool:
        """True if the step consists of other steps."""
        return self.kind in ("dag", "steps", "loop")


class Plan:
    """The steps of one run. The steps of a plan are created on demand from the run's manifest and
    nodes."""

    def __init__(self, run: Run) -> None:
        self.run = run
        spec = run.status.get("storedWorkflowTemplateSpec") or run.spec
        self.spec: Mapping[str, Any] = spec
        self.templates: dict[str, Mapping[str, Any]] = {
            **{template["name"]: template for template in spec.get("templates") or []},
            **(run.manifest.get("storedTemplates") or {}),
            **(run.status.get("storedTemplates") or {}),
        }

        self.nodes: dict[str, Mapping[str, Any]] = {}
        self.items: dict[str, list[Mapping[str, Any]]] = {}
        self.attempts: dict[str, list[Mapping[str, Any]]] = {}
        for node in list((run.status.get("nodes") or {}).values()):
            self._add_node(node)

        # (name of a node, kind) → its steps
        self._children: dict[tuple[str, str], list[PlannedStep]] = {}
        self.root = self._make_step(
            run.name, run.name, {"template": spec.get("entrypoint", "")}, "", None
        )

    def _add_node(self, node: Mapping[str, Any]) -> None:
        name = node["name"]
        self.nodes[name] = node
        if not name.endswith(")"):
            return

        item = ITEM.fullmatch(name)
        attempt = ATTEMPT.fullmatch(name)
        if item:
            self.items.setdefault(item[1], []).append(node)
        elif attempt and self.nodes.get(attempt[1], {}).get("type", "Retry") == "Retry":
            self.attempts.setdefault(attempt[1], []).append(node)

    def children(self, step: PlannedStep) -> list[PlannedStep]:
        """Return the steps of a group, in the order of the manifest."""
        key = step.node_name, step.kind
        if key not in self._children:
            self._children[key] = self._make_children(step)
        return self._children[key]

    def _make_children(self, step: PlannedStep) -> list[PlannedStep]:
        if step.kind == "loop":
            return self._items_of(step)

        group_name = self._group_name(step)
        children: list[PlannedStep] = []
        tasks = {task["name"]: task for task in (step.template.get("dag") or {}).get("tasks") or []}
        for name, task in tasks.items():
            needs, _ = parse_dependencies(task, tasks)
            child = self._make_step(
                f"{group_name}.{name}", name, task, step.scope, step.template, step.depth
            )
            children.append(replace(child, needs=tuple(need for need in needs if need in tasks)))

        previous_labels: tuple[str, ...] = ()
        for number, parallel_steps in enumerate(step.template.get("steps") or []):
            for task in parallel_steps:
                name = task["name"]
                child = self._make_step(
                    f"{group_name}[{number}].{name}",
                    name,
                    task,
                    step.scope,
                    step.template,
                    step.depth,
                )
                children.append(replace(child, needs=previous_labels))
            previous_labels = tuple(task["name"] for task in parallel_steps) or previous_labels

        # if a group does not run, its steps get the group's phase
        if step.phase in ("Skipped", "Omitted", "Cached"):
            return [
                replace(child, phase=step.phase) if not child.node else child for child in children
            ]
        return children

    def hooks(self, step: PlannedStep) -> list[PlannedStep]:
        """Return the hooks of a step, or the hooks of the run if `step` is the root. The field
        `when` of a hook's `task` contains its condition."""
        if step is self.root:
            owner = self.spec
        else:
            owner = step.task

        hooks = {
            f"{step.node_name}.hooks.{key}": {**hook, "when": hook.get("expression", "")}
            for key, hook in (owner.get("hooks") or {}).items()
        }
        exit_hook = hooks.pop(f"{step.node_name}.hooks.exit", None)
        if owner.get("onExit"):
            exit_hook = {"template": owner["onExit"]}
        if exit_hook:
            hooks[f"{step.node_name}.onExit"] = exit_hook

        return [
            self._make_step(name, str(hook.get("template", "")), hook, step.scope, None, step.depth)
            for name, hook in hooks.items()
        ]

    def all_hooks(self, step: PlannedStep) -> list[PlannedStep]:
        """Return the hooks of a group and of its direct children."""
        children = self.children(step) if step.is_group and step.kind != "loop" else []
        return [hook for owner in (step, *children) for hook in self.hooks(owner)]

    def find(self, address: str) -> PlannedStep | None:
        """Return the step with this identifier (see `address_of`), or None."""
        return self.path(address)[-1] if self.path(address) else None

    def path(self, address: str) -> list[PlannedStep]:
        """Return the steps from the root to the step with this identifier, or [] if the step does
        not exist."""
        if address == self.run.name:
            return [self.root]

        name = self._node_name(address)
        path = [self.root]
        while path[-1].node_name != name and len(path) <= 2 * MAX_DEPTH:
            step = path[-1]
            candidates = [*self.children(step), *self.all_hooks(step)]
            if step is self.root:
                candidates += self.hooks(step)
            next_step = next((child for child in candidates if self._contains(child, name)), None)
            if next_step is None:
                return []
            path.append(next_step)

        return path if path[-1].node_name == name else []

    def _node_name(self, address: str) -> str:
        """Return the name of the node with this identifier. For an attempt of a retried step,
        return the name of the step's node."""
        separator = "" if address.startswith(("[", "(")) else "."
        name = f"{self.run.name}{separator}{address}"
        attempt = ATTEMPT.fullmatch(name)
        if attempt and attempt[1] in self.attempts:
            return attempt[1]
        return name

    def _contains(self, step: PlannedStep, name: str) -> bool:
        """Return True if the node `name` is the node of a step or of one of its inner steps."""
        if step.node_name == name:
            return True
        if not name.startswith(step.node_name):
            return False
        following = name[len(step.node_name)]
        is_hook = name.startswith((f"{step.node_name}.hooks.", f"{step.node_name}.onExit"))
        return step.is_group and following in ".[(" and not is_hook

    def walk(
        self,
        step: PlannedStep,
        is_hidden: Callable[[PlannedStep], bool] = lambda step: False,
        templates: frozenset[str] = frozenset(),
    ) -> Iterator[PlannedStep]:
        """Yield all steps inside a step in the order of their start. A group comes before its own
        steps.

        The steps of a recursive call of a template are included only if the call has started.
        """
        children = sorted(
            self.children(step), key=lambda child: str((child.node or {}).get("startedAt") or "~")
        )
        for child in [*children, *(self.hooks(step) if step is self.root else ())]:
            if is_hidden(child):
                continue
            yield child
            name = str(child.template.get("name"))
            is_recursion = name in templates and child.node is None
            if child.is_group and not is_recursion and child.depth < MAX_DEPTH:
                yield from self.walk(child, is_hidden, templates | {name})

    def counts(self, step: PlannedStep) -> Counter[str]:
        """Return the number of the direct steps of a group, by phase."""
        if step.kind == "loop":
            return Counter(self.phase_of(node) for node in self.items.get(step.node_name, []))
        return Counter(child.phase for child in self.children(step))

    def attempts_of(self, step: PlannedStep) -> list[Mapping[str, Any]]:
        """Return the nodes of the attempts of a retried step."""
        return self.attempts.get(step.node_name, [])

    def dependency_phases(self, step: PlannedStep) -> dict[str, str]:
        """Return the phases of the tasks on which a task of a DAG depends, by the name of the
        task."""
        prefix = step.node_name.removesuffix(str(step.task.get("name") or ""))
        return {need: self.phase_of(self.nodes.get(f"{prefix}{need}")) for need in step.needs}

    def pod_node(self, step: PlannedStep) -> Mapping[str, Any] | None:
        """Return the node of the step's pod, or None if the step has not started. For a retried
        step, return the node of its last attempt."""
        attempts = self.attempts_of(step)
        if attempts:
            return attempts[-1]
        return step.node

    def phase_of(self, node: Mapping[str, Any] | None) -> str:
        """Return the phase of a node. In addition to Argo's phases, a step may be Planned (not
        started), Cached, Interrupted, or Waiting (suspended, or waiting for a lock or a retry)."""
        if not node:
            return "Planned"
        message = str(node.get("message") or "")
        if CACHED_MESSAGE.fullmatch(message) or (node.get("memoizationStatus") or {}).get("hit"):
            return "Cached"

        phase = str(node.get("phase") or "Pending")
        attempts = self.attempts.get(node["name"], [])
        if node["type"] == "Retry" and phase == "Running" and attempts:
            # Argo leaves the Retry node of a stopped run incomplete
            if self.run.phase in FINISHED_PHASES or attempts[-1]["phase"] == "Pending":
                phase = attempts[-1]["phase"]
            elif attempts[-1]["phase"] in FAILED_PHASES:
                phase = "Waiting"

        is_suspended = node["type"] == "Suspend" and phase == "Running"
        if is_suspended or "synchronizationStatus" in node:
            return "Waiting"
        if self.run.phase == "Interrupted" and phase in ("Running", "Pending"):
            return "Interrupted"
        return phase

    def _items_of(self, step: PlannedStep) -> list[PlannedStep]:
        """Return a step for each item of a loop. The label of such a step is INDEX:ITEM, or the
        index alone if the item is the same number."""
        task = without_loop(step.task)
        items = []
        for node in self.items.get(step.node_name, []):
            label = node["name"]
            match = ITEM.fullmatch(label)
            if match:
                label = match[2] if match[3] == match[2] else f"{match[2]}: {match[3]}"

            item = self._make_step(
                node["name"], label, task, step.scope, step.parent, step.depth, is_item=True
            )
            items.append(item)
        return items

    def _group_name(self, step: PlannedStep) -> str:
        """Return the name of the node that has the steps of a group as its children."""
        attempts = self.attempts_of(step)
        if attempts:
            return attempts[-1]["name"]
        return step.node_name

    def _make_step(
        self,
        name: str,
        label: str,
        task: Mapping[str, Any],
        scope: str,
        parent: Mapping[str, Any] | None,
        depth: int = 0,
        is_item: bool = False,
    ) -> PlannedStep:
        node = self.nodes.get(name)
        template, template_scope = self._find_template(task, scope)
        kind = next((field for field in TEMPLATE_TYPES if template.get(field) is not None), "")
        is_loop = not is_item and has_loop(task)
        if is_loop:
            kind = "loop"

        if node:
            phase = self.phase_of(node)
        elif is_loop and name in self.items:
            # a loop in a `steps` template has no node of its own, only nodes of its items
            phase = combine_phases(Counter(map(self.phase_of, self.items[name])))
        else:
            phase = "Planned"

        return PlannedStep(
            node_name=name,
            label=label,
            task=task,
            template=template,
            scope=template_scope if kind != "loop" else scope,
            kind=kind,
            node=node,
            phase=phase,
            parent=parent,
            depth=depth + 1,
        )

    def _find_template(
        self, caller: Mapping[str, Any], scope: str
    ) -> tuple[Mapping[str, Any], str]:
        """Return the template that a task calls, and the scope of the template's own calls. If the
        name of the template contains tags, the template is unknown and {} is returned."""
        if caller.get("inline"):
            return caller["inline"], scope

        reference = caller.get("templateRef")
        if reference:
            kind = "cluster" if reference.get("clusterScope") else "namespaced"
            name = f"{kind}/{reference.get('name')}/{reference.get('template')}"
        else:
            name = str(caller.get("template") or "")

        if "/" in name:
            return self.templates.get(name, {}), name.rpartition("/")[0]
        scoped_template = self.templates.get(f"{scope}/{name}") if scope else None
        if scoped_template:
            return scoped_template, scope
        return self.templates.get(name, {}), ""

    def address(self, step: PlannedStep) -> str:
        """Return the identifier of a step in the page's query parameters."""
        return address_of(self.run.name, step.node_name)


def combine_phases(counts: Mapping[str, int]) -> str:
    """Return the combined phase of several steps: the phase that is the most important one for a
    user. `counts`: number of steps by phase."""
    if counts.get("Planned") and sum(counts.values()) > counts["Planned"]:
        started_counts = {phase: count for phase, count in counts.items() if phase != "Planned"}
        phase = combine_phases(started_counts)
        return "Running" if phase in ("Succeeded", "Cached") else phase

    order = ["Interrupted", *PHASE_WORDS]
    return next((phase for phase in order if counts.get(phase)), "Planned")
