"""Determine in which templates and steps Argo's validation knows each tag `workflow.outputs.*`.
Argo's validation starts at the entrypoint, visits all called templates, and collects their global
outputs.

    outputs = GlobalOutputs(templates, ["main", "exit"])
    outputs.list_known_tags(step)

After Argo has visited a template, its outputs with a globalName are known in later steps, in the
entire DAG, and in templates that are visited later, such as onExit and hooks. Outputs of the
entrypoint template and of a hook's template are never known. If a globalName contains tags, all
names of global outputs count as known. Source: validate.go, addOutputsToScope.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from argolocal.manifest.resolve import list_templates
from argolocal.manifest.tag_scope import TagSet, list_global_output_tags
from argolocal.manifest.types import Data

ANY_OUTPUT_TAGS = {"workflow.outputs.parameters", "workflow.outputs.artifacts"}
# placeholder for a template that is not in the manifest
MISSING_TEMPLATE: Data = {}


class GlobalOutputs:
    """The global outputs that are known in each template and step. In expressions, all global
    outputs count as known, because Argo does not check expressions.

    `root_names`: names of the templates where the validation starts, in its order.
    """

    def __init__(self, templates: Mapping[str, Data], root_names: Sequence[str]) -> None:
        self.templates = templates
        all_bodies = [
            template for template, _ in list_templates({"templates": [*templates.values()]}, "")
        ]
        self.all_tags = set[str]().union(*map(list_global_output_tags, all_bodies))
        self.expression_tags = {f"={tag}" for tag in self.all_tags} | (
            self.all_tags & ANY_OUTPUT_TAGS
        )
        self.known_tags: set[str] = set()
        self.known_names = TagSet(self.expression_tags)
        self.all_names = TagSet(self.all_tags | self.expression_tags)
        # id of a template or step → known tags
        self.names_by_id: dict[int, TagSet] = {}

        # skip a missing entrypoint, which WorkflowRules reports
        if not self.all_tags <= ANY_OUTPUT_TAGS and root_names[0] in templates:
            self._walk([templates[root_name] for root_name in root_names if root_name in templates])

    def list_known_tags(self, field_owner: Data) -> TagSet:
        """Return the tags `workflow.outputs.*` that are known when Argo checks this step or
        template."""
        return self.names_by_id.get(id(field_owner), self.all_names)

    def _walk(self, root_templates: list[Data]) -> None:
        """Visit the root templates and all templates that they call, in Argo's order."""
        pending_visits = [self._visit(template) for template in reversed(root_templates)]
        # a loop instead of recursion, because templates may be nested deeper than Python's stack
        # allows
        while pending_visits:
            template = next(pending_visits[-1], None)
            if template is None:
                pending_visits.pop()
            elif id(template) not in self.names_by_id:
                pending_visits.append(self._visit(template))

    def _visit(self, template: Data) -> Iterator[Data]:
        """Record the tags that are known in a template and its steps, and yield each template that
        the template calls. `_walk` visits the called template before it resumes the generator
        `_visit`."""
        if id(template) in self.names_by_id:
            return

        self.names_by_id[id(template)] = self.known_names
        if "dag" in template:
            yield from self._visit_tasks(template)

        for step, called_template in self._list_calls(template) if "steps" in template else ():
            yield called_template
            known_after_step = self.known_tags | list_global_output_tags(called_template)
            if "onExit" in step or "exit" in (step.get("hooks") or {}):
                self._set_known(known_after_step)

            self.names_by_id[id(step)] = self.known_names
            self._set_known(known_after_step)

        self.names_by_id[id(template)] = self.known_names

    def _visit_tasks(self, dag: Data) -> Iterator[Data]:
        """Yield the template of each task of a DAG. In the template of each task, the outputs of
        all other tasks are known, because Argo visits the tasks in random order."""
        called_templates = [called_template for _, called_template in self._list_calls(dag)]
        outputs_by_template = [
            self._list_outputs_below(called_template) for called_template in called_templates
        ]
        tag_counts = Counter(tag for tags in outputs_by_template for tag in tags)
        tags_known_before = self.known_tags
        for called_template, task_outputs in zip(
            called_templates, outputs_by_template, strict=True
        ):
            self._set_known(
                tags_known_before
                | {tag for tag in tag_counts if tag_counts[tag] > (tag in task_outputs)}
            )
            yield called_template
        self._set_known(tags_known_before | set(tag_counts))

    def _set_known(self, tags: set[str]) -> None:
        if tags != self.known_tags:
            self.known_tags = tags
            self.known_names = TagSet(tags | self.expression_tags)

    def _list_outputs_below(self, root: Data) -> set[str]:
        """Return the global tags of the outputs of the template `root`, and of all templates that
        `root` calls directly or indirectly."""
        tags = set[str]()
        templates = [root]
        seen_ids = set[int]()
        while templates:
            template = templates.pop()
            if id(template) not in seen_ids:
                seen_ids.add(id(template))
                tags.update(list_global_output_tags(template))
                templates += [called_template for _, called_template in self._list_calls(template)]
        return tags

    def _list_calls(self, template: Data) -> Iterator[tuple[Data, Data]]:
        """Yield each step or task of a template, with the template that the step or task calls."""
        step_groups = [
            (template.get("dag") or {}).get("tasks") or [],
            *(template.get("steps") or []),
        ]
        for step in (step for step_group in step_groups for step in step_group):
            yield (
                step,
                step.get("inline")
                or self.templates.get(str(step.get("template")), MISSING_TEMPLATE),
            )
