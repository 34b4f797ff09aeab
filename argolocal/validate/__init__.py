"""Check a manifest before it runs on Argo or on this machine. The checks also find mistakes that
Argo accepts.

    argolocal lint workflow.yaml templates/ -o json

Hera does not report an unknown entrypoint, a misspelt argument or a tag without a value, and Argo
runs some workflows with such mistakes. The checks of a manifest do not need a cluster, a network or
Hera.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from argolocal.common.checked_names import format_untrusted
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
FindingsByObject = dict[tuple[Any, Any], list[Finding]]


def check(
    manifest: Manifest,
    file: str = "",
    other_objects: Iterable[Manifest] = (),
    find_object: Find | None = None,
) -> list[Finding]:
    """Return the non-fatal findings of the manifest and `other_objects`.

    With `find_object`, a function that returns an object or None, the objects that the manifest
    refers to are checked instead of `other_objects`. If there are fatal findings, raise a
    ConfigError with one line per fatal finding.
    """
    all_objects = [(file, manifest), *((file, other_object) for other_object in other_objects)]
    findings = lint(manifest, file, find_object) if find_object else lint_all(all_objects)
    fatal_findings = [str(finding) for finding in findings if finding.fatal]
    if fatal_findings:
        raise ConfigError("the manifest cannot run:", *fatal_findings)
    return findings


def unheeded_tasks(findings: Iterable[Finding]) -> list[Finding]:
    """Return the findings about tasks that do not affect other tasks, such as an approval that no
    task waits for."""
    return [finding for finding in findings if finding.rule == unheeded.GATE_RULE]


def lint_all(objects: Sequence[tuple[str, Manifest]]) -> list[Finding]:
    """Return the findings about `objects`, which may refer to each other. Each item is a pair of a
    file name and an object."""
    find_object = make_finder(manifest for _, manifest in objects)
    findings_by_object = FindingsByObject()
    return [
        finding
        for file, manifest in objects
        for finding in lint(manifest, file, find_object, findings_by_object)
    ]


def lint(
    manifest: Manifest,
    file: str = "",
    find_object: Find = lambda kind, name: None,
    findings_by_object: FindingsByObject | None = None,
) -> list[Finding]:
    """Return the findings about an object, such as a Workflow or a training job, and about the
    objects that it refers to.

    With `findings_by_object`, the findings about the other objects are added to this mapping
    instead of being returned. Findings about the use of the other objects are returned in either
    case.
    """
    findings = Findings(file)
    rules = _check_rules(manifest, findings, find_object)
    if rules is None or findings_by_object is None:
        return findings.all()
    return [*_skip_reported(findings.all(), rules, findings_by_object)]


def _check_rules(manifest: Manifest, findings: Findings, find_object: Find) -> WorkflowRules | None:
    """Add the findings of the manifest to `findings`, and return the rules if the manifest is a
    workflow."""
    api_version = manifest.get("apiVersion", API_VERSION)

    kind = manifest.get("kind")
    if kind in (*WORKFLOW_KINDS, "ClusterWorkflowTemplate") and api_version != API_VERSION:
        message = (
            f"{format_untrusted(api_version)} is not {API_VERSION}: this {kind} would not be an"
            " object of Argo. Correct it."
        )
        findings.add(
            "apiVersion", "version", message, fatal=str(api_version).startswith("argoproj.io/")
        )

    is_other_object = "argoproj.io/" not in str(manifest.get("apiVersion", "argoproj.io/"))
    if is_other_object or kind in ("WorkflowEventBinding", "EventBus", "EventSource", "Sensor"):
        applied_objects.check_object(findings, "", shape.remove_nulls(manifest))
    elif problems := list(shape.find_shape_errors(manifest)):
        for problem in problems:
            findings.add(problem.split()[0], "shape", problem.partition(" ")[2] + ".")
    else:
        rules = WorkflowRules(shape.remove_nulls(manifest), findings, find_object)
        rules.run()
        return rules

    return None


def _skip_reported(
    findings: list[Finding], rules: WorkflowRules, findings_by_object: FindingsByObject
) -> Iterator[Finding]:
    """Yield the findings that are not reported for the other object that they are about. The path
    of a finding about another object contains the object's name."""
    reported_findings = set[tuple[str, str, bool]]()
    root_path = rules.root

    for object_path, other_object in rules.other_objects.items():
        object_identity = other_object.get("kind"), other_object["metadata"]["name"]
        if object_identity not in findings_by_object:
            findings_by_object[object_identity] = lint(other_object, find_object=rules.find)

        reported_findings.update(
            {
                (finding.path.replace("spec", object_path, 1), finding.rule, finding.fatal)
                for finding in findings_by_object[object_identity]
            }
        )

    base_name = (rules.other_objects.get(root_path) or {}).get("metadata", {}).get("name")
    if base_name:
        templates_path = f"{root_path}.workflowTemplateRef[{base_name}].templates"
    else:
        templates_path = f"{root_path}.templates"

    # warnings with the paths in `other_paths` are reported for the other objects themselves
    other_paths = tuple(rules.other_objects.keys() - {root_path})
    for finding in findings:
        if (finding.path, finding.rule, finding.fatal) not in reported_findings and (
            finding.fatal or not finding.path.startswith(other_paths)
        ):
            yield replace(
                finding, path=finding.path.replace(f"{root_path}.templates", templates_path, 1)
            )
