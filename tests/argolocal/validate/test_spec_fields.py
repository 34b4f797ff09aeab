"""Tests of tags in the fields of a spec other than `templates`. Argo accepts all tags in these
fields, and leaves a tag without a value in the text."""

from typing import Any

import pytest

from argolocal import validate

CONTAINER = {"image": "busybox", "command": ["echo"]}
TEMPLATES = [
    {
        "name": "main",
        "steps": [
            [
                {
                    "name": "first",
                    "template": "pod",
                    "arguments": {"parameters": [{"name": "x", "value": "1"}]},
                }
            ]
        ],
    },
    {"name": "pod", "inputs": {"parameters": [{"name": "x"}]}, "container": CONTAINER},
]
FIELDS: dict[str, Any] = {
    "volumes": lambda text: [{"name": "a", "persistentVolumeClaim": {"claimName": text}}],
    "nodeSelector": lambda text: {"zone": text},
    "podMetadata": lambda text: {"labels": {"a": text}},
    "podSpecPatch": lambda text: text,
    "workflowMetadata": lambda text: {"annotations": {"a": text}},
    "synchronization": lambda text: {"mutexes": [{"name": text}]},
    "hooks": lambda text: {
        "exit": {
            "template": "pod",
            "arguments": {"parameters": [{"name": "x", "value": text}]},
        }
    },
    "arguments": lambda text: {"parameters": [{"name": "p", "value": text}]},
    "artifactRepositoryRef": lambda text: {"configMap": text},
}


def list_tag_findings(field: str, text: str) -> list[validate.Finding]:
    spec = {"entrypoint": "main", "templates": TEMPLATES, field: FIELDS[field](text)}
    workflow: dict[str, Any] = {
        "apiVersion": "argoproj.io/v1alpha1",
        "kind": "Workflow",
        "metadata": {"name": "w"},
        "spec": spec,
    }
    return [finding for finding in validate.lint(workflow) if finding.rule == "tag"]


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize(
    "tag",
    [
        "pod.x",
        "node.x",
        "inputs.parameters.nope",
        "steps.nope.outputs.result",
        "tasks.nope.outputs.parameters.a",
        "retries.nope",
        "lastRetry.nope",
        "=inputs.parameters.nope",
    ],
)
def test_a_tag_that_nothing_replaces_is_a_warning_in_every_field(field: str, tag: str) -> None:
    (finding,) = list_tag_findings(field, f"{{{{{tag}}}}}")

    assert not finding.fatal
    assert finding.path.startswith(f"spec.{field}")
    assert tag in finding.message


@pytest.mark.parametrize(
    ("tag", "fields"),
    [
        (
            "inputs.parameters.x",
            ("volumes", "nodeSelector", "podMetadata", "podSpecPatch", "hooks", "arguments"),
        ),
        (
            "pod.name",
            ("volumes", "nodeSelector", "podMetadata", "podSpecPatch", "hooks", "arguments"),
        ),
        ("steps.first.outputs.result", ("volumes", "podSpecPatch", "hooks", "arguments")),
        ("retries", ("podSpecPatch", "hooks", "arguments")),
        ("node.name", ("podSpecPatch", "hooks", "arguments")),
        ("item.a", ("podSpecPatch", "hooks", "arguments")),
        ("workflow.name", tuple(FIELDS)),
        ("user.name", tuple(FIELDS)),
    ],
)
def test_a_tag_passes_exactly_in_the_fields_in_which_argo_replaces_it(
    tag: str, fields: tuple[str, ...]
) -> None:
    passing_fields = tuple(
        field for field in FIELDS if not list_tag_findings(field, f"{{{{{tag}}}}}")
    )

    assert passing_fields == fields


def test_a_tag_in_a_schedule_is_not_a_schedule() -> None:
    spec = {"entrypoint": "pod", "templates": [{"name": "pod", "container": CONTAINER}]}
    cron: dict[str, Any] = {
        "apiVersion": "argoproj.io/v1alpha1",
        "kind": "CronWorkflow",
        "metadata": {"name": "w"},
        "spec": {"schedules": ["{{inputs.parameters.x}}"], "workflowSpec": spec},
    }

    (finding,) = [each for each in validate.lint(cron) if each.fatal]
    assert finding.path == "spec.schedules"
