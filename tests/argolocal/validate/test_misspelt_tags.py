"""Argo leaves a tag with an unknown first word in the text. Lint warns if the unknown word is
probably misspelt."""

from typing import Any

import pytest

from argolocal import validate


def list_tag_warnings(text: str) -> list[str]:
    container = {"image": "busybox", "command": ["echo", text]}
    spec = {"entrypoint": "main", "templates": [{"name": "main", "container": container}]}
    workflow: dict[str, Any] = {
        "apiVersion": "argoproj.io/v1alpha1",
        "kind": "Workflow",
        "metadata": {"name": "w"},
    }
    return [
        str(finding)
        for finding in validate.lint({**workflow, "spec": spec})
        if finding.rule == "tag"
    ]


@pytest.mark.parametrize(
    ("tag", "correct_tag"),
    [
        ("input.parameters.branch", "inputs.parameters.branch"),
        ("task.train.outputs.result", "tasks.train.outputs.result"),
        ("worklow.name", "workflow.name"),
        ("Workflow.name", "workflow.name"),
        ("lastretry.exitCode", "lastRetry.exitCode"),
        ("items", "item"),
        ("node.id", "node.name"),
        ("=input.parameters.branch + '1'", "inputs.parameters.branch"),
    ],
)
def test_a_misspelt_first_word_is_a_warning(tag: str, correct_tag: str) -> None:
    (warning,) = list_tag_warnings(f"{{{{{tag}}}}}")
    assert f'Did you mean "{correct_tag}"?' in warning


@pytest.mark.parametrize(
    "tag", ["user.name", " .Values.image ", "cronworkflow.name", "node.name", "=map([1], # + 1)"]
)
def test_tags_of_other_languages_and_of_argo_pass(tag: str) -> None:
    assert not list_tag_warnings(f"{{{{{tag}}}}}")
