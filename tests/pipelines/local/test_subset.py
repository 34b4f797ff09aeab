"""What the local runner does not do must be said before anything starts, with its place."""

from pathlib import Path
from typing import Any

import pytest

from pipelines.local.cluster import LocalCluster
from pipelines.local.manifest import documents, workflow
from pipelines.local.subset import TABLES, check
from steps.errors import ConfigError

GOOD = """
apiVersion: argoproj.io/v1alpha1
kind: Workflow
metadata: {name: w}
spec:
  entrypoint: main
  templates:
  - name: main
    container: {image: "python:3.11", command: [python, -c, "1"]}
"""


def checked(path: str = "", value: Any = None) -> list[str]:
    """GOOD with one value set, such as `spec.templates.0.daemon`."""
    manifest = documents(GOOD)[0]
    *way, last = path.split(".") if path else ["", ""]
    place: Any = manifest
    for step in way if path else ():
        place = place[int(step)] if isinstance(place, list) else place.setdefault(step, {})
    if path:
        place[last] = value
    return check(workflow(manifest), LocalCluster(Path("nowhere")))


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("spec.templates.0.plugin", {"x": {}}, r"spec\.templates\[0\]\.plugin is not supported"),
        ("spec.templates.0.sidecars", [{"name": "s"}], r"sidecars\[0\]\.image is missing"),
        ("spec.templates.0.containr", {}, r'spec\.templates\[0\]\.containr.*Did you mean "container"'),
        ("spec.activeDeadlineSeconds", "soon", r"spec\.activeDeadlineSeconds is 'soon'.*whole number"),
        ("spec.templates.0.container.command", "sh", r"command is .*'sh'.*list"),
        ("spec.templates.0.container.args", [1], r"args is \[1\].*Quote it"),
        ("spec", [], r"spec is list .*must be a mapping"),
        ("spec.templates.0.resource", "x", r"resource is str .*must be a mapping"),
        ("spec.entrypont", "main", r'spec\.entrypont.*Did you mean "entrypoint"'),
        ("spec.workflowTemplateRef", {"name": "x"}, r"beside workflowTemplateRef.*Take one"),
        ("spec.synchronization", {"mutex": {"name": "m"}}, r"synchronization\.mutex .*Write mutexes"),
        ("spec.templates.0.container.image", "pytorch/pytorch:2.0", r"pytorch/pytorch:2\.0.*python, alpine"),
        ("spec.templates.0.container", {"image": "nginx"}, r"container\.command is missing"),
        (
            "spec.templates.0.podSpecPatch",
            '{"containers": [{"name": "main", "image": "{{inputs.parameters.x}}"}]}',
            "podSpecPatch changes image",
        ),
        ("spec.templates.0.container.lifecycle", {"preStop": {}}, r"container\.lifecycle"),
        ("spec.templates.0.suspend", {}, r"has 2 types"),
        (
            "spec.templates",
            [{"name": "main", "steps": [[{"name": "a", "inline": {"container": {}, "daemon": True}}]]}],
            r"templates\[0\]\.steps\[0\]\[0\]\.inline\.daemon .*Put it with the other templates",
        ),
        ("spec.templates.0.timeout", "5 minutes", r"timeout is '5 minutes'.*1m30s"),
        ("spec.templates.0.retryStrategy", {"backoff": {"duration": "1d"}}, r"retryStrategy\.backoff\.duration"),
        ("spec.templates.0.retryStrategy", {"expression": "now() > 1"}, r"calls now\(\)"),
        ("spec.templates.0.container.args", ["{{=sprig.uper('x')}}"], r'sprig\.uper.*Did you mean "upper"'),
        ("spec.templates.0.outputs", {"parameters": [{"name": "p", "valueFrom": {"path": "/sys/x"}}]}, r"/sys/x.*/tmp"),
        (
            "spec.templates.0.outputs",
            {"parameters": [{"name": True, "valueFrom": {"path": "/tmp/x"}}]},
            r"name is True.*Quote",
        ),
        (
            "spec.templates.0.inputs",
            {"artifacts": [{"name": "a", "path": "/tmp/a", "s3": {"key": "k", "roleARN": "b"}}]},
            r"s3\.roleARN",
        ),
        (
            "spec.templates.0.podSpecPatch",
            '{"containers": [{"name": "main", "image": "x"}]}',
            r"podSpecPatch changes image",
        ),
        ("spec.templates", {}, r"spec\.templates is .* must be a list"),
    ],
)
def test_what_cannot_run_here_is_named_with_its_path(path: str, value: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        checked(path, value)


def test_what_does_not_matter_here_is_ignored_and_said_once() -> None:
    assert checked() == []
    notes = checked("spec.templates.0.nodeSelector", {"gpu": "yes"})
    assert len(notes) == 1
    assert "nodeSelector" in notes[0]


def test_a_patch_of_resources_is_ignored_though_their_numbers_come_later() -> None:
    patch = '{"containers": [{"name": "main", "resources": {"limits": {{inputs.parameters.r}}}}]}'
    assert "podSpecPatch" in checked("spec.templates.0.podSpecPatch", patch)[0]


@pytest.mark.parametrize("command", [["python", "-m", "steps", "train"], ["python"]])
def test_an_image_of_this_repository_is_known_by_what_it_runs(command: list[str]) -> None:
    manifest = documents(GOOD)[0]
    container = {"image": "registry.example/mine@sha256:0", "command": command[:1], "args": command[1:]}
    manifest["spec"]["templates"][0]["container"] = container
    if command[1:]:
        assert check(workflow(manifest), LocalCluster(Path("nowhere"))) == []
    else:
        with pytest.raises(ConfigError, match=r"registry\.example/mine"):
            check(workflow(manifest), LocalCluster(Path("nowhere")))


def test_a_resource_that_argo_would_take_for_done_at_once_is_refused() -> None:
    with pytest.raises(ConfigError, match="success at the first look"):
        manifest = documents(GOOD)[0]
        resource = {"action": "apply", "manifest": "kind: Service", "failureCondition": "status.failed > 0"}
        manifest["spec"]["templates"][0] = {"name": "main", "resource": resource}
        check(workflow(manifest), LocalCluster(Path("nowhere")))


def test_yaml_is_read_as_kubernetes_reads_it() -> None:
    text = "{n: 1, a: y, b: 007, c: 1e3, d: 2020-01-01, e: 1:30, f: 'y', g: ~, h: 0x10, i: -1.5}"
    expected = {
        "false": 1,
        "a": True,
        "b": 7,
        "c": 1000.0,
        "d": "2020-01-01",
        "e": "1:30",
        "f": "y",
        "g": None,
        "h": 16,
    }
    assert documents(text)[0] == expected | {"i": -1.5}


def test_a_cron_workflow_and_a_template_run_as_their_spec() -> None:
    spec = documents(GOOD)[0]["spec"]
    cron = workflow(
        {"kind": "CronWorkflow", "metadata": {"name": "c"}, "spec": {"schedules": ["@daily"], "workflowSpec": spec}}
    )
    assert cron["spec"] == spec
    assert cron["metadata"]["name"].startswith("c-")
    template = workflow({"kind": "WorkflowTemplate", "metadata": {"name": "t"}, "spec": spec})
    assert template["metadata"]["name"].startswith("t-")


def test_a_parameter_that_the_workflow_lacks_is_an_error_with_the_nearest() -> None:
    manifest = documents(GOOD)[0]
    manifest["spec"]["arguments"] = {"parameters": [{"name": "epochs", "value": 3}]}
    assert workflow(manifest, {"epochs": "4"})["spec"]["arguments"]["parameters"] == [{"name": "epochs", "value": "4"}]
    with pytest.raises(ConfigError, match='Did you mean "epochs"'):
        workflow(manifest, {"epoch": "4"})


def test_the_page_of_all_fields_is_what_the_code_does() -> None:
    from pipelines.local.fields import page

    kept = Path(__file__).parents[3] / "docs/argo-fields.md"
    assert kept.read_text() == page(), "python -m pipelines.local.fields > docs/argo-fields.md"


def test_no_field_of_the_table_is_misspelt() -> None:
    from pipelines.local.fields import described

    dropped = {"Locks": {"mutex", "semaphore"}}  # Argo 4 has them no more, and says nothing
    dropped |= {key: {"podResources"} for key in ("Spec", "Template")}  # Argo 4.1 has it, Hera's models not yet
    for table, fields in described().items():
        assert set(TABLES[table]) - set(fields) - dropped.get(table, set()) == set(), table


def test_a_lock_in_a_database_is_refused_for_what_it_is_and_not_for_what_it_lacks() -> None:
    with pytest.raises(ConfigError, match=r"semaphores\[0\]\.database is not supported"):
        checked("spec.synchronization", {"semaphores": [{"database": {"key": "x"}}]})
