"""Unsupported fields must be reported with their path, before the run starts."""

import json
from pathlib import Path
from typing import Any

import pytest

from argolocal.errors import ConfigError
from argolocal.manifest.read import build_workflow, parse_objects
from argolocal.manifest.schema import TABLES
from argolocal.runner.cluster import LocalCluster
from argolocal.runner.preflight import check_workflow

VALID_WORKFLOW = """
apiVersion: argoproj.io/v1alpha1
kind: Workflow
metadata: {name: w}
spec:
  entrypoint: main
  templates:
  - name: main
    container: {image: "python:3.11", command: [python, -c, "1"]}
"""


def check_with(path: str = "", value: Any = None) -> list[str]:
    """Check the manifest GOOD with one changed value, such as `spec.templates.0.daemon`."""
    manifest = parse_objects(VALID_WORKFLOW)[0]
    *parent_keys, last_key = path.split(".") if path else ["", ""]
    parent: Any = manifest
    for step in parent_keys if path else ():
        if isinstance(parent, list):
            parent = parent[int(step)]
        else:
            parent = parent.setdefault(step, {})
    if path:
        parent[last_key] = value
    return check_workflow(build_workflow(manifest), LocalCluster(Path("nowhere")))


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("spec.templates.0.plugin", {"x": {}}, r"spec\.templates\[0\]\.plugin is not supported"),
        ("spec.templates.0.sidecars", [{"name": "s"}], r"sidecars\[0\]\.image is missing"),
        (
            "spec.templates.0.containr",
            {},
            r'spec\.templates\[0\]\.containr.*Did you mean "container"',
        ),
        (
            "spec.activeDeadlineSeconds",
            "soon",
            r"spec\.activeDeadlineSeconds is 'soon'.*whole number",
        ),
        ("spec.templates.0.container.command", "sh", r"command is .*'sh'.*list"),
        ("spec.templates.0.container.args", [1], r"args is \[1\].*Quote it"),
        ("spec", [], r"spec is list .*must be a mapping"),
        ("spec.templates.0.resource", "x", r"resource is str .*must be a mapping"),
        ("spec.entrypont", "main", r'spec\.entrypont.*Did you mean "entrypoint"'),
        (
            "spec.workflowTemplateRef",
            {"name": "x"},
            r"both templates and workflowTemplateRef.*remove one",
        ),
        (
            "spec.synchronization",
            {"mutex": {"name": "m"}},
            r"synchronization\.mutex .*Write mutexes",
        ),
        (
            "spec.templates.0.container.image",
            "pytorch/pytorch:2.0",
            r"pytorch/pytorch:2\.0.*python, alpine",
        ),
        ("spec.templates.0.container", {"image": "nginx"}, r"container\.command is missing"),
        (
            "spec.templates.0.podSpecPatch",
            '{"containers": [{"name": "main", "image": "{{inputs.parameters.x}}"}]}',
            r"spec\.templates\[0\]\.podSpecPatch\.containers\[0\]\.image is not supported",
        ),
        ("spec.templates.0.container.lifecycle", {"preStop": {}}, r"container\.lifecycle"),
        ("spec.templates.0.suspend", {}, r"has 2 types"),
        (
            "spec.templates.0.container.env",
            [
                {
                    "name": "A",
                    "value": "x",
                    "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}},
                }
            ],
            r"container\.env\[0\] has both value and valueFrom",
        ),
        (
            "spec.templates.0.container.resources",
            {"requests": {"memory": "1Gi"}, "limits": {"memory": "512Mi"}},
            r"container\.resources\.requests\.memory is 1Gi: .*limits\.memory \(512Mi\)",
        ),
        (
            "spec.templates.0.sidecars",
            [
                {
                    "name": "s",
                    "image": "bash",
                    "command": ["true"],
                    "resources": {"requests": {"cpu": 1}, "limits": {"cpu": "900m"}},
                }
            ],
            r"sidecars\[0\]\.resources\.requests\.cpu is 1",
        ),
        (
            "spec.templates.0.container.volumeMounts",
            [
                {"name": "a", "mountPath": "/a"},
                {"name": "b", "mountPath": "/b"},
                {"name": "b", "mountPath": "/a"},
            ],
            r"volumeMounts\[2\]\.mountPath is '/a', which is also the path of .*volumeMounts\[0\]",
        ),
        (
            "spec.templates.0.activeDeadlineSeconds",
            0,
            r"templates\[0\]\.activeDeadlineSeconds is 0.*below 1",
        ),
        (
            "spec.templateDefaults",
            {"activeDeadlineSeconds": "0"},
            r"templates\[0\]\.activeDeadlineSeconds is 0",
        ),
        (
            "spec.templates",
            [
                {
                    "name": "main",
                    "containerSet": {
                        "containers": [{"name": "wait", "image": "bash", "command": ["a"]}]
                    },
                }
            ],
            r"containerSet\.containers\[0\]\.name is 'wait'",
        ),
        (
            "spec.templates",
            [
                {
                    "name": "main",
                    "steps": [[{"name": "a", "inline": {"container": {}, "daemon": True}}]],
                }
            ],
            r"templates\[0\]\.steps\[0\]\[0\]\.inline\.daemon .*Move the template to",
        ),
        ("spec.templates.0.timeout", "5 minutes", r"timeout is '5 minutes'.*1m30s"),
        (
            "spec.templates.0.retryStrategy",
            {"backoff": {"duration": "1d"}},
            r"retryStrategy\.backoff\.duration",
        ),
        ("spec.templates.0.retryStrategy", {"expression": "now() > 1"}, r"calls now\(\)"),
        (
            "spec.templates.0.container.args",
            ["{{=sprig.uper('x')}}"],
            r'sprig\.uper.*Did you mean "upper"',
        ),
        (
            "spec.templates.0.outputs",
            {"parameters": [{"name": "p", "valueFrom": {"path": "/sys/x"}}]},
            r"/sys/x.*/tmp",
        ),
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
            r"spec\.templates\[0\]\.podSpecPatch\.containers\[0\]\.image is not supported",
        ),
        ("spec.templates", {}, r"spec\.templates is .* must be a list"),
    ],
)
def test_the_error_for_an_unsupported_field_names_its_path(
    path: str, value: Any, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_with(path, value)


def steps_with(**fields: Any) -> list[Any]:
    return [{"name": "main", "steps": [[{"name": "a", "template": "t", **fields}]]}]


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (
            "spec.templates",
            steps_with(withItems=3),
            r"steps\[0\]\[0\]\.withItems is 3: it must be a list",
        ),
        ("spec.templates", steps_with(withItems="abc"), r"withItems is 'abc': it must be a list"),
        (
            "spec.templates",
            steps_with(withItems={"a": 1}),
            r"withItems is \{'a': 1\}: it must be a list",
        ),
        ("spec.templates", steps_with(hooks={"exit": None}), r"hooks\.exit is empty"),
        (
            "spec.templates",
            steps_with(continueOn={"failed": "x"}),
            r"continueOn\.failed is 'x'.*true or false",
        ),
        (
            "spec.templates",
            steps_with(withSequence={"count": [1]}),
            r"withSequence\.count is \[1\].*whole number",
        ),
        (
            "spec.templates",
            steps_with(withSequence={"count": 1.5}),
            r"withSequence\.count is 1\.5.*whole number",
        ),
        (
            "spec.templates",
            steps_with(withSequence={"start": "1"}),
            r"\[0\]\.withSequence must have .* count or an end",
        ),
        (
            "spec.templates",
            steps_with(withSequence={"count": 1, "end": 2}),
            r"\[0\]\.withSequence must have either",
        ),
        (
            "spec.templates",
            steps_with(hooks={"h": {"template": "t", "expression": "1 +"}}),
            r"h\.expression is '1 \+'",
        ),
        (
            "spec.templates",
            steps_with(withSequence={"count": 2, "format": 5}),
            r"withSequence\.format is 5: .*text",
        ),
        (
            "spec.templates",
            steps_with(arguments={"parameters": [{"name": "x", "value": [1]}]}),
            r"\.value is \[1\]",
        ),
        (
            "spec.workflowMetadata",
            {"labels": ["a"]},
            r"workflowMetadata\.labels is \['a'\].*mapping of texts",
        ),
        (
            "spec.workflowMetadata",
            {"labels": {"a": "1", "b": 2}},
            r"mapping of texts, but b is not a text",
        ),
        (
            "spec.workflowMetadata",
            {"annotations": "x"},
            r"workflowMetadata\.annotations is 'x'.*mapping of texts",
        ),
        (
            "spec.arguments",
            {"parameters": [{"name": "p", "value": "1", "enum": "1"}]},
            r"enum is '1'.*list",
        ),
        (
            "spec.arguments",
            {"parameters": [{"name": "p", "value": {"a": 1}}]},
            r"\[0\]\.value is .*text",
        ),
        ("spec.priority", "x", r"spec\.priority is 'x': it must be a whole number"),
        ("spec.suspend", "x", r"spec\.suspend is 'x': it must be true or false"),
        ("spec.activeDeadlineSeconds", "5", r"is '5': it must be a whole number from 0"),
        ("spec.activeDeadlineSeconds", 10**30, "it must be a whole number from 0 to 9223372036"),
        (
            "spec.templates.0.activeDeadlineSeconds",
            "soon",
            r"activeDeadlineSeconds is 'soon'.*whole number",
        ),
        (
            "spec.templates.0.daemon",
            "x",
            r"templates\[0\]\.daemon is 'x': it must be true or false",
        ),
        ("spec.templates.0.timeout", 5, r"timeout is 5: it must be a text"),
        ("spec.templates.0.timeout", "30", r"timeout is '30'.*give a unit"),
        ("spec.templates", [{"name": "main", "steps": []}], r"templates\[0\]\.steps is empty"),
        (
            "spec.templates",
            steps_with(withSequence={"count": 2, "format": "%s"}),
            r"withSequence\.format: ",
        ),
        ("spec.templates.0.timeout", "9999999999h", r"timeout is '9999999999h'.*at most"),
        (
            "spec.templates.0.retryStrategy",
            {"limit": 2.5},
            r"retryStrategy\.limit is 2\.5.*whole number",
        ),
        ("spec.templates.0.retryStrategy", {"limit": float("inf")}, r"retryStrategy\.limit is inf"),
        ("spec.templates.0.retryStrategy", {"limit": "x"}, r"retryStrategy\.limit is 'x'"),
        ("spec.templates.0.retryStrategy", {"limit": {}}, r"retryStrategy\.limit is \{\}"),
        (
            "spec.templates.0.retryStrategy",
            {"retryPolicy": "Sometimes"},
            r"is 'Sometimes'.*Always, OnError",
        ),
        (
            "spec.templates.0.retryStrategy",
            {"backoff": {"factor": 1.5}},
            r"backoff\.factor is 1\.5",
        ),
        (
            "spec.templates.0.container.env",
            [{"name": "A", "value": [1]}],
            r"env\[0\]\.value is \[1\]: .*text",
        ),
        (
            "spec.templates.0.container.env",
            [{"name": "A", "valueFrom": {"configMapKeyRef": "x"}}],
            "must be an object",
        ),
        (
            "spec.templates.0.container.envFrom",
            [{"configMapRef": "x"}],
            r"envFrom\[0\]\.configMapRef is 'x'",
        ),
        (
            "spec.templates.0.inputs",
            {"artifacts": [{"name": "a", "path": "/x", "mode": 99999}]},
            "from 0 to 511",
        ),
        (
            "spec.templates.0.sidecars",
            [{"name": "main", "image": "bash", "command": ["true"]}],
            "another name",
        ),
        (
            "spec.templates.0.initContainers",
            [{"name": "wait", "image": "bash", "command": ["true"]}],
            "another name",
        ),
        (
            "spec.templates.0.sidecars",
            [{"name": "a", "image": "bash", "command": ["true"]}] * 2,
            r"sidecars\[1\]\.name",
        ),
        (
            "spec.templates.0.synchronization",
            {"mutexes": [{"name": ""}]},
            r"mutexes\[0\]\.name is '': it must not be empty",
        ),
    ],
)
def test_a_value_of_a_wrong_type_is_rejected_before_the_run(
    path: str, value: Any, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_with(path, value)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("spec.activeDeadlineSeconds", 60.0),
        ("spec.templates.0.activeDeadlineSeconds", "{{inputs.parameters.s}}"),
        (
            "spec.templates.0.retryStrategy",
            {"limit": "2", "backoff": {"duration": "10", "factor": "2"}},
        ),
        (
            "spec.templates.0.retryStrategy",
            {"limit": "{{=1 + 1}}", "backoff": {"duration": "{{workflow.name}}"}},
        ),
        ("spec.templates.0.retryStrategy", {"limit": -1}),
        ("spec.arguments", {"parameters": [{"name": "p", "value": 1.5, "enum": [1.5, True, "x"]}]}),
    ],
)
def test_numbers_and_strings_are_accepted_as_by_argo(path: str, value: Any) -> None:
    assert check_with(path, value) == []


INPUT_ARTIFACTS = [{"name": "a", "path": "/in/x", "raw": {"data": "1"}}]


@pytest.mark.parametrize(
    ("mounts", "files", "message"),
    [
        (
            [],
            [*INPUT_ARTIFACTS, {"name": "b", "path": "/in//x", "raw": {"data": "2"}}],
            r"artifacts\[1\]\.path .*inputs\.artifacts\[0\]",
        ),
        (
            [{"name": "v", "mountPath": "/in/x"}],
            INPUT_ARTIFACTS,
            (
                r"artifacts\[0\]\.path is '/in/x', which is also the path of"
                r" container\.volumeMounts\[0\]"
            ),
        ),
        ([{"name": "v", "mountPath": "/in"}], INPUT_ARTIFACTS, ""),
    ],
)
def test_two_inputs_at_the_same_path_are_rejected(
    mounts: list[Any], files: list[Any], message: str
) -> None:
    manifest = parse_objects(VALID_WORKFLOW)[0]
    manifest["spec"]["volumes"] = [{"name": "v", "emptyDir": {}}]
    (template,) = manifest["spec"]["templates"]
    template["inputs"] = {"artifacts": files}
    template["container"]["volumeMounts"] = mounts
    if not message:
        assert check_workflow(build_workflow(manifest), LocalCluster(Path("nowhere"))) == []
        return
    with pytest.raises(ConfigError, match=message):
        check_workflow(build_workflow(manifest), LocalCluster(Path("nowhere")))


CRON = {"schedules": ["@daily"], "workflowSpec": parse_objects(VALID_WORKFLOW)[0]["spec"]}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"bogusField": 3}, r"spec\.bogusField is not supported"),
        (
            {"startingDeadlineSeconds": "nonsense"},
            r"spec\.startingDeadlineSeconds is 'nonsense'.*whole number",
        ),
        ({"schedule": "@daily"}, r"spec\.schedule is not supported .*Write schedules"),
        ({"schedules": "@daily"}, r"spec\.schedules is '@daily': it must be a list"),
        ({"concurrencyPolicy": "Sometimes"}, r"spec\.concurrencyPolicy is 'Sometimes'.*Forbid"),
        ({"workflowMetadata": {"labels": ["a"]}}, r"spec\.workflowMetadata\.labels is \['a'\]"),
    ],
)
def test_an_error_in_a_cron_workflow_is_reported(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_workflow({"kind": "CronWorkflow", "metadata": {"name": "c"}, "spec": CRON | fields})


def test_an_ignored_schedule_is_reported() -> None:
    manifest = {
        "kind": "CronWorkflow",
        "metadata": {"name": "c"},
        "spec": CRON | {"timezone": "UTC"},
    }
    assert (
        "schedules, timezone"
        in check_workflow(build_workflow(manifest), LocalCluster(Path("nowhere")), manifest)[0]
    )


def test_an_image_in_template_defaults_is_enough_for_every_template() -> None:
    manifest = parse_objects(VALID_WORKFLOW)[0]
    manifest["spec"]["templateDefaults"] = {
        "container": {"image": "alpine", "command": ["sh", "-c"]}
    }
    manifest["spec"]["templates"][0]["container"] = {"args": ["echo hi"]}
    assert check_workflow(build_workflow(manifest), LocalCluster(Path("nowhere"))) == []


def test_ignored_fields_are_reported_once() -> None:
    assert check_with() == []
    notes = check_with("spec.templates.0.nodeSelector", {"gpu": "yes"})
    assert len(notes) == 1
    assert "nodeSelector" in notes[0]


def test_a_pod_spec_patch_of_resources_may_contain_tags() -> None:
    patch = '{"containers": [{"name": "main", "resources": {"limits": {{inputs.parameters.r}}}}]}'
    assert not any(
        "podSpecPatch" in note for note in check_with("spec.templates.0.podSpecPatch", patch)
    )


def test_a_resource_that_argo_would_complete_immediately_is_rejected() -> None:
    with pytest.raises(ConfigError, match="would report success"):
        manifest = parse_objects(VALID_WORKFLOW)[0]
        resource = {
            "action": "apply",
            "manifest": "kind: Service",
            "failureCondition": "status.failed > 0",
        }
        manifest["spec"]["templates"][0] = {"name": "main", "resource": resource}
        check_workflow(build_workflow(manifest), LocalCluster(Path("nowhere")))


def test_yaml_is_parsed_as_by_kubernetes() -> None:
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

    assert parse_objects(text)[0] == expected | {"i": -1.5}


def test_json_that_is_not_valid_yaml_is_accepted() -> None:
    named = {"name": "\U0001f600 / \u00e9", "n": [1, 1.5, 1e3, -0.0, None, True]}
    assert (
        parse_objects(json.dumps(named))
        == parse_objects(f"# YAML\n{json.dumps(named, ensure_ascii=False)}")
        == [named]
    )

    assert parse_objects('{"kind": "List", "items": [{"a": 1}, {"b": "\\/"}]}') == [
        {"a": 1},
        {"b": "/"},
    ]
    assert parse_objects("{a: 1}\n---\nb: 2") == [{"a": 1}, {"b": 2}]

    for text, message in {
        '{"a": 1, "a": 2}': '"a" is duplicated',
        '{"a": "\\ud83d"}': "surrogates",
    }.items():
        with pytest.raises(ConfigError, match=message):
            parse_objects(text)


def test_a_cron_workflow_and_a_workflow_template_run_as_a_workflow_with_their_spec() -> None:
    spec = parse_objects(VALID_WORKFLOW)[0]["spec"]
    cron = build_workflow(
        {
            "kind": "CronWorkflow",
            "metadata": {"name": "c"},
            "spec": {"schedules": ["@daily"], "workflowSpec": spec},
        }
    )
    assert cron["spec"] == spec
    assert cron["metadata"]["name"].startswith("c-")
    template = build_workflow({"kind": "WorkflowTemplate", "metadata": {"name": "t"}, "spec": spec})
    assert template["metadata"]["name"].startswith("t-")


def test_an_unknown_parameter_is_an_error_with_a_suggestion() -> None:
    manifest = parse_objects(VALID_WORKFLOW)[0]
    manifest["spec"]["arguments"] = {"parameters": [{"name": "epochs", "value": 3}]}
    assert build_workflow(manifest, {"epochs": "4"})["spec"]["arguments"]["parameters"] == [
        {"name": "epochs", "value": "4"}
    ]
    with pytest.raises(ConfigError, match='Did you mean "epochs"'):
        build_workflow(manifest, {"epoch": "4"})


def test_the_page_of_all_fields_matches_the_code() -> None:
    from tests.argo_fields import make_page

    page_file = Path(__file__).parents[3] / "docs/argo-fields.md"
    assert page_file.read_text() == make_page(), "python -m tests.argo_fields > docs/argo-fields.md"


def test_the_field_table_has_no_spelling_mistakes() -> None:
    from tests.argo_fields import collect_fields

    # fields that were removed in Argo 4, which ignores them
    dropped = {"Locks": {"mutex", "semaphore"}}
    dropped["CronSpec"] = {"schedule"}
    # these fields are new in Argo 4.1 and missing in Hera's models
    dropped.update({key: {"podResources"} for key in ("Spec", "Template")})
    for table, fields in collect_fields().items():
        assert set(TABLES[table]) - set(fields) - dropped.get(table, set()) == set(), table


def test_a_database_lock_is_rejected_as_unsupported() -> None:
    with pytest.raises(ConfigError, match=r"semaphores\[0\]\.database is not supported"):
        check_with("spec.synchronization", {"semaphores": [{"database": {"key": "x"}}]})


@pytest.mark.parametrize(
    "kind", ["resource", "container", "script", "dag", "steps", "suspend", "data", "http"]
)
def test_a_template_with_a_null_body_is_rejected(kind: str) -> None:
    manifest = parse_objects(VALID_WORKFLOW)[0]
    manifest["spec"]["templates"][0] = {"name": "main", kind: None}
    with pytest.raises(ConfigError, match=r"has 0 types|is missing|must be"):
        check_workflow(build_workflow(manifest), LocalCluster(Path("nowhere")))


def test_a_null_item_of_a_loop_is_kept() -> None:
    manifest = parse_objects(VALID_WORKFLOW)[0]
    task = {"name": "t", "template": "main", "withItems": [None, {"a": None}]}
    manifest["spec"]["templates"].append({"name": "loop", "dag": {"tasks": [task]}})
    assert build_workflow(manifest)["spec"]["templates"][-1]["dag"]["tasks"][0]["withItems"] == [
        None,
        {"a": None},
    ]
