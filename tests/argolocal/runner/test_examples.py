"""Reduced versions of Argo's examples that once gave another result here than on Argo."""

import os
from pathlib import Path
from typing import Any

import pytest

from argolocal.pods import filesystem
from argolocal.runner.cluster import LocalCluster
from tests.argolocal.running import execute_manifest
from tests.builders import make_workflow


def run_templates(home: Path, *templates: dict[str, Any]) -> dict[str, Any]:
    return execute_manifest(make_workflow(*templates), {}, LocalCluster(home))


@pytest.mark.skipif(not filesystem.supports_namespaces(), reason="needs mount namespaces")
def test_an_output_path_and_the_tag_of_this_path_mean_the_same_file(tmp_path: Path) -> None:
    out = {"parameters": [{"name": "out", "valueFrom": {"path": "/tmp/out.txt"}}]}
    source = "echo 'it goes to {{outputs.parameters.out.path}}'; echo found > /tmp/out.txt"

    status = run_templates(
        tmp_path,
        {
            "name": "main",
            "script": {"image": "alpine", "command": ["sh"], "source": source},
            "outputs": out,
        },
    )

    assert status["phase"] == "Succeeded", status
    assert status["nodes"]["w"]["outputs"]["parameters"][0]["value"] == "found"
    assert (tmp_path / "runs/w/logs/w.log").read_text() == "it goes to /tmp/out.txt\n"
    assert not Path("/tmp/out.txt").exists()


def test_the_tag_of_a_loop_item_that_is_a_map_is_the_whole_map(tmp_path: Path) -> None:
    arguments = {"parameters": [{"name": "x", "value": "{{item.k}} of {{item}}"}]}
    step = {"name": "one", "template": "say", "arguments": arguments, "withItems": [{"k": "v"}]}
    say = {
        "name": "say",
        "inputs": {"parameters": [{"name": "x"}]},
        "container": {"image": "busybox", "command": ["echo", "{{inputs.parameters.x}}"]},
    }
    assert run_templates(tmp_path, {"name": "main", "steps": [[step]]}, say)["phase"] == "Succeeded"
    (log,) = (tmp_path / "runs/w/logs").glob("w-say-*.log")
    assert log.read_text() == 'v of {"k":"v"}\n'


def test_a_step_can_read_the_host_node_name_of_an_earlier_step(tmp_path: Path) -> None:
    """Argo waits for ever for a tag without a value; on this machine, the node name always has a
    value."""
    pod_template = {"name": "one", "container": {"image": "busybox", "command": ["true"]}}

    steps_template: dict[str, Any] = {
        "name": "two",
        "inputs": {"parameters": [{"name": "x"}]},
        "container": {"image": "busybox", "command": ["echo", "{{inputs.parameters.x}}"]},
    }

    arguments = {"parameters": [{"name": "x", "value": "{{steps.a.hostNodeName}}"}]}
    steps = [
        [{"name": "a", "template": "one"}],
        [{"name": "b", "template": "two", "arguments": arguments}],
    ]
    assert (
        run_templates(tmp_path, {"name": "main", "steps": steps}, pod_template, steps_template)[
            "phase"
        ]
        == "Succeeded"
    )
    (log,) = (tmp_path / "runs/w/logs").glob("w-two-*.log")
    assert log.read_text().strip() == os.uname().nodename
