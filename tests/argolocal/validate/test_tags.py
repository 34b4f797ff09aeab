"""Lint distinguishes which tags, arguments and secrets are correct, which are wrong, and which may
get a value later."""

import copy
from typing import Any

import pytest

from argolocal.validate import lint, lint_all
from tests.argolocal.validate.manifests import (
    find_step,
    find_task,
    list_finish_callers,
    make_arguments,
    pass_global_output,
    run_in_exit_hook,
)
from tests.argolocal.validate.objects import VALID_WORKFLOW, find_container, find_template


@pytest.mark.parametrize("source", ["labels", "labelsFrom", "metadata"])
def test_a_label_of_the_workflow_is_known(source: str) -> None:
    manifest = copy.deepcopy(VALID_WORKFLOW)
    find_container(manifest)["args"] = [
        "{{workflow.labels.request}} {{workflow.labels.json}} {{workflow.labels}}"
    ]
    if source == "metadata":
        manifest["metadata"]["labels"] = {"request": "a"}
    else:
        manifest["spec"]["workflowMetadata"] = {source: {"request": {"expression": "'a'"}}}
    assert lint(manifest) == []


def test_a_first_word_of_tags_is_text() -> None:
    manifest = copy.deepcopy(VALID_WORKFLOW)
    find_container(manifest)["args"] = ["{{ inputs }} {{outputs}} {{workflow}} {{pod}} {{steps}}"]
    assert lint(manifest) == []


def test_a_guarded_label_in_an_expression_passes() -> None:
    manifest = copy.deepcopy(VALID_WORKFLOW)
    find_container(manifest)["args"] = ["{{=workflow.labels?.request ?? 'none'}}"]
    assert lint(manifest) == []


@pytest.mark.parametrize(
    "tag", ["workflow.parameters.nope", "steps.one.outputs.parameters.x", "workflow.labels.nope"]
)
@pytest.mark.parametrize(
    ("called", "field"), [("make", "value"), ("stages", "value"), ("stages", "default")]
)
def test_a_tag_in_an_input_that_an_argument_replaces_is_a_warning(
    tag: str, called: str, field: str
) -> None:
    manifest = copy.deepcopy(VALID_WORKFLOW)
    caller = find_task(manifest, "make" if called == "make" else "ship")
    caller["arguments"] = make_arguments(rows="5")

    find_template(manifest, called)["inputs"] = {
        "parameters": [{"name": "rows", field: f"{{{{{tag}}}}}"}]
    }
    if called == "stages":
        find_step(manifest, "three")["arguments"] = make_arguments(
            note="{{inputs.parameters.rows}}"
        )

    (finding,) = lint(manifest)
    assert finding.rule == "tag"
    assert finding.fatal is False
    assert finding.path.endswith(f"inputs.parameters[rows].{field}")
    caller["arguments"] = make_arguments()
    assert [each.fatal for each in lint(manifest)] == [True]


def test_argo_rejects_a_tag_in_the_default_of_a_pod_even_if_an_argument_replaces_it() -> None:
    manifest = copy.deepcopy(VALID_WORKFLOW)
    find_template(manifest, "make")["inputs"] = {
        "parameters": [{"name": "rows", "default": "{{workflow.labels.nope}}"}]
    }
    assert [each.fatal for each in lint(manifest)] == [True]


@pytest.mark.parametrize("kind", ["Workflow", "WorkflowTemplate"])
def test_a_referenced_template_may_have_a_value_that_an_argument_replaces(kind: str) -> None:
    value = {"name": "note", "value": "{{workflow.parameters.nope}} {{steps.x.outputs.result}}"}
    library = copy.deepcopy(VALID_WORKFLOW) | {"kind": "WorkflowTemplate"}
    library["metadata"] = {"name": "other", "annotations": {"team": "fraud"}}
    find_template(library, "finish")["inputs"]["parameters"] = [value]

    user = copy.deepcopy(VALID_WORKFLOW) | {"kind": kind}
    for holder in (library, user):
        for name in ("one", "three"):
            find_step(holder, name)["arguments"] = make_arguments(note="1")

    for each in [*list_finish_callers(library), *list_finish_callers(user)]:
        each["arguments"] = make_arguments(note="1")

    library["spec"].pop("onExit")
    find_step(user, "one").pop("template")
    find_step(user, "one")["templateRef"] = {"name": "other", "template": "finish"}
    user["metadata"] = {"name": "user", "annotations": {"team": "fraud"}}
    findings = lint_all([("library", library), ("user", user)])
    assert [each for each in findings if each.fatal and "finish" in each.path] == []


def test_an_item_in_an_argument_that_no_input_takes_is_a_warning() -> None:
    manifest = copy.deepcopy(VALID_WORKFLOW)
    find_step(manifest, "three")["arguments"] = make_arguments(unknown="{{ item }}")
    assert [(each.rule, each.fatal) for each in lint(manifest)] == [
        ("argument", False),
        ("tag", False),
    ]


def test_a_generated_name_that_kubernetes_shortens_is_a_warning() -> None:
    manifest = copy.deepcopy(VALID_WORKFLOW)
    manifest["metadata"]["generateName"] = "a" * 59
    find_template(manifest, "apply")["resource"]["manifest"] = (
        "kind: ConfigMap\nmetadata: {name: a}"
    )
    assert [(f.rule, f.fatal) for f in lint(manifest)] == [("name", False)]


def test_a_workflow_template_may_get_inputs_and_global_names_from_its_workflow() -> None:
    manifest = VALID_WORKFLOW | {
        "kind": "WorkflowTemplate",
        "metadata": {"name": "sample", "annotations": {"team": "fraud"}},
        "spec": copy.deepcopy(VALID_WORKFLOW["spec"]),
    }
    manifest["spec"]["arguments"]["parameters"].pop(0)
    find_template(manifest, "main")["dag"]["target"] = "{{inputs.parameters.rows}}"
    find_template(manifest, "score")["outputs"]["parameters"][0]["globalName"] = (
        "{{inputs.parameters.cut}}-auc"
    )
    assert [f for f in lint(manifest) if f.fatal] == []


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("{{workflow.failures}}", {"onExit": "late", "hooks": {}}),
        # Argo's validation does not check expressions
        ("{{=toJson(workflow.failures)}}", {}),
        ("{{workflow.priority}}", {"priority": 0}),
    ],
)
def test_a_tag_that_has_a_value_in_an_exit_hook_passes(text: str, spec: dict[str, Any]) -> None:
    manifest = copy.deepcopy(VALID_WORKFLOW)
    run_in_exit_hook(manifest, text, **spec)
    assert not [each for each in lint(manifest) if each.fatal]


def test_a_global_output_is_known_in_later_steps_and_in_the_whole_dag() -> None:
    manifest = copy.deepcopy(VALID_WORKFLOW)
    pass_global_output(manifest, "one", "three")
    find_task(manifest, "make")["arguments"]["parameters"][0]["value"] = (
        "{{workflow.outputs.parameters.auc}}"
    )
    assert lint(manifest) == []
    find_step(manifest, "two")["arguments"] = make_arguments()

    find_step(manifest, "one")["hooks"] = {
        "exit": {
            "template": "finish",
            "arguments": make_arguments(note="{{workflow.outputs.parameters.late}}"),
        }
    }

    assert lint(manifest) == []
    find_step(manifest, "two").update(when="{{=workflow.outputs.parameters.auc == '1'}}")
    assert lint(manifest) == []


def test_shell_syntax_that_a_shell_or_kubernetes_expands_passes() -> None:
    manifest = copy.deepcopy(VALID_WORKFLOW)
    find_container(manifest).update(command=["/bin/sh", "-c"], args=["echo $(date)"])
    assert lint(manifest) == []

    for command in (
        "/usr/bin/env bash -c",
        "tini -- sh -c",
        "timeout 60 bash -c",
        "busybox sh -c",
        "bash -euc",
        "dash",
    ):
        find_container(manifest).update(command=command.split())
        assert lint(manifest) == [], command

    find_container(manifest).update(command=["/usr/bin/env"], args=["bash", "-ec", "echo $(date)"])
    assert lint(manifest) == []

    env = {
        "command": ["a"],
        "args": ["$(POD_IP) $(day) $$(date)"],
        "env": [{"name": "day", "value": "1"}],
    }

    find_container(manifest).update(env)
    assert lint(manifest) == []


@pytest.mark.parametrize(
    "name",
    ["PAD_TOKEN", "MAX_NEW_TOKEN", "eos_token", "COMPASS", "PWD", "TOKEN_FILE", "MAX_NEW_TOKENS"],
)
def test_a_name_that_only_resembles_a_secret_passes(name: str) -> None:
    manifest = copy.deepcopy(VALID_WORKFLOW)
    find_container(manifest).update(
        env=[{"name": name, "value": "5"}], args=[f"--{name.lower().replace('_', '-')}=5"]
    )
    assert lint(manifest) == []


def test_a_reference_to_a_secret_passes() -> None:
    manifest = copy.deepcopy(VALID_WORKFLOW)
    passed = [
        "--password=$(DB_PASSWORD)",
        "--token",
        "{{inputs.parameters.of}}",
        "postgres://u:$(PW)@h",
        "--password",
        "--x",
    ]

    find_container(manifest).update(
        args=[*passed, "http://h:80/a@b", "--user=u@h"],
        env=[{"name": "URL", "value": "s3://a/b@c"}],
    )
    assert lint(manifest) == []
