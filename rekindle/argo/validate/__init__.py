"""What Argo would refuse, or worse, accept: checks of a manifest as plain data, before anything runs.

    rekindle lint configs/demo.yaml
    rekindle lint --manifest workflow.yaml --manifest templates/ -o json

Hera compiles an unknown entrypoint, a misspelt argument or a tag that nothing fills without a word, and some of
these Argo runs as well. Needs no cluster, no network and no Hera. The rules: workflow.py (a workflow and its
templates), arguments.py, graph.py (who waits for whom), tags.py, exported.py (which global outputs are known where),
metrics.py, objects.py (what resource templates apply), pods.py.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rekindle.argo.manifest import scopes
from rekindle.argo.manifest.resolve import Find, among
from rekindle.argo.validate import objects
from rekindle.argo.validate.findings import Finding, Findings
from rekindle.argo.validate.workflow import WorkflowRules
from rekindle.errors import ConfigError

__all__ = ["Finding", "check", "lint", "lint_all"]

Manifest = Mapping[str, Any]
Told = dict[tuple[Any, Any], list[Finding]]  # what is wrong with objects, by kind and name


def check(
    manifest: Manifest, file: str = "", beside: Iterable[Manifest] = (), find: Find | None = None
) -> list[Finding]:
    """What is found and not fatal, also in what lies beside it, or, with `find`, in what it refers to.

    Raises ConfigError with all that is fatal, one line each.
    """
    together = [(file, manifest), *((file, each) for each in beside)]
    found = lint(manifest, file, find) if find else lint_all(together)
    if wrong := [str(finding) for finding in found if finding.fatal]:
        raise ConfigError("\n".join(["the manifest cannot run:", *wrong]))
    return found


def lint_all(objects: Sequence[tuple[str, Manifest]]) -> list[Finding]:
    """All findings of (file, object), which may refer to each other."""
    find, told = among(each for _, each in objects), Told()
    return [finding for file, each in objects for finding in lint(each, file, find, told)]


def lint(
    manifest: Manifest, file: str = "", find: Find = lambda kind, name: None, told: Told | None = None
) -> list[Finding]:
    """All findings of a Workflow, WorkflowTemplate, CronWorkflow, or of an object such as a training job.

    What is wrong with an object that it refers to is among them. Where all are `told`, which is filled as they are
    looked at, that is left to the object itself, but not what is wrong with how it is used.
    """
    found = Findings(file)
    rules = _rules(manifest, found, find)
    return found.all() if rules is None or told is None else list(_own(found.all(), rules, told))


def _rules(manifest: Manifest, found: Findings, find: Find) -> WorkflowRules | None:
    """Fills `found`; gives the rules of a workflow."""
    other = "argoproj.io/" not in str(manifest.get("apiVersion", "argoproj.io/"))
    if other or manifest.get("kind") in ("WorkflowEventBinding", "EventBus", "EventSource", "Sensor"):
        objects.check(found, "", scopes.present(manifest))
    elif wrong := list(scopes.misshapen(manifest)):
        for each in wrong:
            found.add(each.split()[0], "shape", each.partition(" ")[2] + ".")
    else:
        rules = WorkflowRules(scopes.present(manifest), found, find)
        rules.run()
        return rules
    return None


def _own(found: list[Finding], rules: WorkflowRules, told: Told) -> Iterator[Finding]:
    """What is not already wrong with other objects; what is in the templates of such is told to be there."""
    theirs, root = set[tuple[str, str, bool]](), rules.root
    for at, other in rules.others.items():
        name = other.get("kind"), other["metadata"]["name"]
        if name not in told:
            told[name] = lint(other, find=rules.find)
        theirs |= {(each.path.replace("spec", at, 1), each.rule, each.fatal) for each in told[name]}
    base = (rules.others.get(root) or {}).get("metadata", {}).get("name")
    inside = f"{root}.workflowTemplateRef[{base}].templates" if base else f"{root}.templates"
    away = tuple(rules.others.keys() - {root})  # where a warning is for who looks at that object
    for each in found:
        if (each.path, each.rule, each.fatal) not in theirs and (each.fatal or not each.path.startswith(away)):
            yield replace(each, path=each.path.replace(f"{root}.templates", inside, 1))
