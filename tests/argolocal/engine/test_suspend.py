"""Tests of suspended steps: an approval is never lost or applied twice, and a crash never resumes a
step."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from argolocal.engine import suspend
from argolocal.engine.nodes import NodeResumed, StartPod
from argolocal.engine.scheduler import Scheduler
from argolocal.errors import ConfigError
from argolocal.runner.run import resume_suspended
from argolocal.state.journal import Busy, RunFiles
from tests.argolocal.runner.played import make_leaf, make_scheduler, make_steps_template
from tests.builders import make_workflow
from tests.waiting import until

REKINDLE = [sys.executable, "-c", "from rekindle.__main__ import main; main()"]


def make_approval(default: str | None = None, **output: Any) -> dict[str, Any]:
    source = {"supplied": {}} | ({"default": default} if default is not None else {})
    return {
        "name": "one",
        "suspend": {},
        "outputs": {"parameters": [{"name": "go", "valueFrom": source, **output}]},
    }


def advance_to_approval(template: dict[str, Any]) -> Scheduler:
    """Return a workflow whose first step is suspended, and whose step `after` gets the value of the
    approval."""
    last_task = {
        "name": "after",
        "template": "after",
        "arguments": {"parameters": [ANSWER_ARGUMENT]},
    }
    echo = make_leaf("after", inputs={"parameters": [{"name": "x"}]})
    s = make_scheduler(make_steps_template([{"name": "ask"}], [last_task]), template, echo)
    assert s.advance(1000.0) == []
    return s


ANSWER_ARGUMENT = {"name": "x", "value": "{{steps.ask.outputs.parameters.go}}"}


def test_a_suspended_step_without_a_duration_waits_for_a_value_and_outputs_it() -> None:
    s = advance_to_approval(make_approval())
    s.advance(9e9)
    (node,) = suspend.list_suspended_nodes(s.status)
    (next_action,) = s.advance(9e9, [NodeResumed(node["id"], {"go": "YES"})])
    assert isinstance(next_action, StartPod)
    assert s.nodes[next_action.id]["inputs"]["parameters"][0]["value"] == "YES"
    assert node["outputs"] == {"parameters": [{"name": "go", "value": "YES"}]}
    assert node["type"] == "Suspend"
    assert node["phase"] == "Succeeded"
    assert node.get("message") is None


def test_the_default_of_the_output_or_input_replaces_a_missing_value() -> None:
    of_input = make_approval() | {"inputs": {"parameters": [{"name": "go", "default": "NO"}]}}
    for template in (make_approval("NO"), of_input):
        s = advance_to_approval(template)
        (node,) = suspend.list_suspended_nodes(s.status)
        asked = suspend.select_resume_values(s.status, {})
        (next_action,) = s.advance(
            1001.0, [NodeResumed(id, values) for id, values in asked.items()]
        )
        assert isinstance(next_action, StartPod)
        assert s.nodes[next_action.id]["inputs"]["parameters"][0]["value"] == "NO"
        assert "resume w -p go=NO" in suspend.make_resume_hint(
            "w", {**node, "outputs": {"parameters": [UNANSWERED_OUTPUT]}}
        )


UNANSWERED_OUTPUT = {"name": "go", "valueFrom": {"supplied": {}, "default": "NO"}}


def test_a_missing_or_unexpected_value_resumes_no_step() -> None:
    s = advance_to_approval(make_approval())
    with pytest.raises(ConfigError, match=r"waits for the value of 'go': pass it with -p go=VALUE"):
        suspend.select_resume_values(s.status, {})
    with pytest.raises(
        ConfigError, match=r"no step waits for the value of 'goo'. Did you mean \"go\""
    ):
        suspend.select_resume_values(s.status, {"goo": "x"})


def test_a_suspended_step_that_expires_without_a_value_ends_in_an_error_as_on_argo() -> None:
    s = advance_to_approval(make_approval() | {"suspend": {"duration": "5s"}})
    s.advance(1005.0)
    ask = next(node for node in s.nodes.values() if node["type"] == "Suspend")
    message = "raw output parameter 'go' has not been set and does not have a default value"
    assert ask["phase"] == "Error"
    assert ask["message"] == message
    assert s.status["phase"] == "Failed"


def test_a_value_with_a_global_name_is_an_output_of_the_workflow() -> None:
    s = advance_to_approval(make_approval(globalName="answer"))
    (node,) = suspend.list_suspended_nodes(s.status)
    s.advance(1001.0, [NodeResumed(node["id"], {"go": "YES"})])
    assert s.status["outputs"]["parameters"] == [{"name": "answer", "value": "YES"}]


def test_a_second_value_for_a_suspended_step_is_ignored() -> None:
    s = advance_to_approval(make_approval())
    (node,) = suspend.list_suspended_nodes(s.status)
    s.advance(
        1001.0, [NodeResumed(node["id"], {"go": "YES"}), NodeResumed(node["id"], {"go": "NO"})]
    )
    assert s.advance(1002.0, [NodeResumed(node["id"], {"go": "NO"}), NodeResumed("gone", {})]) == []
    assert node["outputs"]["parameters"][0]["value"] == "YES"


def test_an_initially_suspended_workflow_starts_no_pod() -> None:
    s = make_scheduler(make_leaf("main"), suspend=True)
    assert s.advance(1000.0) == []
    assert s.status["phase"] == "Running"
    assert s.nodes == {}
    s.spec.pop("suspend")
    assert len(s.advance(1001.0)) == 1


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., subprocess.Popen[str]]:
    """Start `rekindle ARGUMENTS` in a new directory, without a terminal as stdin."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}

    def started(*arguments: str) -> subprocess.Popen[str]:
        pipes: dict[str, Any] = {
            "stdin": subprocess.DEVNULL,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.STDOUT,
        }
        command = [*REKINDLE, *arguments]
        return subprocess.Popen(command, cwd=tmp_path, env=environment, text=True, **pipes)

    return started


def read_resume_hint(process: subprocess.Popen[str]) -> str:
    """Return the resume hints that a run prints."""
    assert process.stdout
    return next(line for line in process.stdout if " waits: " in line or "is suspended: " in line)


def write_manifest(path: Path, **spec: Any) -> str:
    ask = {"name": "ask", "template": "one"}
    say = {"name": "say", "template": "say", "arguments": {"parameters": [ANSWER_ARGUMENT]}}
    echo = {"image": "busybox", "command": ["echo"], "args": ["said {{inputs.parameters.x}}"]}
    templates = [{"name": "main", "steps": [[ask], [say]]}, make_approval()]
    templates.append({"name": "say", "inputs": {"parameters": [{"name": "x"}]}, "container": echo})
    (path / "w.json").write_text(json.dumps(make_workflow(*templates, **spec)))
    return "w.json"


@pytest.mark.slow
def test_a_resumed_runner_waits_for_a_value_from_another_terminal(
    tmp_path: Path, run: Callable[..., subprocess.Popen[str]]
) -> None:
    first_result = run("run", "--manifest", write_manifest(tmp_path))
    assert "`rekindle resume w -p go=VALUE`" in read_resume_hint(first_result)
    first_result.send_signal(signal.SIGKILL)
    first_result.wait()
    second_result = run("resume", "w")
    read_resume_hint(second_result)
    switches = psutil.Process(second_result.pid).num_ctx_switches
    switches_before = switches().voluntary
    until(
        "the runner to look again and again",
        lambda: second_result.poll() is None and switches().voluntary > switches_before + 3,
    )
    output, _ = run("resume", "w", "-p", "go=YES").communicate(timeout=60)
    assert output == "w resumed\n"
    assert second_result.wait(60) == 0, second_result.stdout and second_result.stdout.read()
    assert "said YES" in "".join(
        log.read_text() for log in (tmp_path / ".rekindle/runs/w/logs").glob("*.log")
    )


@pytest.mark.slow
def test_values_sent_after_the_death_of_a_runner_reach_the_next_runner(
    tmp_path: Path, run: Callable[..., subprocess.Popen[str]]
) -> None:
    first_result = run("run", "--manifest", write_manifest(tmp_path))
    read_resume_hint(first_result)
    first_result.send_signal(signal.SIGKILL)
    first_result.wait()
    assert not resume_suspended("w", {"go": "later"}, tmp_path / ".rekindle")
    second_result = run("resume", "w", "-o", "json")
    out, _ = second_result.communicate(timeout=60)
    assert second_result.returncode == 0, out
    result = json.loads(next(line for line in out.splitlines() if line.startswith("{")))
    assert result["status"]["nodes"]["w"]["phase"] == "Succeeded"
    assert not RunFiles(tmp_path / ".rekindle", "w").resume_request.exists()


def test_a_suspended_workflow_can_be_resumed_and_a_running_one_cannot(
    tmp_path: Path, run: Callable[..., subprocess.Popen[str]]
) -> None:
    sleep = {"image": "busybox", "command": ["sleep"], "args": ["30"]}
    only = [{"name": "main", "container": sleep}]
    first_result = run("run", "--manifest", write_manifest(tmp_path, suspend=True, templates=only))
    read_resume_hint(first_result)
    home = tmp_path / ".rekindle"
    until("the run to begin", lambda: RunFiles(home, "w").load()[0]["phase"])
    assert resume_suspended("w", {}, home)
    until("its first node", lambda: RunFiles(home, "w").load()[0]["nodes"])
    with pytest.raises(Busy, match="only one process may"):
        resume_suspended("w", {}, home)
    first_result.send_signal(signal.SIGTERM)
    first_result.wait(60)
