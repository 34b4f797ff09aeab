"""Tests of the values that a step can read: times, phases, parameters in Go's format, and outputs
of other steps."""

import json
from pathlib import Path
from typing import Any

import pytest

from argolocal.manifest.read import ObjectIdentity, build_workflow
from argolocal.runner.cluster import LocalCluster
from tests.argolocal.runner.played import (
    make_dag,
    make_leaf,
    make_parameters,
    make_scheduler,
    make_steps_template,
    play,
)
from tests.argolocal.running import execute_manifest

PRINT_TAGS_SCRIPT = """cat <<END
{{workflow.duration}} {{workflow.status}}
{{workflow.scheduledTime}}
{{workflow.parameters}}
{{inputs.parameters}}
{{workflow.annotations.why}}
END
sleep 0.2"""


def run_and_read_logs(home: Path, manifest: dict[str, Any]) -> list[list[str]]:
    """Run a manifest and return the output lines of each step, sorted by name."""
    status = execute_manifest(manifest, {}, LocalCluster(home))
    assert status["phase"] == "Succeeded", status
    return [log.read_text().splitlines() for log in sorted(home.glob("runs/*/logs/*.log"))]


def make_workflow(**spec: Any) -> dict[str, Any]:
    inputs = {
        "parameters": [
            {"value": 1, "enum": [1, True], "description": "no more", "name": "p", "default": "d"}
        ]
    }
    tell = {
        "name": "tell",
        "inputs": inputs,
        "script": {"image": "busybox", "command": ["sh"], "source": PRINT_TAGS_SCRIPT},
    }
    parameters = [{"value": 1.50, "name": "b", "enum": [1.5, 2]}, {"name": "a", "value": "<é>"}]
    return {"arguments": {"parameters": parameters}, "templates": [tell], **spec}


def test_workflow_tags_of_an_exit_handler_have_their_values_at_its_start(tmp_path: Path) -> None:
    meta = {
        "name": "w",
        "annotations": {"workflows.argoproj.io/scheduled-time": "2026-04-29T00:00:00Z", "why": "b"},
    }
    spec = make_workflow(entrypoint="tell", onExit="tell")
    last_log, first_log = run_and_read_logs(
        tmp_path, {"kind": "Workflow", "metadata": meta, "spec": spec}
    )
    # the phase is empty when the first steps start
    assert first_log[:2] == ["0.000000 ", "2026-04-29T00:00:00Z"]
    seconds, phase = last_log[0].split()
    assert float(seconds) >= 0.2
    assert phase == "Succeeded"

    assert (
        first_log[2:]
        == last_log[2:]
        == [
            '[{"name":"b","value":"1.5","enum":["1.5","2"]},{"name":"a","value":"\\u003cé\\u003e"}]',
            '[{"name":"p","default":"d","value":"1","enum":["1","true"],"description":"no more"}]',
            "b",
        ]
    )


def test_a_run_of_a_cron_workflow_has_its_scheduled_time() -> None:
    spec = {
        "schedules": ["@daily"],
        "workflowSpec": make_workflow(entrypoint="tell"),
        "workflowMetadata": {"labels": {"a": "b"}},
    }
    cron = {"kind": "CronWorkflow", "metadata": {"name": "c"}, "spec": spec}
    meta = build_workflow(cron, identity=ObjectIdentity(created=1e9))["metadata"]
    assert meta["annotations"]["workflows.argoproj.io/scheduled-time"] == "2001-09-09T01:46:40Z"
    assert meta["labels"] == {"workflows.argoproj.io/cron-workflow": "c", "a": "b"}


def test_workflow_failures_have_the_format_of_argo(tmp_path: Path) -> None:
    fail = {"name": "fail", "container": {"image": "busybox", "command": ["sh", "-c", "exit 3"]}}
    tell = {
        "name": "tell",
        "container": {"image": "busybox", "command": ["echo", "{{workflow.failures}}"]},
    }
    pass_ = {"name": "pass", "container": {"image": "busybox", "command": ["true"]}}

    for entrypoint, name in (("fail", "bad"), ("pass", "good")):
        spec = {"entrypoint": entrypoint, "onExit": "tell", "templates": [fail, pass_, tell]}
        execute_manifest(
            {"kind": "Workflow", "metadata": {"name": name}, "spec": spec},
            {},
            LocalCluster(tmp_path),
        )

    (bad_log,) = tmp_path.glob("runs/bad/logs/bad-tell-*.log")
    (good_log,) = tmp_path.glob("runs/good/logs/good-tell-*.log")
    text = json.loads(bad_log.read_text())

    assert list(json.loads(text)[0]) == [
        "displayName",
        "message",
        "templateName",
        "phase",
        "podName",
        "finishedAt",
    ]

    assert "." not in json.loads(text)[0]["finishedAt"]
    assert json.loads(good_log.read_text()) == "null"


def test_numbers_and_texts_in_the_results_of_a_loop_stay_as_written() -> None:
    leaf_template = make_leaf("one", inputs={"parameters": [{"name": "x"}]})
    arguments = make_parameters(x="{{item}}")

    results = [
        '{"b": 1, "a": 1.0}',
        " 1.50 ",
        "1e3",
        '"\\u00fc<"',
        "null",
        '{"a":1,"a":2}',
        "[1 , 1.0]",
    ]

    tasks = (
        {"name": "a", "withItems": [0, 1, 2, 3, 4, 5, 6], "arguments": arguments},
        {"name": "b", "depends": "a", "arguments": make_parameters(x="{{tasks.a.outputs.result}}")},
        {
            "name": "c",
            "depends": "a",
            "withParam": "{{tasks.a.outputs.result}}",
            "arguments": arguments,
        },
    )

    s = make_scheduler(make_dag(*tasks), leaf_template)
    ran = play(s, outputs={f"a({i}:{i})": {"result": result} for i, result in enumerate(results)})
    expected = '[{"b":1,"a":1.0},1.50,1e3,"\\u00fc\\u003c",null,{"a":1,"a":2},[1,1.0]]'
    assert s.table.get("w.b")["inputs"]["parameters"][0]["value"] == expected  # type: ignore[index]
    names = [name for name in ran if name.startswith("c(")]

    assert names == [
        "c(0:a:1.0,b:1)",
        "c(1:1.50)",
        "c(2:1e3)",
        "c(3:\\u00fc<)",
        "c(4:[])",
        "c(5:a:2)",
        "c(6:[1 1.0])",
    ]

    items = [s.table.get(f"w.{name}")["inputs"]["parameters"][0]["value"] for name in names]  # type: ignore[index]
    assert items == ['{"a":1.0,"b":1}', "1.50", "1e3", "ü<", "null", '{"a":2}', "[1,1.0]"]


def test_numbers_in_lists_of_a_loop_are_formatted_as_in_go() -> None:
    show = {
        "name": "b",
        "depends": "a",
        "arguments": make_parameters(x="{{tasks.a.outputs.parameters.p}}"),
    }
    s = make_scheduler(
        make_dag({"name": "a", "withItems": [0]}, show),
        make_leaf("one", inputs=make_parameters(x="")),
    )
    play(
        s,
        outputs={"a(0:0)": {"parameters": [{"name": "p", "value": "[1.0, 12345678901234567890]"}]}},
    )
    assert s.table.get("w.b")["inputs"]["parameters"][0]["value"] == "[[1,12345678901234567000]]"  # type: ignore[index]


@pytest.mark.parametrize(("outer", "exported"), [("dag", ["g", "own"]), ("steps", ["g"])])
def test_a_global_output_of_a_dag_is_exported_only_by_an_outer_dag(
    outer: str, exported: list[str]
) -> None:
    output = {
        "name": "q",
        "valueFrom": {"parameter": "{{tasks.a.outputs.parameters.p}}"},
        "globalName": "own",
    }
    inner_template = {
        **make_dag({"name": "a"}),
        "name": "inner",
        "outputs": {"parameters": [output]},
    }
    call = {"name": "c", "template": "inner"}
    s = make_scheduler(
        make_dag(call) if outer == "dag" else make_steps_template([call]),
        inner_template,
        make_leaf(),
    )
    name = "c.a" if outer == "dag" else "w[0].c.a"
    play(s, outputs={name: {"parameters": [{"name": "p", "value": "P", "globalName": "g"}]}})
    assert [each["name"] for each in s.status["outputs"]["parameters"]] == exported


def test_a_dag_output_without_a_source_fails_with_the_message_of_argo() -> None:
    s = make_scheduler(
        {**make_dag({"name": "a"}), "outputs": {"parameters": [{"name": "p", "value": "v"}]}},
        make_leaf(),
    )
    play(s)
    assert s.table.get("w")["message"] == "output parameters must have a valueFrom specified"  # type: ignore[index]
