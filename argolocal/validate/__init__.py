"""Check a manifest before it runs. The checks also find mistakes that Argo accepts.

    argolocal lint workflow.yaml templates/ -o json

Hera does not report an unknown entrypoint, a misspelt argument or a tag without a value, and Argo
runs some of these workflows. The checks need no cluster, network or Hera.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from argolocal.common.checked_names import show
from argolocal.errors import ConfigError
from argolocal.manifest import shape
from argolocal.manifest.allowed_values import API_VERSION, WORKFLOW_KINDS
from argolocal.manifest.resolve import Find, make_finder
from argolocal.manifest.types import Manifest
from argolocal.validate import applied_objects, unheeded
from argolocal.validate.findings import Finding, Findings
from argolocal.validate.workflow_rules import WorkflowRules

__all__ = ["Finding", "check", "lint", "lint_all", "unheeded_tasks"]

# (kind, name) of an object → findings about the object
Reports = dict[tuple[Any, Any], list[Finding]]


def check(
    manifest: Manifest,
    file: str = "",
    other_objects: Iterable[Manifest] = (),
    find: Find | None = None,
) -> list[Finding]:
    """Return the non-fatal findings of the manifest and `other_objects`.

    With `find`, check the objects that the manifest refers to instead of `other_objects`. If
    findings are fatal, raise a ConfigError with one line per fatal finding.
    """
    all_objects = [(file, manifest), *((file, item) for item in other_objects)]
    findings = lint(manifest, file, find) if find else lint_all(all_objects)
    fatal_findings = [str(finding) for finding in findings if finding.fatal]
    if fatal_findings:
        raise ConfigError("the manifest cannot run:", *fatal_findings)
    return findings


def unheeded_tasks(findings: Iterable[Finding]) -> list[Finding]:
    """Return the findings about tasks that do not affect other tasks, such as an approval that no
    task waits for."""
    return [finding for finding in findings if finding.rule == unheeded.RULE]


def lint_all(objects: Sequence[tuple[str, Manifest]]) -> list[Finding]:
    """Return the findings of all `objects`, which may refer to each other. Each item is a pair of a
    file name and an object."""
    find = make_finder(manifest for _, manifest in objects)
    reports = Reports()
    return [
        finding for file, manifest in objects for finding in lint(manifest, file, find, reports)
    ]


def lint(
    manifest: Manifest,
    file: str = "",
    find: Find = lambda kind, name: None,
    reports: Reports | None = None,
) -> list[Finding]:
    """Return the findings of a Workflow or any other object, such as a training job, and of the
    objects that it refers to.

    With `reports`, findings about the other objects are not returned, but added to `reports`.
    Findings about how the manifest uses these objects are returned.
    """
    findings = Findings(file)
    rules = _rules(manifest, findings, find)
    if rules is None or reports is None:
        return findings.all()
    return [*_skip_reported(findings.all(), rules, reports)]


def _rules(manifest: Manifest, findings: Findings, find: Find) -> WorkflowRules | None:
    """Add the findings of the manifest to `findings`, and return the rules if the manifest is a
    workflow."""
    version = manifest.get("apiVersion", API_VERSION)

    kind = manifest.get("kind")
    if kind in (*WORKFLOW_KINDS, "ClusterWorkflowTemplate") and version != API_VERSION:
        message = (
            f"{show(version)} is not {API_VERSION}: this {kind} would not be an object of Argo."
            " Correct it."
        )
        findings.add(
            "apiVersion", "version", message, fatal=str(version).startswith("argoproj.io/")
        )

    is_other_object = "argoproj.io/" not in str(manifest.get("apiVersion", "argoproj.io/"))
    if is_other_object or kind in ("WorkflowEventBinding", "EventBus", "EventSource", "Sensor"):
        applied_objects.check(findings, "", shape.without_nulls(manifest))
    elif problems := list(shape.shape_errors(manifest)):
        for problem in problems:
            findings.add(problem.split()[0], "shape", problem.partition(" ")[2] + ".")
    else:
        rules = WorkflowRules(shape.without_nulls(manifest), findings, find)
        rules.run()
        return rules

    return None


def _skip_reported(
    findings: list[Finding], rules: WorkflowRules, reports: Reports
) -> Iterator[Finding]:
    """Yield the findings that are not already reported for another object. The path of a finding
    about another object contains the object's name."""
    reported_findings = set[tuple[str, str, bool]]()
    root = rules.root

    for path, other_object in rules.other_objects.items():
        identity = other_object.get("kind"), other_object["metadata"]["name"]
        if identity not in reports:
            reports[identity] = lint(other_object, find=rules.find)

        reported_findings.update(
            {
                (finding.path.replace("spec", path, 1), finding.rule, finding.fatal)
                for finding in reports[identity]
            }
        )

    base_name = (rules.other_objects.get(root) or {}).get("metadata", {}).get("name")
    if base_name:
        templates_path = f"{root}.workflowTemplateRef[{base_name}].templates"
    else:
        templates_path = f"{root}.templates"

    # skip this warning, because it is already reported for the other object
    other_paths = tuple(rules.other_objects.keys() - {root})
    for finding in findings:
        if (finding.path, finding.rule, finding.fatal) not in reported_findings and (
            finding.fatal or not finding.path.startswith(other_paths)
        ):
            yield replace(
                finding, path=finding.path.replace(f"{root}.templates", templates_path, 1)
            )
