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

from pipelines import scopes
from pipelines.lint import objects
from pipelines.lint.findings import Finding, Findings
from pipelines.lint.workflow import WorkflowRules
from pipelines.local.references import Find, among
from steps.errors import ConfigError

__all__ = ["Finding", "check", "lint", "lint_all"]

Manifest = Mapping[str, Any]


def check(
    manifest: Manifest, file: str = "", beside: Iterable[Manifest] = (), find: Find | None = None
) -> list[Finding]:
    """What is found and not fatal, also in what lies beside it. Raises ConfigError with all that is, one line each.

    `find`: what is stored already, and was looked at then.
    """
    found = lint(manifest, file, find) if find else lint_all([(file, manifest), *((file, each) for each in beside)])
    if wrong := [str(finding) for finding in found if finding.fatal]:
        raise ConfigError("\n".join(["the manifest cannot run:", *wrong]))
    return found


def lint_all(objects: Sequence[tuple[str, Manifest]]) -> list[Finding]:
    """All findings of (file, object), which may refer to each other."""
    find = among(each for _, each in objects)
    return [finding for file, each in objects for finding in lint(each, file, find)]


def lint(manifest: Manifest, file: str = "", find: Find = lambda kind, name: None) -> list[Finding]:
    """All findings of a Workflow, WorkflowTemplate, CronWorkflow, or of an object such as a training job.

    What is wrong with an object that it refers to is not among them, but what is wrong with how it uses that.
    """
    found = Findings(file)
    other = "argoproj.io/" not in str(manifest.get("apiVersion", "argoproj.io/"))
    if other or manifest.get("kind") in ("WorkflowEventBinding", "EventBus", "EventSource", "Sensor"):
        objects.check(found, "", scopes.present(manifest))
    elif wrong := list(scopes.misshapen(manifest)):
        for each in wrong:
            found.add(each.split()[0], "shape", each.partition(" ")[2] + ".")
    else:
        rules = WorkflowRules(scopes.present(manifest), found, find)
        rules.run()
        if rules.base:
            return list(_own(found.all(), rules.root, rules.base, find))
    return found.all()


def _own(found: list[Finding], root: str, base: Manifest, find: Find) -> Iterator[Finding]:
    """What is not already wrong with the WorkflowTemplate itself; what is in its templates is told to be there."""
    name = base["metadata"]["name"]
    theirs = {(each.path, each.rule, each.message, each.fatal) for each in lint(base, find=find)}
    for each in found:
        path = each.path.replace(root, "spec", 1)
        if (path, each.rule, each.message, each.fatal) not in theirs:
            inside = f"{root}.workflowTemplateRef[{name}].templates"
            yield replace(each, path=each.path.replace(f"{root}.templates", inside, 1))
