"""The scope of `workflow.outputs`: Argo's check walks from the entrypoint and knows them in the order of its visits.

    known = Exported(templates, ["main", "exit"]); known.at(step)

What a called template gives by a globalName is known once the check has been there: to later steps, to all of its DAG,
and to what is only looked at later, as onExit and the templates of hooks. What the entrypoint, or a hook's template,
gives itself is never known. A globalName with tags may be any. Source: validate.go, addOutputsToScope.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from argolocal.manifest.resolve import bodies
from argolocal.manifest.tag_scope import Data, Names, exported

ANY = {"workflow.outputs.parameters", "workflow.outputs.artifacts"}
NOTHING: Data = {}  # a template that is not here


class Exported:
    """Global outputs known at each template and step; in expressions, which Argo does not check, all of them."""

    def __init__(self, templates: Mapping[str, Data], roots: Sequence[str]) -> None:
        self.templates = templates
        self.all = {
            tag for template, _ in bodies({"templates": [*templates.values()]}, "") for tag in exported(template)
        }
        self.later = {f"={tag}" for tag in self.all} | (self.all & ANY)
        self.known: set[str] = set()
        self.names, self.everything = Names(self.later), Names(self.all | self.later)
        self.found: dict[int, Names] = {}  # by the id of a template or step
        if not self.all <= ANY and roots[0] in templates:  # else that is what is wrong
            self._walk([templates[name] for name in roots if name in templates])

    def at(self, holder: Data) -> Names:
        """Tags known when Argo checks this step or template."""
        return self.found.get(id(holder), self.everything)

    def _walk(self, roots: list[Data]) -> None:
        waiting = [self._visit(template) for template in reversed(roots)]
        while waiting:  # templates may be nested deeper than Python's stack
            template = next(waiting[-1], None)
            if template is None:
                waiting.pop()
            elif id(template) not in self.found:
                waiting.append(self._visit(template))

    def _visit(self, template: Data) -> Iterator[Data]:
        """Visit a template; yields the templates to visit before it continues."""
        if id(template) in self.found:
            return
        self.found[id(template)] = self.names
        if "dag" in template:
            yield from self._tasks(template)
        for step, called in self._calls(template) if "steps" in template else ():
            yield called
            after = self.known | exported(called)
            if "onExit" in step or "exit" in (step.get("hooks") or {}):
                self._know(after)
            self.found[id(step)] = self.names
            self._know(after)
        self.found[id(template)] = self.names

    def _tasks(self, dag: Data) -> Iterator[Data]:
        """Argo visits tasks in random order: at each one, any other may have been visited."""
        calls = [called for _, called in self._calls(dag)]
        given = [self._given(called) for called in calls]
        count, before = Counter(tag for tags in given for tag in tags), self.known
        for called, own in zip(calls, given, strict=True):
            self._know(before | {tag for tag in count if count[tag] > (tag in own)})
            yield called
        self._know(before | set(count))

    def _know(self, known: set[str]) -> None:
        if known != self.known:
            self.known, self.names = known, Names(known | self.later)

    def _given(self, called: Data) -> set[str]:
        """Global tags set by a template and everything that it calls."""
        tags, waiting, seen = set[str](), [called], set[int]()
        while waiting:
            if id(template := waiting.pop()) not in seen:
                seen.add(id(template))
                tags |= exported(template)
                waiting += [below for _, below in self._calls(template)]
        return tags

    def _calls(self, template: Data) -> Iterator[tuple[Data, Data]]:
        """Each step or task with the template that it calls."""
        groups = [(template.get("dag") or {}).get("tasks") or [], *(template.get("steps") or [])]
        for step in (step for group in groups for step in group):
            yield step, step.get("inline") or self.templates.get(str(step.get("template")), NOTHING)
