"""Determine the places of a workflow where each tag `workflow.outputs.*` is known. Argo's
validation starts at the entrypoint, visits all called templates, and collects their global outputs.

    outputs = GlobalOutputs(templates, ["main", "exit"])
    outputs.tags_at(step)

An output with a globalName is known after the visit of its template: in later steps, in the entire
DAG, and in templates that are visited later, such as onExit and hooks. Outputs of the entrypoint
template and of a hook's template are never known. If a globalName contains tags, all names of
global outputs count as known. Source: validate.go, addOutputsToScope.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from argolocal.manifest.resolve import all_templates
from argolocal.manifest.tag_scope import TagSet, global_outputs
from argolocal.manifest.types import Data

ANY_OUTPUT = {"workflow.outputs.parameters", "workflow.outputs.artifacts"}
MISSING_TEMPLATE: Data = {}  # placeholder for a template that is not in the manifest


class GlobalOutputs:
    """The global outputs that are known in each template or step. In expressions, all global
    outputs count as known, because Argo does not check expressions."""

    def __init__(self, templates: Mapping[str, Data], roots: Sequence[str]) -> None:
        self.templates = templates
        bodies = [
            template for template, _ in all_templates({"templates": [*templates.values()]}, "")
        ]
        self.all_tags = set[str]().union(*map(global_outputs, bodies))
        self.expression_tags = {f"={tag}" for tag in self.all_tags} | (self.all_tags & ANY_OUTPUT)
        self.known_tags: set[str] = set()
        self.known_names = TagSet(self.expression_tags)
        self.all_names = TagSet(self.all_tags | self.expression_tags)
        self.names_by_id: dict[int, TagSet] = {}  # id of a template or step → known tags

        # skip a missing entrypoint, which WorkflowRules reports
        if not self.all_tags <= ANY_OUTPUT and roots[0] in templates:
            self._walk([templates[name] for name in roots if name in templates])

    def tags_at(self, holder: Data) -> TagSet:
        """Return the tags that are known when Argo checks this step or template."""
        return self.names_by_id.get(id(holder), self.all_names)

    def _walk(self, roots: list[Data]) -> None:
        visits = [self._visit(template) for template in reversed(roots)]
        # this loop avoids recursion, because templates may be nested deeper than Python's stack
        # allows
        while visits:
            template = next(visits[-1], None)
            if template is None:
                visits.pop()
            elif id(template) not in self.names_by_id:
                visits.append(self._visit(template))

    def _visit(self, template: Data) -> Iterator[Data]:
        """Visit a template, and yield each template that it calls. Before this generator resumes,
        `_walk` visits the called template."""
        if id(template) in self.names_by_id:
            return

        self.names_by_id[id(template)] = self.known_names
        if "dag" in template:
            yield from self._tasks(template)

        for step, called_template in self._calls(template) if "steps" in template else ():
            yield called_template
            known_after_step = self.known_tags | global_outputs(called_template)
            if "onExit" in step or "exit" in (step.get("hooks") or {}):
                self._set_known(known_after_step)

            self.names_by_id[id(step)] = self.known_names
            self._set_known(known_after_step)

        self.names_by_id[id(template)] = self.known_names

    def _tasks(self, dag: Data) -> Iterator[Data]:
        """Visit the tasks of a DAG. In each task, the outputs of all other tasks are known, because
        Argo visits the tasks in random order."""
        called_templates = [called_template for _, called_template in self._calls(dag)]
        outputs = [self._outputs_below(called_template) for called_template in called_templates]
        counts = Counter(tag for tags in outputs for tag in tags)
        known_before = self.known_tags
        for called_template, own_outputs in zip(called_templates, outputs, strict=True):
            self._set_known(
                known_before | {tag for tag in counts if counts[tag] > (tag in own_outputs)}
            )
            yield called_template
        self._set_known(known_before | set(counts))

    def _set_known(self, tags: set[str]) -> None:
        if tags != self.known_tags:
            self.known_tags = tags
            self.known_names = TagSet(tags | self.expression_tags)

    def _outputs_below(self, root: Data) -> set[str]:
        """Return the global tags of the outputs of the template `root`, and of all templates that
        `root` calls directly or indirectly."""
        tags = set[str]()
        templates = [root]
        seen_ids = set[int]()
        while templates:
            template = templates.pop()
            if id(template) not in seen_ids:
                seen_ids.add(id(template))
                tags.update(global_outputs(template))
                templates += [callee for _, callee in self._calls(template)]
        return tags

    def _calls(self, template: Data) -> Iterator[tuple[Data, Data]]:
        """Yield each step or task of a template, with the template that the step or task calls."""
        groups = [(template.get("dag") or {}).get("tasks") or [], *(template.get("steps") or [])]
        for step in (step for group in groups for step in group):
            yield (
                step,
                step.get("inline")
                or self.templates.get(str(step.get("template")), MISSING_TEMPLATE),
            )
