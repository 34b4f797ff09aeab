"""What Argo's own examples were done wrongly for, each as small as it can be."""

import os
from pathlib import Path
from typing import Any

import pytest

from argolocal.pods import filesystem
from argolocal.runner.cluster import LocalCluster
from tests.argolocal.running import execute


def ran(home: Path, *templates: dict[str, Any]) -> dict[str, Any]:
    spec = {"entrypoint": "main", "templates": [*templates]}
    return execute({"kind": "Workflow", "metadata": {"name": "w"}, "spec": spec}, {}, LocalCluster(home))


@pytest.mark.skipif(not filesystem.available(), reason="needs mount namespaces")
def test_a_path_that_is_spelled_out_beside_its_placeholder_is_the_same_file(tmp_path: Path) -> None:
    out = {"parameters": [{"name": "out", "valueFrom": {"path": "/tmp/out.txt"}}]}
    source = "echo 'it goes to {{outputs.parameters.out.path}}'; echo found > /tmp/out.txt"
    status = ran(
        tmp_path, {"name": "main", "script": {"image": "alpine", "command": ["sh"], "source": source}, "outputs": out}
    )
    assert status["phase"] == "Succeeded", status
    assert status["nodes"]["w"]["outputs"]["parameters"][0]["value"] == "found"
    assert (tmp_path / "runs/w/logs/w.log").read_text() == "it goes to /tmp/out.txt\n"
    assert not Path("/tmp/out.txt").exists()


def test_an_item_with_keys_is_given_as_a_whole_too(tmp_path: Path) -> None:
    arguments = {"parameters": [{"name": "x", "value": "{{item.k}} of {{item}}"}]}
    step = {"name": "one", "template": "say", "arguments": arguments, "withItems": [{"k": "v"}]}
    say = {
        "name": "say",
        "inputs": {"parameters": [{"name": "x"}]},
        "container": {"image": "busybox", "command": ["echo", "{{inputs.parameters.x}}"]},
    }
    assert ran(tmp_path, {"name": "main", "steps": [[step]]}, say)["phase"] == "Succeeded"
    (log,) = (tmp_path / "runs/w/logs").glob("w-say-*.log")
    assert log.read_text() == 'v of {"k":"v"}\n'


def test_a_later_step_knows_the_machine_of_one_before_it(tmp_path: Path) -> None:
    """Argo waits for ever where a tag of a step has no value; the name of the node has one on every machine."""
    one = {"name": "one", "container": {"image": "busybox", "command": ["true"]}}
    two: dict[str, Any] = {"name": "two", "inputs": {"parameters": [{"name": "x"}]}}
    two["container"] = {"image": "busybox", "command": ["echo", "{{inputs.parameters.x}}"]}
    arguments = {"parameters": [{"name": "x", "value": "{{steps.a.hostNodeName}}"}]}
    steps = [[{"name": "a", "template": "one"}], [{"name": "b", "template": "two", "arguments": arguments}]]
    assert ran(tmp_path, {"name": "main", "steps": steps}, one, two)["phase"] == "Succeeded"
    (log,) = (tmp_path / "runs/w/logs").glob("w-two-*.log")
    assert log.read_text().strip() == os.uname().nodename
