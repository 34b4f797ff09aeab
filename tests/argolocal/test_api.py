"""Tests of the Python API, called as in tests of users: with workflows like Hera's examples, and
with a custom kind of object."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hera.workflows import DAG, Artifact, Parameter, Resource, Steps, Workflow, script
from hera.workflows.models import ValueFrom

import argolocal
from argolocal.errors import ConfigError

HELLO: dict = {
    "apiVersion": "argoproj.io/v1alpha1",
    "kind": "Workflow",
    "metadata": {"generateName": "hello-"},
    "spec": {
        "entrypoint": "print",
        "arguments": {"parameters": [{"name": "word", "value": "hello"}]},
        "templates": [
            {
                "name": "print",
                "container": {
                    "image": "busybox",
                    "command": ["echo", "{{workflow.parameters.word}}"],
                },
            }
        ],
    },
}


@script(image="python:3")
def flip() -> None:
    import random

    print("heads" if random.random() < 0.5 else "tails")


@script(image="python:3")
def say(message: str) -> None:
    print(message)


@script(image="python:3", outputs=Artifact(name="letter", path="/tmp/letter.txt"))
def write() -> None:
    with open("/tmp/letter.txt", "w") as letter:
        letter.write("dear reader")


@script(image="python:3", inputs=Artifact(name="letter", path="/tmp/mail/letter.txt"))
def read() -> None:
    print(open("/tmp/mail/letter.txt").read())  # noqa: SIM115


def test_a_condition_on_a_result_skips_the_other_branch() -> None:
    with (
        Workflow(generate_name="coin-flip-", entrypoint="main") as workflow,
        Steps(name="main") as steps,
    ):
        coin = flip(name="flip")
        with steps.parallel():
            say(name="heads", arguments={"message": "it was heads"}, when=f"{coin.result} == heads")
            say(name="tails", arguments={"message": "it was tails"}, when=f"{coin.result} == tails")

    outcome = argolocal.run(workflow)
    side = outcome.nodes["flip"].outputs["result"]
    other = {"heads": "tails", "tails": "heads"}[side]
    assert outcome.phase == "Succeeded", outcome
    assert outcome.nodes[side].log == f"it was {side}\n"
    assert outcome.nodes[other].phase == "Skipped"
    assert all(node.name == name for name, node in outcome.nodes.items())


def test_a_workflow_parameter_reaches_every_task() -> None:
    word = [Parameter(name="word", value="hello")]
    with (
        Workflow(generate_name="diamond-", entrypoint="main", arguments=word) as workflow,
        DAG(name="main"),
    ):
        corners = (
            {"name": name, "arguments": {"message": f"{{{{workflow.parameters.word}}}} {name}"}}
            for name in "ABCD"
        )
        a, b, c, d = (say(**corner) for corner in corners)
        a >> [b, c] >> d  # type: ignore[operator]

    assert not [finding for finding in argolocal.lint(workflow) if finding.fatal]
    outcome = argolocal.run(workflow, {"word": "goodbye"})
    assert outcome.phase == "Succeeded", outcome
    assert {name: node.log for name, node in outcome.nodes.items()} == {
        name: f"goodbye {name}\n" for name in "ABCD"
    }


def test_an_artifact_is_passed_to_the_next_step(tmp_path: Path) -> None:
    with Workflow(generate_name="letters-", entrypoint="main") as workflow, Steps(name="main"):
        letter = write(name="write")
        read(name="read", arguments=[letter.get_artifact("letter")])
    outcome = argolocal.run(workflow)
    assert outcome.phase == "Succeeded", outcome
    assert outcome.nodes["read"].log == "dear reader\n"
    assert outcome.artifact("write", "letter", tmp_path / "letter").read_text() == "dear reader"


def test_a_resource_of_a_custom_kind_is_applied_and_awaited() -> None:
    class Counters(argolocal.Controller):
        kind = "Counter"

        def poll(self) -> None:
            for name in self.names():
                self.change(
                    name, lambda now: now and now | {"status": {"count": now["spec"]["to"]}}
                )

    kinds = argolocal.Kinds()
    kinds.register(Counters)
    counter = "apiVersion: example.com/v1\nkind: Counter\nmetadata: {name: sheep}\nspec: {to: 3}"
    count = Parameter(name="count", value_from=ValueFrom(json_path="{.status.count}"))

    with Workflow(generate_name="count-", entrypoint="main") as workflow:
        Resource(
            name="main",
            action="create",
            manifest=counter,
            success_condition="status.count > 2",
            outputs=count,
        )

    assert argolocal.run(workflow, kinds=kinds).outputs == {"count": "3"}
    with pytest.raises(
        argolocal.ConfigError, match="Counter, which the local runner does not support"
    ):
        argolocal.run(workflow)


def test_a_failure_names_the_step_and_the_reason() -> None:
    template = {
        "name": "print",
        "script": {"image": "busybox", "command": ["sh"], "source": "echo no ink; exit 3"},
    }
    outcome = argolocal.run({**HELLO, "spec": {**HELLO["spec"], "templates": [template]}})
    (node,) = outcome.nodes.values()
    assert outcome.phase == "Failed"
    assert node.exit_code == 3
    assert node.log == "no ink\n"
    assert "exit code 3" in str(outcome)
    assert "no ink" in str(outcome)


def test_a_file_runs_with_the_objects_in_it_and_leaves_no_files(tmp_path: Path) -> None:
    file = tmp_path / "workflow.yaml"
    file.write_text("""
kind: Workflow
metadata: {generateName: greet-}
spec:
  entrypoint: greet
  templates:
    - name: greet
      container:
        image: busybox
        command: [sh, -c, 'echo $GREETING']
        env: [{name: GREETING, valueFrom: {configMapKeyRef: {name: words, key: greeting}}}]
---
{apiVersion: v1, kind: ConfigMap, metadata: {name: words}, data: {greeting: hej}}
""")

    outcome = argolocal.run(file)
    (node,) = outcome.nodes.values()
    home = outcome.home
    assert outcome.phase == "Succeeded"
    assert node.log == "hej\n"
    assert home.exists()
    del outcome
    assert not home.exists()
    assert [*tmp_path.iterdir()] == [file]


def test_lint_finds_a_mistake_without_a_run() -> None:
    wrong = {**HELLO, "spec": {**HELLO["spec"], "entrypoint": "prnt"}}
    (finding,) = (finding for finding in argolocal.lint(wrong) if finding.fatal)
    assert 'Did you mean "print"?' in str(finding)
    with pytest.raises(argolocal.ConfigError, match="prnt"):
        argolocal.run(wrong)


def test_importing_argolocal_imports_no_other_module() -> None:
    program = (
        "import argolocal, sys; print(*sorted(name for name in sys.modules if"
        " name.startswith('argolocal')))"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert result.stdout == "argolocal\n"


def test_the_log_of_a_retried_step_is_from_its_last_attempt() -> None:
    script = {
        "image": "busybox",
        "command": ["sh"],
        "source": "echo try {{retries}}; exit $((1 - {{retries}}))",
    }

    template = {
        "name": "main",
        "retryStrategy": {"limit": "2", "retryPolicy": "Always"},
        "script": script,
    }

    steps = {"name": "all", "steps": [[{"name": "again", "template": "main"}]]}
    spec = {"entrypoint": "all", "templates": [steps, template]}
    outcome = argolocal.run({"kind": "Workflow", "metadata": {"name": "w"}, "spec": spec})
    assert outcome.phase == "Succeeded", outcome
    assert outcome.nodes["again"].log == "try 1\n", outcome


def test_a_step_of_a_workflow_template_has_its_log() -> None:
    spec = {
        "templates": [
            {"name": "say", "container": {"image": "busybox", "command": ["echo", "hej"]}}
        ]
    }
    shared_template = {"kind": "WorkflowTemplate", "metadata": {"name": "shared"}, "spec": spec}
    task = {"name": "a", "templateRef": {"name": "shared", "template": "say"}}
    templates = [{"name": "main", "dag": {"tasks": [task]}}]
    workflow = {**HELLO, "spec": {"entrypoint": "main", "templates": templates}}
    outcome = argolocal.run(workflow, objects=[shared_template])
    assert outcome.phase == "Succeeded", outcome
    assert outcome.nodes["a"].log == "hej\n", outcome


def test_an_image_may_be_given_by_its_fields() -> None:
    template = {
        "name": "print",
        "container": {"image": "mine", "command": ["sh", "-c", "echo $WORD"]},
    }
    workflow = {**HELLO, "spec": {**HELLO["spec"], "templates": [template]}}
    outcome = argolocal.run(workflow, images={"mine": {"env": {"WORD": "hej"}}})
    (node,) = outcome.nodes.values()
    assert node.log == "hej\n", outcome
    with pytest.raises(argolocal.ConfigError, match="a dict of its fields"):
        argolocal.run(workflow, images={"mine": {"enviroment": {}}})
    with pytest.raises(argolocal.ConfigError, match="a dict of its fields"):
        argolocal.run(workflow, images="mine")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("version", "is_fatal"),
    [
        ("argoproj.io/v1", True),
        ("argoproj.io/v1alpha2", True),
        ("argproj.io/v1alpha1", False),
        ("v1", False),
    ],
)
def test_a_workflow_with_another_version_of_the_api_is_not_one_of_argo(
    version: str, is_fatal: bool
) -> None:
    workflow = {**HELLO, "apiVersion": version}
    (finding,) = [finding for finding in argolocal.lint(workflow) if finding.rule == "version"]
    assert finding.fatal == is_fatal
    assert "argoproj.io/v1alpha1" in finding.message
    with pytest.raises(argolocal.ConfigError, match="apiVersion"):
        argolocal.run(workflow)


def test_the_hostname_is_the_name_of_the_pod() -> None:
    template = {
        "name": "print",
        "container": {"image": "busybox", "command": ["sh", "-c", "echo $HOSTNAME"]},
    }
    outcome = argolocal.run({**HELLO, "spec": {**HELLO["spec"], "templates": [template]}})
    (node,) = outcome.nodes.values()
    assert node.log == f"{outcome.name}\n"


@pytest.mark.parametrize("call", [argolocal.lint, argolocal.run])
@pytest.mark.parametrize("value", [None, 5, ["a"], b"a.yaml", object])
def test_an_argument_that_is_not_a_workflow_is_an_error_of_one_line(call: Any, value: Any) -> None:
    with pytest.raises(ConfigError, match=r"^workflow is .*: it must be the path of a file"):
        call(value)


@pytest.mark.parametrize("objects", [5, None, {"kind": "Secret"}, "secret.yaml", [5]])
def test_objects_that_are_not_a_list_of_dicts_are_an_error_of_one_line(objects: Any) -> None:
    with pytest.raises(ConfigError, match=r"^objects is .*: it must be a list of dicts"):
        argolocal.lint({"kind": "Workflow"}, objects)


def test_parameters_that_are_not_a_dict_are_an_error_of_one_line() -> None:
    with pytest.raises(ConfigError, match=r"^parameters is .*: it must be a dict"):
        argolocal.run({"kind": "Workflow"}, 5)  # type: ignore[arg-type]
