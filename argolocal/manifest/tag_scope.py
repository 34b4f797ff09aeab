"""Determine the tags that have a value at each place in a manifest."""

import re
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from argolocal.manifest.object_labels import SCHEDULED_TIME
from argolocal.manifest.types import Data

SCHEDULED_TIME_TAG = f"workflow.annotations.{SCHEDULED_TIME}"
WORKFLOW_FIELDS = (
    "name",
    "namespace",
    "uid",
    "mainEntrypoint",
    "serviceAccountName",
    "status",
    "duration",
)
WORKFLOW_FIELDS += ("labels", "labels.json", "annotations", "annotations.json", "creationTimestamp")
# names of the parts of the creation time, such as Y in {{workflow.creationTimestamp.Y}}
TIME_FORMATS = ("s", "RFC3339", *"BbmAadHIMSYypZzL")
NODE_FIELDS = ("id", "status", "startedAt", "finishedAt", "hostNodeName")
RESULT_FIELDS = ("exitCode", "outputs.result")
# types of the templates with the output `result`
TYPES_WITH_RESULT = ("container", "script", "data", "http", "plugin")
ANY_NODE_FIELDS = (*NODE_FIELDS, *RESULT_FIELDS, "ip", "outputs.parameters")
# If one of these tags has a value, all tags that start with it also count as having a value. The
# tags stand for the outputs of a template that is not in the manifest, the workflow's outputs if a
# globalName contains tags, and the item of a loop whose items are not in the manifest.
OPEN_TAG = re.compile(
    r"item|((tasks|steps)\.[^.]*\.)?outputs|workflow\.outputs\.(parameters|artifacts)"
)

PARAMETER_NAME = re.compile(r"[-a-zA-Z0-9_]+")  # valid name of a parameter or artifact


def names(items: Any) -> list[str]:
    """Return the `name` of each item in a list of parameters, artifacts, tasks or templates."""
    return [str(item.get("name", "")) for item in items or []]


def has_value(parameter: Data) -> bool:
    """Return True if an input parameter has a value even if no argument is passed."""
    return any(key in parameter for key in ("value", "default", "valueFrom"))


def workflow_tags(spec: Data, metadata: Data) -> set[str]:
    """Return the tags that have a value everywhere in the workflow. A leading `=` marks tags that
    have a value only in expressions.

    `metadata`: labels and annotations of the workflow that are not in its spec. Source:
    validate.go, Workflow and newTemplateValidationCtx."""
    tags = {f"workflow.{name}" for name in WORKFLOW_FIELDS} | {"=workflow.parameters.json"}
    tags.update({f"workflow.creationTimestamp.{name}" for name in TIME_FORMATS})

    if spec.get("priority") is not None:
        tags.add("workflow.priority")
    if spec.get("onExit"):
        tags.add("workflow.failures")

    if spec.get("hooks"):
        # without onExit, Argo accepts this tag only in {{=...}}
        tags.add("=workflow.failures")

    parameter_names = names((spec.get("arguments") or {}).get("parameters"))
    if parameter_names:
        tags.update({"workflow.parameters", "workflow.parameters.json"})
        tags.update({f"workflow.parameters.{name}" for name in parameter_names})

    workflow_metadata = spec.get("workflowMetadata") or {}
    for holder in (metadata, workflow_metadata):
        for kind in ("labels", "annotations"):
            tags.update({f"workflow.{kind}.{name}" for name in holder.get(kind) or {}})

    tags.update({f"workflow.labels.{name}" for name in workflow_metadata.get("labelsFrom") or {}})
    if SCHEDULED_TIME_TAG in tags:
        tags.add("workflow.scheduledTime")

    return tags


def global_outputs(template: Data) -> set[str]:
    """Return the global tags that a template's outputs set. A globalName that contains tags may set
    any global tag."""
    tags = set[str]()

    for kind in ("parameters", "artifacts"):
        for output in (template.get("outputs") or {}).get(kind) or []:
            name = str(output.get("globalName") or "")
            if name:
                tags.add(
                    f"workflow.outputs.{kind}"
                    if "{{" in name
                    else f"workflow.outputs.{kind}.{name}"
                )

    return tags


def declared_tags(direction: str, template: Data) -> set[str]:
    """Return the tags of a template's `inputs` or `outputs`."""
    items = template.get(direction) or {}
    tags = {
        f"{direction}.{kind}.{name}"
        for kind in ("parameters", "artifacts")
        for name in names(items.get(kind))
    }
    return tags | {f"{direction}.parameters"}


def path_tags(template: Data) -> set[str]:
    """Return the tags whose values are paths of a pod's inputs and outputs, such as
    inputs.artifacts.x.path."""
    inputs = declared_artifacts("inputs", template)
    return {f"{name}.path" for name in inputs | declared_tags("outputs", template)}


def declared_artifacts(direction: str, template: Data) -> set[str]:
    return {
        f"{direction}.artifacts.{name}"
        for name in names((template.get(direction) or {}).get("artifacts"))
    }


class TagSet:
    """A set of tags that have a value. In an expression (written `=a`), the map `a` has a value if
    one of its members, such as `a.b`, does."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = frozenset(names)

    @cached_property
    def parent_tags(self) -> set[str]:
        return {parent for name in self.names for parent in _parent_prefixes(name)}

    def __contains__(self, tag: str) -> bool:
        name = tag.removeprefix("=")
        if name in self.names:
            return True
        if tag != name and (tag in self.names or name in self.parent_tags):
            return True
        return any(
            parent in self.names and OPEN_TAG.fullmatch(parent) for parent in _parent_prefixes(name)
        )


class LoopItemTags(TagSet):
    """The tags of a loop's item. For withItems, the tag of a member has a value if at least one
    item has this member.

    Source: Argo's addItemsToScope.
    """

    def __init__(self, task: Data) -> None:
        self.is_open = bool(task.get("withParam"))
        # {{item}} has a value in every loop; it is JSON text if the item is a map or list
        super().__init__(
            {"item", *(name for item in task.get("withItems") or [] for name in _item_tags(item))}
        )

    def __contains__(self, tag: str) -> bool:
        name = tag.removeprefix("=")
        return name in self.names or (self.is_open and _head(name) == "item")


def _item_tags(item: object) -> list[str]:
    if isinstance(item, Mapping):
        return [f"item.{key}" for key in item]
    if isinstance(item, list):
        return [f"item.[{index}]" for index in range(len(item))]
    return ["item"]


class Nodes:
    """The tags of the finished tasks or steps of a template. `kind` is "tasks" or "steps".

    Outside expressions, Argo's validation accepts only tags for the type of the called template
    (`allowed_tags`). Expressions may use all tags (`tags_of`). `tasks_without_status`: tasks whose
    tag `{{tasks.NAME.status}}` Argo's validation rejects. Source: validate.go, addOutputsToScope.
    """

    def __init__(
        self,
        kind: str,
        tasks: Mapping[str, Data],
        templates: Mapping[str, Data],
        tasks_without_status: Collection[str] = (),
    ) -> None:
        self.kind = kind
        self.tasks = tasks
        self.templates = templates
        self.tasks_without_status = tasks_without_status
        self.cache: dict[str, TagSet] = {}

    def allowed_tags(self, name: str) -> Container[str]:
        """Return the tags of the task `name` that Argo's validation allows."""
        task = self.tasks[name]

        template = task.get("inline") or self.templates.get(str(task.get("template")))
        if template is None:
            return self.tags_of(name)

        tags = {*NODE_FIELDS, *declared_tags("outputs", template)} - {"outputs.parameters"}
        has_loop = any(task.get(key) for key in ("withItems", "withParam"))
        tags.update({"outputs.parameters"} if has_loop else set())
        tags -= {"status"} if name in self.tasks_without_status else set()
        tags.update({"ip"} if template.get("daemon") else set())

        containers = (template.get("containerSet") or {}).get("containers") or []
        if (
            "main" in names(containers)
            or (has_loop and containers)
            or any(key in template for key in TYPES_WITH_RESULT)
        ):
            tags.update({*RESULT_FIELDS})

        return tags

    def tags_of(self, name: str) -> TagSet:
        task = self.tasks[name]
        if "inline" in task:
            return self._node_tags(task["inline"])
        template = str(task.get("template"))
        if template not in self.cache:
            self.cache[template] = self._node_tags(self.templates.get(template))
        return self.cache[template]

    def _node_tags(self, template: Data | None) -> TagSet:
        return TagSet(
            {
                *ANY_NODE_FIELDS,
                *({"outputs"} if template is None else declared_tags("outputs", template)),
            }
        )


@dataclass(frozen=True)
class Scope:
    """The tags that have a value at one place of a manifest: the tags in `layers` and the tags of
    finished `nodes`."""

    layers: tuple[TagSet, ...]
    nodes: Nodes | None = None
    is_done: Callable[[str], bool] = field(default=lambda name: False)

    def __contains__(self, tag: str) -> bool:
        kind, node, node_tag = self._split_node_tag(tag.removeprefix("="))
        if not kind or node in ("", "name"):
            return bool(kind) or any(tag in layer for layer in self.layers)
        if tag.startswith("="):
            return self._is_done(node) and (not node_tag or f"={node_tag}" in kind.tags_of(node))
        return self._is_done(node) and node_tag in kind.allowed_tags(node)

    def global_names(self) -> set[str]:
        """Return the tags that have a value here and do not belong to a task or step."""
        return {name for layer in self.layers for name in layer.names}

    def find_alternatives(self, tag: str) -> tuple[str, set[str]]:
        """Return the part of `tag` that may be misspelt, and the valid alternatives for this
        part."""
        kind, node, _ = self._split_node_tag(tag)
        if not kind:
            return tag, {
                name for layer in self.layers for name in layer.names if _head(name) == _head(tag)
            }
        if self._is_done(node):
            return tag, {f"{kind.kind}.{node}.{name}" for name in kind.tags_of(node).names}
        return node, {name for name in kind.tasks if self.is_done(name)}

    def _is_done(self, node: str) -> bool:
        return self.nodes is not None and node in self.nodes.tasks and self.is_done(node)

    def _split_node_tag(self, tag: str) -> tuple[Nodes | None, str, str]:
        """Split the tag of a task or step into the `Nodes` object, the name of the task or step,
        and the rest of the tag."""
        head, _, path = tag.partition(".")
        node, _, node_tag = path.partition(".")
        if self.nodes and head == self.nodes.kind:
            return (self.nodes, node, node_tag)
        return (None, "", "")


def _head(name: str) -> str:
    return name.partition(".")[0]


def _parent_prefixes(name: str) -> Iterator[str]:
    end = name.find(".")
    while end >= 0:
        yield name[:end]
        end = name.find(".", end + 1)


def find_strings(value: object, path: str) -> Iterator[tuple[str, str]]:
    """Yield the path and the text of every string in `value`. In a path, a list item is identified
    by its `name` if it has one, else by its index."""
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from find_strings(item, f"{path}.{key}")
    elif isinstance(value, list):
        for number, item in enumerate(value):
            if isinstance(item, dict):
                name = item.get("name", number)
            else:
                name = number

            yield from find_strings(item, f"{path}[{name}]")
