"""Checks a manifest before anything runs: what Argo refuses, and what it accepts but should not.

    argolocal lint workflow.yaml templates/ -o json

Hera silently compiles an unknown entrypoint, a misspelt argument or a tag without a value, and Argo runs some of
these. Needs no cluster, network or Hera. The rules: workflow.py (workflow and templates), arguments.py, graph.py
(dependencies of tasks), tag_rules.py, exported.py (scope of global outputs), metrics.py, objects.py (what resource
templates apply), pods.py.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from argolocal.errors import ConfigError
from argolocal.manifest import shape
from argolocal.manifest.resolve import Find, among
from argolocal.validate import objects
from argolocal.validate.findings import Finding, Findings
from argolocal.validate.workflow import WorkflowRules

__all__ = ["Finding", "check", "lint", "lint_all"]

Manifest = Mapping[str, Any]
Reports = dict[tuple[Any, Any], list[Finding]]  # findings by kind and name of an object


def check(
    manifest: Manifest, file: str = "", beside: Iterable[Manifest] = (), find: Find | None = None
) -> list[Finding]:
    """Non-fatal findings of the manifest and the objects `beside` it (or, with `find`, those it refers to).

    Raises ConfigError with all fatal findings, one line each.
    """
    together = [(file, manifest), *((file, item) for item in beside)]
    findings = lint(manifest, file, find) if find else lint_all(together)
    if fatal := [str(finding) for finding in findings if finding.fatal]:
        raise ConfigError("\n".join(["the manifest cannot run:", *fatal]))
    return findings


def lint_all(objects: Sequence[tuple[str, Manifest]]) -> list[Finding]:
    """All findings of (file, object) pairs that may refer to each other."""
    find, reports = among(manifest for _, manifest in objects), Reports()
    return [finding for file, manifest in objects for finding in lint(manifest, file, find, reports)]


def lint(
    manifest: Manifest, file: str = "", find: Find = lambda kind, name: None, reports: Reports | None = None
) -> list[Finding]:
    """All findings of a Workflow, WorkflowTemplate, CronWorkflow, or of an object such as a training job.

    Includes those of objects that it refers to. With `reports` (filled here) they are left to the object itself, except
    those about how it is used.
    """
    findings = Findings(file)
    rules = _rules(manifest, findings, find)
    return findings.all() if rules is None or reports is None else list(_own(findings.all(), rules, reports))


def _rules(manifest: Manifest, findings: Findings, find: Find) -> WorkflowRules | None:
    """Add findings of the manifest; returns the rules if it is a workflow."""
    other = "argoproj.io/" not in str(manifest.get("apiVersion", "argoproj.io/"))
    if other or manifest.get("kind") in ("WorkflowEventBinding", "EventBus", "EventSource", "Sensor"):
        objects.check(findings, "", shape.without_nulls(manifest))
    elif problems := list(shape.shape_errors(manifest)):
        for problem in problems:
            findings.add(problem.split()[0], "shape", problem.partition(" ")[2] + ".")
    else:
        rules = WorkflowRules(shape.without_nulls(manifest), findings, find)
        rules.run()
        return rules
    return None


def _own(findings: list[Finding], rules: WorkflowRules, reports: Reports) -> Iterator[Finding]:
    """Findings not already reported for other objects; paths inside their templates name those objects."""
    theirs, root = set[tuple[str, str, bool]](), rules.root
    for at, other in rules.others.items():
        name = other.get("kind"), other["metadata"]["name"]
        if name not in reports:
            reports[name] = lint(other, find=rules.find)
        theirs |= {(finding.path.replace("spec", at, 1), finding.rule, finding.fatal) for finding in reports[name]}
    base = (rules.others.get(root) or {}).get("metadata", {}).get("name")
    inside = f"{root}.workflowTemplateRef[{base}].templates" if base else f"{root}.templates"
    away = tuple(rules.others.keys() - {root})  # where a warning is for who looks at that object
    for finding in findings:
        if (finding.path, finding.rule, finding.fatal) not in theirs and (
            finding.fatal or not finding.path.startswith(away)
        ):
            yield replace(finding, path=finding.path.replace(f"{root}.templates", inside, 1))
