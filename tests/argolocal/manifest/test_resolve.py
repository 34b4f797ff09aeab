"""Tests of templates in other objects: a file that can be run on a cluster can also be run here,
without changes."""

import re
from pathlib import Path
from typing import Any

import pytest

from argolocal.errors import ConfigError
from argolocal.manifest.read import build_workflow, parse_objects, split_main_object
from argolocal.runner.cluster import LocalCluster
from argolocal.runner.preflight import check_workflow
from tests import builders
from tests.argolocal.running import execute_manifest

WORKFLOW_AND_TEMPLATES = """
apiVersion: argoproj.io/v1alpha1
kind: WorkflowTemplate
metadata: {name: tools}
spec:
  templates:
  - name: twice
    inputs: {parameters: [{name: x}]}
    steps:
    - - {name: once, template: say, arguments: {parameters: [{name: x, value: "{{inputs.parameters.x}}!"}]}}
  - name: say
    inputs: {parameters: [{name: x}]}
    script: {image: busybox, command: [sh], source: "echo {{inputs.parameters.x}} $WHO > {{outputs.parameters.y.path}}",
             envFrom: [{configMapRef: {name: settings}}]}
    outputs: {parameters: [{name: "y", valueFrom: {path: /tmp/y}}]}
---
apiVersion: v1
kind: ConfigMap
metadata: {name: settings}
data: {WHO: me}
---
apiVersion: argoproj.io/v1alpha1
kind: Workflow
metadata: {name: w}
spec:
  entrypoint: main
  templates:
  - name: say
    container: {image: busybox, command: ["false"]}
  - name: main
    dag:
      tasks:
      - {name: a, templateRef: {name: tools, template: twice},
         arguments: {parameters: [{name: x, value: hello}]}}
      - {name: b, depends: a, inline: {container: {image: busybox, command: ["true"]}}}
"""


def load_objects(text: str, home: Path) -> tuple[dict[str, Any], LocalCluster]:
    """Return the object to run, and a cluster with the other objects."""
    workflow, other_objects = split_main_object(parse_objects(text))
    cluster = LocalCluster(home)
    cluster.store_objects(other_objects)
    return workflow, cluster


def test_a_stored_template_calls_templates_of_its_own_object(tmp_path: Path) -> None:
    workflow, cluster = load_objects(WORKFLOW_AND_TEMPLATES, tmp_path)
    status = execute_manifest(workflow, {}, cluster)
    assert status["phase"] == "Succeeded", status
    nodes = {node["name"]: node for node in status["nodes"].values()}
    assert nodes["w.a[0].once"]["outputs"]["parameters"][0]["value"] == "hello! me"
    assert nodes["w.a"]["templateRef"] == {"name": "tools", "template": "twice"}
    assert nodes["w.a[0].once"]["templateScope"] == "namespaced/tools"


def test_a_number_in_a_stored_template_is_converted_as_by_argo(tmp_path: Path) -> None:
    workflow, cluster = load_objects(
        WORKFLOW_AND_TEMPLATES.replace(
            "{parameters: [{name: x}]}", "{parameters: [{name: x, default: 1.50}]}"
        ),
        tmp_path,
    )
    workflow["spec"]["templates"][1]["dag"]["tasks"][0].pop("arguments")
    status = execute_manifest(workflow, {}, cluster)
    assert status["phase"] == "Succeeded", status
    nodes = {node["name"]: node for node in status["nodes"].values()}
    assert nodes["w.a[0].once"]["outputs"]["parameters"][0]["value"] == "1.5! me"


def test_inputs_and_outputs_of_stored_templates_are_checked_before_the_run(tmp_path: Path) -> None:
    text = WORKFLOW_AND_TEMPLATES.replace('{name: "y", ', '{name: "y", globalName: all, ')
    text = text.replace(
        'command: ["true"]',
        'command: [test, "{{workflow.outputs.parameters.all}}", "=", "hello! me"]',
    )
    workflow, cluster = load_objects(text, tmp_path)
    assert execute_manifest(workflow, {}, cluster)["phase"] == "Succeeded"
    del workflow["spec"]["templates"][1]["dag"]["tasks"][0]["arguments"]
    with pytest.raises(ConfigError, match=r'template twice of tools needs the input "x"'):
        execute_manifest({**workflow, "metadata": {"name": "other"}}, {}, cluster)


@pytest.mark.parametrize(
    ("field", "wrong", "message"),
    [
        (
            "say, arguments: {parameters: [{name: x",
            "say, arguments: {parameters: [{name: z",
            'needs the input "x"',
        ),
        (
            "say, arguments: {parameters: [",
            "say, arguments: {parameters: [{name: x, value: z}, ",
            "and unique",
        ),
        (
            '"{{inputs.parameters.x}}!"',
            '"{{inputs.parameters.y}}!"',
            "inputs.parameters.y does not have a value",
        ),
        (
            '"{{inputs.parameters.x}}!"',
            '"{{workflow.parameters.y}}!"',
            "workflow.parameters.y does not have a value",
        ),
        (
            "template: say, arguments",
            "template: sya, arguments",
            'the template "sya" of tools does not exist',
        ),
    ],
)
def test_a_mistake_in_a_stored_template_is_found_before_the_run_if_it_is_called(
    tmp_path: Path, field: str, wrong: str, message: str
) -> None:
    text = WORKFLOW_AND_TEMPLATES.replace(field, wrong, 1)
    assert text != WORKFLOW_AND_TEMPLATES
    workflow, cluster = load_objects(text, tmp_path)
    with pytest.raises(
        ConfigError, match=rf"spec.templateRef\[tools\].templates\[twice\].*{re.escape(message)}"
    ):
        execute_manifest(workflow, {}, cluster)
    workflow["spec"]["templates"][1]["dag"]["tasks"][0]["templateRef"]["template"] = "say"
    assert execute_manifest(workflow, {}, cluster)["phase"] == "Succeeded"


def test_an_inline_template_cannot_read_the_inputs_of_its_stored_template(tmp_path: Path) -> None:
    """Argo substitutes tags in an inline template only if it belongs to the workflow itself."""
    cluster = LocalCluster(tmp_path)
    inline = "inline: {container: {image: busybox, command: [echo, '{{inputs.parameters.x}}']}}}"
    workflow, other_objects = split_main_object(
        parse_objects(
            re.sub(r'template: say, arguments: .*}}!"}\]}}', inline, WORKFLOW_AND_TEMPLATES)
        )
    )
    cluster.store_objects(other_objects)

    with pytest.raises(
        ConfigError, match=r"templates\[twice\].*inline.*inputs.parameters.x does not have a value"
    ):
        execute_manifest(workflow, {}, cluster)

    workflow["spec"]["templates"].append(
        {**other_objects[0]["spec"]["templates"][0], "name": "own"}
    )
    task = workflow["spec"]["templates"][1]["dag"]["tasks"][0]
    del task["templateRef"]
    task["template"] = "own"
    assert execute_manifest(workflow, {}, cluster)["phase"] == "Succeeded"


def test_stored_templates_may_call_each_other_recursively(tmp_path: Path) -> None:
    def call(other: str, x: str) -> dict[str, Any]:
        arguments = {"parameters": [{"name": "x", "value": x}]}
        return {
            "name": "next",
            "templateRef": {"name": other, "template": "t"},
            "arguments": arguments,
        }

    def stored(name: str, other: str) -> dict[str, Any]:
        step = call(other, "{{=asInt(inputs.parameters.x) - 1}}") | {
            "when": "{{inputs.parameters.x}} > 0"
        }
        template = {"name": "t", "inputs": {"parameters": [{"name": "x"}]}, "steps": [[step]]}
        return {
            "kind": "WorkflowTemplate",
            "metadata": {"name": name},
            "spec": {"templates": [template]},
        }

    cluster = LocalCluster(tmp_path)
    cluster.store_objects([stored("a", "b"), stored("b", "a")])
    status = execute_manifest(
        builders.make_workflow({"name": "main", "steps": [[call("a", "2")]]}), {}, cluster
    )
    assert status["phase"] == "Succeeded", status
    nodes = {
        node["name"]: node for node in status["nodes"].values() if node["name"].endswith("next")
    }

    assert [nodes[name]["phase"] for name in sorted(nodes)] == [
        "Succeeded",
        "Succeeded",
        "Succeeded",
        "Skipped",
    ]


WORKFLOW_OF_TEMPLATE = """
kind: WorkflowTemplate
metadata: {name: t}
spec:
  entrypoint: main
  arguments: {parameters: [{name: x, value: "1"}, {name: z, value: "3"}]}
  templates: [{name: main, container: {image: busybox, command: ["true"]}}]
---
kind: Workflow
metadata: {name: w}
spec: {workflowTemplateRef: {name: t}, arguments: {parameters: [{name: z, value: "4"}]}}
"""


def test_a_workflow_overrides_values_of_its_workflow_template(tmp_path: Path) -> None:
    workflow, cluster = load_objects(WORKFLOW_OF_TEMPLATE, tmp_path)
    spec = build_workflow(workflow, {"x": "2"}, cluster.find)["spec"]
    assert {each["name"]: each["value"] for each in spec["arguments"]["parameters"]} == {
        "x": "2",
        "z": "4",
    }
    assert spec["entrypoint"] == "main"
    assert len(spec["templates"]) == 1


def test_an_exit_handler_does_not_get_arguments_of_a_workflow_template(tmp_path: Path) -> None:
    cluster = LocalCluster(tmp_path)
    text = WORKFLOW_OF_TEMPLATE.replace("entrypoint: main", "entrypoint: main\n  onExit: bye")
    text = text.replace(
        "templates: [", "templates: [{name: bye, inputs: {parameters: [{name: x}]}, suspend: {}}, "
    )
    workflow, other_objects = split_main_object(parse_objects(text))
    cluster.store_objects(other_objects)
    # the test also checks that the WorkflowTemplate itself can be run
    for each in (workflow, other_objects[0]):
        with pytest.raises(ConfigError, match=r"exit handler bye needs the input 'x'.*-p x=VALUE"):
            build_workflow(each, {}, cluster.find)
        assert build_workflow(each, {"x": "2"}, cluster.find)


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        (
            "{name: nowhere, template: x}",
            r"spec\.templates\[1\]\.dag\.tasks\[0\]\.templateRef: .*'nowhere'.*the file of",
        ),
        (
            "{name: tools, template: sya}",
            r'the template "sya" of tools does not exist. Did you mean "say"',
        ),
        ("{name: '{{workflow.name}}', template: say}", r"must not contain tags"),
    ],
)
def test_an_invalid_reference_is_rejected_with_its_path(
    tmp_path: Path, reference: str, message: str
) -> None:
    workflow, cluster = load_objects(
        WORKFLOW_AND_TEMPLATES.replace("{name: tools, template: twice}", reference), tmp_path
    )
    with pytest.raises(ConfigError, match=message):
        execute_manifest(workflow, {}, cluster)
    assert not (tmp_path / "runs").exists()


def test_fields_of_stored_templates_are_checked_as_in_the_workflow(tmp_path: Path) -> None:
    workflow, cluster = load_objects(
        WORKFLOW_AND_TEMPLATES.replace("envFrom", "lifecycle"), tmp_path
    )
    with pytest.raises(ConfigError, match=r"templates\[1\]\.script\.lifecycle"):
        execute_manifest(workflow, {}, cluster)


def test_a_file_with_two_workflows_is_rejected_with_their_names() -> None:
    with pytest.raises(ConfigError, match=r"2 objects \(Workflow a, Workflow b\)"):
        split_main_object([{"kind": "Workflow", "metadata": {"name": name}} for name in "ab"])


def test_a_parameter_gets_its_value_from_a_config_map_which_must_exist(tmp_path: Path) -> None:
    cluster = LocalCluster(tmp_path)
    label = {"workflows.argoproj.io/configmap-type": "Parameter"}
    cluster.store_objects(
        [{"kind": "ConfigMap", "metadata": {"name": "m", "labels": label}, "data": {"k": "hello"}}]
    )
    parameter = {"name": "x", "valueFrom": {"configMapKeyRef": {"name": "m", "key": "k"}}}
    manifest = builders.make_workflow(arguments={"parameters": [parameter]})
    assert (
        build_workflow(manifest, {}, cluster.find)["spec"]["arguments"]["parameters"][0]["value"]
        == "hello"
    )

    assert (
        build_workflow(manifest, {"x": "mine"}, cluster.find)["spec"]["arguments"]["parameters"][0][
            "value"
        ]
        == "mine"
    )

    with pytest.raises(
        ConfigError, match=r"spec\.arguments\.parameters\[0\]\.valueFrom: a ConfigMap 'm'"
    ):
        build_workflow(manifest, {})


def test_a_run_is_labeled_with_the_name_of_its_workflow_template_and_not_with_the_labels_of_the_template() -> (
    None
):
    metadata = {"name": "t", "namespace": "n", "labels": {"a": "b"}, "annotations": {"c": "d"}}
    spec = {"entrypoint": "main", "templates": [], "workflowMetadata": {"labels": {"e": "f"}}}
    meta = build_workflow({"kind": "WorkflowTemplate", "metadata": metadata, "spec": spec})[
        "metadata"
    ]
    assert meta["labels"] == {"workflows.argoproj.io/workflow-template": "t", "e": "f"}
    assert meta["annotations"] == {}
    assert meta["namespace"] == "n"


@pytest.mark.parametrize(
    ("cluster_scope", "label"), [(False, "workflow-template"), (True, "cluster-workflow-template")]
)
def test_a_workflow_has_a_label_with_the_name_of_its_workflow_template(
    cluster_scope: bool, label: str
) -> None:
    reference = {"name": "t", "clusterScope": cluster_scope}
    manifest = {"kind": "Workflow", "metadata": {"name": "w", "labels": {"a": "b"}}}
    found = build_workflow(
        {**manifest, "spec": {"workflowTemplateRef": reference}},
        {},
        lambda kind, name: {"spec": {}},
    )
    assert found["metadata"]["labels"] == {"a": "b", f"workflows.argoproj.io/{label}": "t"}


def test_a_value_outside_its_enum_is_rejected() -> None:
    parameter = {"name": "x", "value": "c", "enum": ["a", "b"]}
    with pytest.raises(ConfigError, match="x is 'c': it must be one of a, b"):
        build_workflow(builders.make_workflow(arguments={"parameters": [parameter]}))


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (
            {"env": [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}]},
            r"env\[0\]\.valueFrom\.secr",
        ),
        (
            {
                "env": [
                    {"name": "A", "valueFrom": {"configMapKeyRef": {"name": "c", "key": "none"}}}
                ]
            },
            "'c' with 'none'",
        ),
        (
            {"envFrom": [{"secretRef": {"name": "s"}}]},
            r"container\.envFrom\[0\]\.secretRef: the Secret 's' does not exist here",
        ),
        (
            {
                "envFrom": [
                    {"configMapRef": {"name": "c"}},
                    {"secretRef": {"name": "s", "optional": True}},
                ]
            },
            "",
        ),
    ],
)
def test_missing_objects_of_pods_are_reported_before_the_run(
    tmp_path: Path, template: dict[str, Any], message: str
) -> None:
    cluster = LocalCluster(tmp_path)
    cluster.store_objects([{"kind": "ConfigMap", "metadata": {"name": "c"}, "data": {"k": "v"}}])
    main_template = {
        "name": "main",
        "container": {"image": "busybox", "command": ["true"], **template},
    }

    manifest = build_workflow(builders.make_workflow(main_template))

    if message:
        with pytest.raises(ConfigError, match=message):
            check_workflow(manifest, cluster)

        manifest["spec"]["templates"].append(
            {"name": "maker", "resource": {"action": "create", "manifest": "kind: Secret"}}
        )

    assert check_workflow(manifest, cluster) == []
