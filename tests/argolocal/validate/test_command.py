"""Tests of the command `lint`: several files and folders, its output and its exit codes."""

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from argolocal.validate import lint_all
from tests.argolocal.validate.manifests import find_step, make_arguments
from tests.argolocal.validate.objects import PINNED_IMAGE, VALID_WORKFLOW, make_batch_object

GOLDEN = Path(__file__).parents[2] / "golden"
REKINDLE = str(Path(sys.executable).with_name("rekindle"))


def run_lint(tmp_path: Path, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [REKINDLE, "lint", *args], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )


def test_the_command_prints_the_file_of_each_finding_and_fails_for_fatal_findings(
    tmp_path: Path,
) -> None:
    wrong = copy.deepcopy(VALID_WORKFLOW)
    wrong["spec"]["entrypoint"] = "mian"
    (tmp_path / "both.yaml").write_text(yaml.safe_dump_all([VALID_WORKFLOW, wrong]))
    (tmp_path / "job.json").write_text(json.dumps(make_batch_object("Job")))
    result = run_lint(tmp_path, "--manifest", "both.yaml", "--manifest", "job.json", "-o", "json")
    assert result.returncode == 1
    assert result.stderr == ""

    assert json.loads(result.stdout) == [
        {
            "file": "both.yaml",
            "path": "spec.entrypoint",
            "rule": "template",
            "message": 'the template "mian" does not exist. Did you mean "main"?',
            "fatal": True,
        },
        {
            "file": "job.json",
            "path": "spec.activeDeadlineSeconds",
            "rule": "deadline",
            "message": "a job that hangs would never end: give a number of seconds.",
            "fatal": False,
        },
    ]

    plainly = run_lint(tmp_path, "--manifest", "job.json")
    assert plainly.returncode == 0
    assert plainly.stderr.startswith(
        "warning: job.json: spec.activeDeadlineSeconds: a job that hangs"
    )


@pytest.mark.slow
def test_the_command_accepts_configs_and_exits_with_2_for_bad_usage(tmp_path: Path) -> None:
    config = str(GOLDEN / "config.yaml")
    result = run_lint(tmp_path, config, config)
    assert result.returncode == 0
    assert result.stdout == "no problems found\n"
    (tmp_path / "empty.yaml").write_text("# nothing\n")
    for args in (
        [],
        ["--manifest", "away.yaml"],
        ["--manifest", "empty.yaml"],
        [config, "--set", "train.wokers=3"],
    ):
        assert run_lint(tmp_path, *args).returncode == 2


def test_templates_in_other_files_are_checked_where_they_are_used(tmp_path: Path) -> None:
    """Templates may be in a List, a folder or another file; a mistake in a template is reported
    once."""
    api = {"apiVersion": "argoproj.io/v1alpha1"}

    shared_template: Any = api | {
        "kind": "WorkflowTemplate",
        "metadata": {"name": "shared"},
        "spec": copy.deepcopy(VALID_WORKFLOW["spec"]),
    }

    shared_template["spec"].pop("arguments")
    shared_template["spec"]["workflowMetadata"] = {"annotations": {"team": "fraud"}}
    (tmp_path / "templates").mkdir()
    (tmp_path / "templates/shared.json").write_text(
        json.dumps(api | {"kind": "List", "items": [shared_template]})
    )
    workflow = api | {"kind": "Workflow", "metadata": {"name": "whole"}}
    workflow["spec"] = {"workflowTemplateRef": {"name": "shared"}}
    user = copy.deepcopy(VALID_WORKFLOW)

    for name, called in {"one": "finish", "two": "finsh"}.items():
        find_step(user, name).update(
            templateRef={"name": "shared", "template": called}, arguments=make_arguments(noet="1")
        )
        find_step(user, name).pop("template")

    find_step(user, "three").update(
        arguments=make_arguments(note="{{steps.one.outputs.parameters.auc}}")
    )
    (tmp_path / "flows.yaml").write_text(yaml.safe_dump_all([workflow, user]))
    flows_report = run_lint(tmp_path, "--manifest", "flows.yaml", "-o", "json")
    assert flows_report.returncode == 0
    assert json.loads(flows_report.stdout) == []
    result = run_lint(tmp_path, "--manifest", "flows.yaml", "--manifest", "templates", "-o", "json")

    findings = [
        (each["file"], each["path"], each["message"])
        for each in json.loads(result.stdout)
        if each["fatal"]
    ]

    flows_name = "flows.yaml"
    base = "spec.workflowTemplateRef[shared].templates"

    for path in ("[apply].resource.manifest", "[stages].steps[0][two].when"):
        assert [
            m
            for f, p, m in findings
            if (f, p) == (flows_name, base + path) and "workflow.parameters.rows" in m
        ], findings

    steps = "spec.templates[stages].steps"
    tag = "steps.one.outputs.parameters.auc"

    assert [
        (p.removeprefix(steps), m.partition(" Did")[0])
        for _, p, m in findings
        if p.startswith(steps)
    ] == [
        ("[0][one].arguments", 'template finish of shared does not have the input "noet".'),
        ("[0][two]", 'the template "finsh" of shared does not exist.'),
        (
            "[1][three].arguments.parameters[note].value",
            f"{{{{{tag}}}}}: {tag} does not have a value here.",
        ),
    ]

    assert {f for f, _, _ in findings} == {flows_name}
    assert result.returncode == 1


@pytest.mark.slow
def test_files_of_a_folder_that_are_not_manifests_are_passed_over(tmp_path: Path) -> None:
    folder = tmp_path / "flows"
    folder.mkdir()

    other_files = {
        "values.yaml": "image: {tag: 1}",
        "chart.yaml": "apiVersion: v2\nname: x",
        "ci.yml": "on: push\njobs: {}",
        "kustomization.yaml": "resources: [a.yaml]",
        "helm.yaml": "apiVersion: argoproj.io/v1alpha1\nmetadata:\n  {{- if .Values.x }}\n  a: b\n  {{ end }}",
        "list.json": "[1, 2]",
        "empty.yaml": "# nothing\n---\n",
    }
    for name, text in other_files.items():
        (folder / name).write_text(text)

    (folder / "bytes.yaml").write_bytes(b"\xff\xfe\x00")
    (folder / "loop.yaml").symlink_to("loop.yaml")
    assert run_lint(tmp_path, "--manifest", "flows").returncode == 2
    wrong = copy.deepcopy(VALID_WORKFLOW)
    wrong["spec"]["entrypoint"] = "mian"
    (folder / "both.yaml").write_text("a: b\n---\n" + yaml.safe_dump(wrong))
    result = run_lint(tmp_path, "--manifest", "flows")
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    note, *errors = result.stderr.splitlines()
    assert len(errors) == 1
    assert "spec.entrypoint" in errors[0]
    assert note.startswith("note: ")
    assert "values.yaml" in note
    assert run_lint(tmp_path, "--manifest", "flows/values.yaml").returncode == 1


def test_a_manifest_of_a_folder_that_is_not_yaml_is_an_error_beside_the_findings_of_others(
    tmp_path: Path,
) -> None:
    wrong = copy.deepcopy(VALID_WORKFLOW)
    wrong["spec"]["entrypoint"] = "mian"
    (tmp_path / "flows").mkdir()
    (tmp_path / "flows/a.yaml").write_text(
        "apiVersion: argoproj.io/v1alpha1\nkind: Workflow\nspec: [\n"
    )
    (tmp_path / "flows/b.yaml").write_text(yaml.safe_dump(wrong))
    result = run_lint(tmp_path, "--manifest", "flows", "-o", "json")
    findings = json.loads(result.stdout)
    assert result.returncode == 1
    assert [each["rule"] for each in findings] == ["yaml", "template"]
    assert findings[0]["file"].endswith("a.yaml")
    assert "line 4" in findings[0]["message"]


def test_a_mistake_in_a_shared_template_is_reported_once() -> None:
    api = {"apiVersion": "argoproj.io/v1alpha1"}
    spec = {"activeDeadlineSeconds": 60, "entrypoint": "main"}

    body = {
        "name": "part",
        "container": {
            "image": PINNED_IMAGE,
            "command": ["{{inputs.parameters.x}}", "{{workflow.parameters.x}}"],
        },
    }

    objects: list[Any] = [
        api
        | {
            "kind": "WorkflowTemplate",
            "metadata": {"name": "t"},
            "spec": spec | {"templates": [body]},
        }
    ]

    for name, brought in (("a", make_arguments(x="1")), ("b", {})):
        call = {"name": "go", "templateRef": {"name": "t", "template": "part"}}
        caller = spec | {"templates": [{"name": "main", "steps": [[call]]}], "arguments": brought}
        objects.append(api | {"kind": "Workflow", "metadata": {"name": name}, "spec": caller})

    findings = [
        (f.file, f.path, f.message.partition(":")[0])
        for f in lint_all([(each["metadata"]["name"], each) for each in objects])
        if f.rule == "tag" and f.fatal
    ]

    path = ".templates[part].container.command"
    assert findings == [
        ("t", f"spec{path}[0]", "{{inputs.parameters.x}}"),
        ("b", f"spec.templateRef[t]{path}[1]", "{{workflow.parameters.x}}"),
    ]
