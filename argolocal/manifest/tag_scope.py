"""Determine which tags have a value in each field of a manifest."""

import re
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from argolocal.manifest.object_labels import SCHEDULED_TIME_ANNOTATION
from argolocal.manifest.types import Data

SCHEDULED_TIME_TAG = f"workflow.annotations.{SCHEDULED_TIME_ANNOTATION}"
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
# If one of these tags is in a set, all tags that start with it are accepted, because their names
# are unknown: outputs of a template that is not in the manifest, outputs of the workflow if a
# globalName contains tags, and members of the items of a withParam loop.
OPEN_TAG = re.compile(
    r"item|((tasks|steps)\.[^.]*\.)?outputs|workflow\.outputs\.(parameters|artifacts)"
)

# valid name of a parameter or artifact
PARAMETER_NAME = re.compile(r"[-a-zA-Z0-9_]+")


def list_names(named_items: Any) -> list[str]:
    """Return the `name` of each item in a list of parameters, artifacts, tasks or templates."""
    return [str(named_item.get("name", "")) for named_item in named_items or []]


def has_value(parameter: Data) -> bool:
    """Return True if an input parameter has a value even if no argument is passed."""
    return any(value_field in parameter for value_field in ("value", "default", "valueFrom"))


def list_workflow_tags(spec: Data, metadata: Data) -> set[str]:
    """Return the tags that have a value in all fields of the workflow. A leading `=` marks the tags
    that have a value only in expressions.

    `metadata`: the workflow's labels and annotations. Source: validate.go, Workflow and
    newTemplateValidationCtx."""
    tags = {f"workflow.{tag_name}" for tag_name in WORKFLOW_FIELDS} | {"=workflow.parameters.json"}
    tags.update({f"workflow.creationTimestamp.{tag_name}" for tag_name in TIME_FORMATS})

    if spec.get("priority") is not None:
        tags.add("workflow.priority")
    if spec.get("onExit"):
        tags.add("workflow.failures")

    if spec.get("hooks"):
        # without onExit, Argo accepts this tag only in {{=...}}
        tags.add("=workflow.failures")

    parameter_names = list_names((spec.get("arguments") or {}).get("parameters"))
    if parameter_names:
        tags.update({"workflow.parameters", "workflow.parameters.json"})
        tags.update({f"workflow.parameters.{tag_name}" for tag_name in parameter_names})

    workflow_metadata = spec.get("workflowMetadata") or {}
    for field_owner in (metadata, workflow_metadata):
        for metadata_field in ("labels", "annotations"):
            tags.update(
                {
                    f"workflow.{metadata_field}.{tag_name}"
                    for tag_name in field_owner.get(metadata_field) or {}
                }
            )

    tags.update(
        {f"workflow.labels.{tag_name}" for tag_name in workflow_metadata.get("labelsFrom") or {}}
    )
    if SCHEDULED_TIME_TAG in tags:
        tags.add("workflow.scheduledTime")

    return tags


def list_global_output_tags(template: Data) -> set[str]:
    """Return the tags workflow.outputs.* that a template's outputs set. For a globalName that
    contains tags, the returned tag stands for all names."""
    tags = set[str]()

    for output_kind in ("parameters", "artifacts"):
        for output in (template.get("outputs") or {}).get(output_kind) or []:
            global_name = str(output.get("globalName") or "")
            if global_name:
                tags.add(
                    f"workflow.outputs.{output_kind}"
                    if "{{" in global_name
                    else f"workflow.outputs.{output_kind}.{global_name}"
                )

    return tags


def list_declared_tags(direction: str, template: Data) -> set[str]:
    """Return the tags of a template's `inputs` or `outputs`."""
    declarations = template.get(direction) or {}
    tags = {
        f"{direction}.{declaration_kind}.{name}"
        for declaration_kind in ("parameters", "artifacts")
        for name in list_names(declarations.get(declaration_kind))
    }
    return tags | {f"{direction}.parameters"}


def list_path_tags(template: Data) -> set[str]:
    """Return the tags whose values are paths of a pod's inputs and outputs, such as
    inputs.artifacts.x.path."""
    input_tags = list_declared_artifacts("inputs", template)
    return {f"{name}.path" for name in input_tags | list_declared_tags("outputs", template)}


def list_declared_artifacts(direction: str, template: Data) -> set[str]:
    """Return the tags of the artifacts among a template's `inputs` or `outputs`."""
    return {
        f"{direction}.artifacts.{name}"
        for name in list_names((template.get(direction) or {}).get("artifacts"))
    }


class TagSet:
    """A set of tags that have a value. A leading `=` in a looked-up tag stands for a name in an
    expression. In an expression, `a` has a value if a tag such as `a.b` has one, because `a` is
    then a map."""

    def __init__(self, tags: Iterable[str]) -> None:
        self.names = frozenset(tags)

    @cached_property
    def parent_tags(self) -> set[str]:
        return {parent_tag for name in self.names for parent_tag in _parent_prefixes(name)}

    def __contains__(self, tag: str) -> bool:
        name = tag.removeprefix("=")
        if name in self.names:
            return True
        if tag != name and (tag in self.names or name in self.parent_tags):
            return True
        return any(
            parent_tag in self.names and OPEN_TAG.fullmatch(parent_tag)
            for parent_tag in _parent_prefixes(name)
        )


class LoopItemTags(TagSet):
    """The tags of the items of a loop, which are `item`, and `item.KEY` for each key of at least
    one item. For a loop with withParam, all keys are accepted. Source: Argo's addItemsToScope."""

    def __init__(self, task: Data) -> None:
        self.allows_any_member = bool(task.get("withParam"))
        # {{item}} has a value in every loop; it is JSON text if the item is a map or list
        super().__init__(
            {
                "item",
                *(
                    name
                    for loop_item in task.get("withItems") or []
                    for name in _list_item_tags(loop_item)
                ),
            }
        )

    def __contains__(self, tag: str) -> bool:
        name = tag.removeprefix("=")
        return name in self.names or (self.allows_any_member and _first_word(name) == "item")


def _list_item_tags(loop_item: object) -> list[str]:
    if isinstance(loop_item, Mapping):
        return [f"item.{member_key}" for member_key in loop_item]
    if isinstance(loop_item, list):
        return [f"item.[{index}]" for index in range(len(loop_item))]
    return ["item"]


class NodeTags:
    """The tags of the completed tasks or steps of a template. `kind` is "tasks" or "steps".

    Outside expressions, Argo's validation accepts only the tags that fit the type of the called
    template (`list_allowed_tags`). Expressions may use all tags (`list_tags`).
    `tasks_without_status`: tasks whose tag `{{tasks.NAME.status}}` Argo's validation rejects.
    Source: validate.go, addOutputsToScope.
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

    def list_allowed_tags(self, task_name: str) -> Container[str]:
        """Return the tags that Argo's validation accepts for a task outside expressions. The
        returned tags lack the prefix `tasks.NAME.`."""
        task = self.tasks[task_name]

        template = task.get("inline") or self.templates.get(str(task.get("template")))
        if template is None:
            return self.list_tags(task_name)

        tags = {*NODE_FIELDS, *list_declared_tags("outputs", template)} - {"outputs.parameters"}
        has_loop = any(task.get(loop_field) for loop_field in ("withItems", "withParam"))
        tags.update({"outputs.parameters"} if has_loop else set())
        tags -= {"status"} if task_name in self.tasks_without_status else set()
        tags.update({"ip"} if template.get("daemon") else set())

        containers = (template.get("containerSet") or {}).get("containers") or []
        if (
            "main" in list_names(containers)
            or (has_loop and containers)
            or any(template_type in template for template_type in TYPES_WITH_RESULT)
        ):
            tags.update({*RESULT_FIELDS})

        return tags

    def list_tags(self, task_name: str) -> TagSet:
        """Return all tags of a task; the returned tags lack the prefix `tasks.NAME.`."""
        task = self.tasks[task_name]
        if "inline" in task:
            return self._list_node_tags(task["inline"])
        template_name = str(task.get("template"))
        if template_name not in self.cache:
            self.cache[template_name] = self._list_node_tags(self.templates.get(template_name))
        return self.cache[template_name]

    def _list_node_tags(self, template: Data | None) -> TagSet:
        return TagSet(
            {
                *ANY_NODE_FIELDS,
                *({"outputs"} if template is None else list_declared_tags("outputs", template)),
            }
        )


@dataclass(frozen=True)
class TagScope:
    """The tags that have a value in one field of a manifest: the tags in `layers`, and the tags of
    those tasks or steps in `nodes` for which `is_done` returns True."""

    layers: tuple[TagSet, ...]
    nodes: NodeTags | None = None
    is_done: Callable[[str], bool] = field(default=lambda name: False)

    def __contains__(self, tag: str) -> bool:
        node_group, node_name, node_tag = self._split_node_tag(tag.removeprefix("="))
        if not node_group or node_name in ("", "name"):
            return bool(node_group) or any(tag in layer for layer in self.layers)
        if tag.startswith("="):
            return self._is_done(node_name) and (
                not node_tag or f"={node_tag}" in node_group.list_tags(node_name)
            )
        return self._is_done(node_name) and node_tag in node_group.list_allowed_tags(node_name)

    def list_global_names(self) -> set[str]:
        """Return the tags that have a value and do not start with `tasks.` or `steps.`."""
        return {name for layer in self.layers for name in layer.names}

    def find_alternatives(self, tag: str) -> tuple[str, set[str]]:
        """Return the part of a tag without a value that may be misspelt, and the valid texts for
        this part."""
        node_group, node_name, _ = self._split_node_tag(tag)
        if not node_group:
            return tag, {
                name
                for layer in self.layers
                for name in layer.names
                if _first_word(name) == _first_word(tag)
            }
        if self._is_done(node_name):
            return tag, {
                f"{node_group.kind}.{node_name}.{name}"
                for name in node_group.list_tags(node_name).names
            }
        return node_name, {name for name in node_group.tasks if self.is_done(name)}

    def _is_done(self, node_name: str) -> bool:
        return self.nodes is not None and node_name in self.nodes.tasks and self.is_done(node_name)

    def _split_node_tag(self, tag: str) -> tuple[NodeTags | None, str, str]:
        """Return `nodes`, the name of the task or step, and the remaining tag. For a tag that does
        not belong to a task or step, return (None, "", "")."""
        first_word, _, tag_path = tag.partition(".")
        node_name, _, node_tag = tag_path.partition(".")
        if self.nodes and first_word == self.nodes.kind:
            return (self.nodes, node_name, node_tag)
        return (None, "", "")


def _first_word(name: str) -> str:
    return name.partition(".")[0]


def _parent_prefixes(name: str) -> Iterator[str]:
    """Yield the names of the maps that contain a dotted name, for example `a` and `a.b` for
    `a.b.c`."""
    dot_index = name.find(".")
    while dot_index >= 0:
        yield name[:dot_index]
        dot_index = name.find(".", dot_index + 1)


def find_strings(value: object, path: str) -> Iterator[tuple[str, str]]:
    """Yield (path, text) of every string in `value`. In a path, the item of a list is identified by
    its `name` or, without a name, by its index."""
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, dict):
        for key, child_value in value.items():
            yield from find_strings(child_value, f"{path}.{key}")
    elif isinstance(value, list):
        for index, child_value in enumerate(value):
            if isinstance(child_value, dict):
                name = child_value.get("name", index)
            else:
                name = index

            yield from find_strings(child_value, f"{path}[{name}]")
