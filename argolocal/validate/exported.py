"""The scope of `workflow.outputs`: Argo's validation walks from the entrypoint, and learns global outputs on its way.

    outputs = GlobalOutputs(templates, ["main", "exit"]); outputs.tags_at(step)

An output with a globalName is known after the visit of its template: to later steps, to the whole DAG, and to templates
that are visited later, such as onExit and hooks. Outputs of the entrypoint and of a hook's template are never known. A
globalName with tags allows any name. Source: validate.go, addOutputsToScope.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from argolocal.manifest.resolve import all_templates
from argolocal.manifest.tag_scope import Data, Names, global_outputs

ANY = {"workflow.outputs.parameters", "workflow.outputs.artifacts"}
MISSING: Data = {}  # a template that does not exist here


class GlobalOutputs:
    """Global outputs that are known at each template and step. Argo does not check expressions: all are known there."""

    def __init__(self, templates: Mapping[str, Data], roots: Sequence[str]) -> None:
        self.templates = templates
        bodies = [template for template, _ in all_templates({"templates": [*templates.values()]}, "")]
        self.all = set[str]().union(*map(global_outputs, bodies))
        self.later = {f"={tag}" for tag in self.all} | (self.all & ANY)
        self.known: set[str] = set()
        self.names, self.everything = Names(self.later), Names(self.all | self.later)
        self.cache: dict[int, Names] = {}  # by the id of a template or step
        if not self.all <= ANY and roots[0] in templates:  # a missing entrypoint is reported elsewhere
            self._walk([templates[name] for name in roots if name in templates])

    def tags_at(self, holder: Data) -> Names:
        """Return the tags that are known when Argo checks this step or template."""
        return self.cache.get(id(holder), self.everything)

    def _walk(self, roots: list[Data]) -> None:
        waiting = [self._visit(template) for template in reversed(roots)]
        while waiting:  # templates may be nested deeper than Python's stack
            template = next(waiting[-1], None)
            if template is None:
                waiting.pop()
            elif id(template) not in self.cache:
                waiting.append(self._visit(template))

    def _visit(self, template: Data) -> Iterator[Data]:
        """Visit a template. Yields the templates that must be visited before it continues."""
        if id(template) in self.cache:
            return
        self.cache[id(template)] = self.names
        if "dag" in template:
            yield from self._tasks(template)
        for step, called in self._calls(template) if "steps" in template else ():
            yield called
            after = self.known | global_outputs(called)
            if "onExit" in step or "exit" in (step.get("hooks") or {}):
                self._set_known(after)
            self.cache[id(step)] = self.names
            self._set_known(after)
        self.cache[id(template)] = self.names

    def _tasks(self, dag: Data) -> Iterator[Data]:
        """Visit the tasks: Argo does so in random order, so at each task any other may have been visited."""
        calls = [called for _, called in self._calls(dag)]
        outputs = [self._outputs_below(called) for called in calls]
        count, known_before = Counter(tag for tags in outputs for tag in tags), self.known
        for called, own_outputs in zip(calls, outputs, strict=True):
            self._set_known(known_before | {tag for tag in count if count[tag] > (tag in own_outputs)})
            yield called
        self._set_known(known_before | set(count))

    def _set_known(self, tags: set[str]) -> None:
        if tags != self.known:
            self.known, self.names = tags, Names(tags | self.later)

    def _outputs_below(self, called: Data) -> set[str]:
        """Return the global tags that a template and its callees set."""
        tags, waiting, seen = set[str](), [called], set[int]()
        while waiting:
            if id(template := waiting.pop()) not in seen:
                seen.add(id(template))
                tags |= global_outputs(template)
                waiting += [callee for _, callee in self._calls(template)]
        return tags

    def _calls(self, template: Data) -> Iterator[tuple[Data, Data]]:
        """Yield each step or task with the template that it calls."""
        groups = [(template.get("dag") or {}).get("tasks") or [], *(template.get("steps") or [])]
        for step in (step for group in groups for step in group):
            yield step, step.get("inline") or self.templates.get(str(step.get("template")), MISSING)
