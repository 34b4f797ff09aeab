"""Check a manifest before it runs, for mistakes that Argo rejects and mistakes that it accepts.

    argolocal lint workflow.yaml templates/ -o json

Hera compiles an unknown entrypoint, a misspelt argument or a tag without a value, and Argo runs some of these. Works
without cluster, network and Hera.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from argolocal.errors import ConfigError
from argolocal.manifest import shape
from argolocal.manifest.resolve import Find, find_in
from argolocal.validate import objects
from argolocal.validate.findings import Finding, Findings
from argolocal.validate.workflow import WorkflowRules

__all__ = ["Finding", "check", "lint", "lint_all"]

Manifest = Mapping[str, Any]
Reports = dict[tuple[Any, Any], list[Finding]]  # findings by kind and name of an object


def check(
    manifest: Manifest, file: str = "", other_objects: Iterable[Manifest] = (), find: Find | None = None
) -> list[Finding]:
    """Return the non-fatal findings of the manifest and `other_objects` (or, with `find`, the objects it refers to).

    Raises ConfigError with all fatal findings, one line each.
    """
    objects_ = [(file, manifest), *((file, item) for item in other_objects)]
    findings = lint(manifest, file, find) if find else lint_all(objects_)
    if fatal := [str(finding) for finding in findings if finding.fatal]:
        raise ConfigError("\n".join(["the manifest cannot run:", *fatal]))
    return findings


def lint_all(objects: Sequence[tuple[str, Manifest]]) -> list[Finding]:
    """Return the findings of (file, object) pairs that may refer to each other."""
    find, reports = find_in(manifest for _, manifest in objects), Reports()
    return [finding for file, manifest in objects for finding in lint(manifest, file, find, reports)]


def lint(
    manifest: Manifest, file: str = "", find: Find = lambda kind, name: None, reports: Reports | None = None
) -> list[Finding]:
    """Return the findings of a Workflow, WorkflowTemplate, CronWorkflow, or another object, such as a training job.

    They include findings of objects that it refers to. `reports` (filled here) collects these by object instead, so
    that the result has only the findings about how these objects are used.
    """
    findings = Findings(file)
    rules = _rules(manifest, findings, find)
    return findings.all() if rules is None or reports is None else [*_unreported(findings.all(), rules, reports)]


def _rules(manifest: Manifest, findings: Findings, find: Find) -> WorkflowRules | None:
    """Add the findings of the manifest, and return the rules if it is a workflow."""
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


def _unreported(findings: list[Finding], rules: WorkflowRules, reports: Reports) -> Iterator[Finding]:
    """Yield findings that are not reported for other objects; paths inside their templates name those objects."""
    reported, root = set[tuple[str, str, bool]](), rules.root
    for path, other in rules.others.items():
        name = other.get("kind"), other["metadata"]["name"]
        if name not in reports:
            reports[name] = lint(other, find=rules.find)
        reported |= {(finding.path.replace("spec", path, 1), finding.rule, finding.fatal) for finding in reports[name]}
    base = (rules.others.get(root) or {}).get("metadata", {}).get("name")
    inside = f"{root}.workflowTemplateRef[{base}].templates" if base else f"{root}.templates"
    others = tuple(rules.others.keys() - {root})  # their warnings are reported with the object itself
    for finding in findings:
        if (finding.path, finding.rule, finding.fatal) not in reported and (
            finding.fatal or not finding.path.startswith(others)
        ):
            yield replace(finding, path=finding.path.replace(f"{root}.templates", inside, 1))
