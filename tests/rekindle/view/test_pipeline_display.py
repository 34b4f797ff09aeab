"""Tests of a run in the foreground whose terminal, streams or disk fail, or that must be
stopped."""

import contextlib
import fcntl
import json
import os
import pty
import signal
import subprocess
import tempfile
import termios
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.ports import free_port
from tests.rekindle.cli.processes import (
    REKINDLE,
    make_shell_workflow,
    run_rekindle,
    wait_until_started,
    write_manifest,
)
from tests.waiting import until


def run_shell(line: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a shell command line, where $REKINDLE is the command `rekindle`."""
    environ = {**os.environ, "REKINDLE": REKINDLE, **environment}
    return subprocess.run(
        ["bash", "-o", "pipefail", "-c", line],
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        timeout=60,
    )


def find_survivors(pods: list[psutil.Process]) -> list[psutil.Process]:
    """Return the pods that do not end; killed processes need time to end on a busy machine."""
    with contextlib.suppress(AssertionError):
        until("the pods to end", lambda: not any(map(is_alive, pods)))
    return [pod for pod in pods if is_alive(pod)]


def is_alive(pod: psutil.Process) -> bool:
    try:
        return pod.is_running() and pod.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.slow
@pytest.mark.parametrize(
    "signal_number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_a_second_signal_ends_a_busy_run(tmp_path: Path, signal_number: int):
    manifest = make_shell_workflow(("long", "echo begun; sleep 100 & wait"))
    tasks = [{"name": "a", "template": "twice"}, {"name": "b", "template": "twice"}]
    manifest["spec"]["templates"].append({"name": "twice", "dag": {"tasks": tasks}})
    manifest["spec"]["templates"][0]["dag"]["tasks"] = [
        {"name": "first", "template": "long"},
        {"name": "never", "template": "twice", "depends": "first"},
    ]
    # the daemon continues while the runner is busy
    manifest["spec"]["templates"][1]["daemon"] = True
    file = write_manifest(tmp_path / "w.yaml", manifest)

    process = subprocess.Popen(
        [REKINDLE, "run", "--manifest", file],
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )

    pods = wait_until_started(process, tmp_path)
    wait_until_busy(process, 0.5)
    process.send_signal(signal_number)
    # the second signal is sent at least half a second later
    wait_until_busy(process, 1)
    process.send_signal(signal_number)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + signal_number, output
    assert "Traceback" not in output, output
    assert output.splitlines()[-1] == "resume  rekindle resume four"
    assert find_survivors(pods) == []


def wait_until_busy(process: subprocess.Popen[str], seconds: float) -> None:
    """Wait until the process has used the given additional CPU time; the process must not end."""
    times = psutil.Process(process.pid).cpu_times
    start = times().user
    until(
        "the runner to compute", lambda: process.poll() is None and times().user > start + seconds
    )


def run_on_terminal(
    tmp_path: Path, script: str, hangup: Any
) -> tuple[subprocess.Popen[bytes], int]:
    """Start a run on its own terminal, and return the process of the run and the other end of the
    terminal."""
    file = write_manifest(tmp_path / "w.yaml", make_shell_workflow(("long", script)))
    terminal, child = pty.openpty()

    def take_terminal() -> None:
        os.setsid()
        fcntl.ioctl(child, termios.TIOCSCTTY, 0)
        signal.signal(signal.SIGHUP, hangup)

    process = subprocess.Popen(
        [REKINDLE, "run", "--manifest", file],
        cwd=tmp_path,
        stdin=child,
        stdout=child,
        stderr=child,
        preexec_fn=take_terminal,
        env={**os.environ, "TERM": "xterm"},
    )

    os.close(child)
    return process, terminal


def test_a_closed_terminal_ends_all_processes_of_a_run(tmp_path: Path):
    process, terminal = run_on_terminal(tmp_path, "echo begun; sleep 100 & wait", signal.SIG_DFL)
    pods = wait_until_started(process, tmp_path)
    os.close(terminal)
    assert process.wait(timeout=60) == 129
    assert find_survivors(pods) == []
    assert run_rekindle("status", cwd=tmp_path).stdout.splitlines()[1].split()[:2] == [
        "four",
        "Interrupted",
    ]
    logs = run_rekindle("logs", "-f", cwd=tmp_path)
    assert logs.returncode == 0
    assert "begun" in logs.stdout

    assert (
        logs.stderr
        == "four was interrupted, so its logs are incomplete: `rekindle resume four` continues"
        " it.\n"
    )


@pytest.mark.slow
def test_a_run_under_nohup_survives_a_closed_terminal(tmp_path: Path):
    # the shared file is not in /tmp, because each pod has its own /tmp
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory_folder:
        script = (
            f"echo begun; for i in $(seq 600); do test -e {memory_folder}/closed && exit 0; sleep 0.1;"
            " done; exit 1"
        )
        process, terminal = run_on_terminal(tmp_path, script, signal.SIG_IGN)
        wait_until_started(process, tmp_path)
        os.close(terminal)
        logs = run_rekindle("logs", cwd=tmp_path)
        assert logs.stderr == "four is running: `rekindle logs four -f` follows its logs.\n"
        Path(memory_folder, "closed").touch()
        assert process.wait(timeout=60) == 0


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize(
    "redirection", ["| head -1", ">&-", ">/dev/full", "2>&-", "2>/dev/full", "<&- >&- 2>&-"]
)
@pytest.mark.parametrize("output", ["text", "json"])
def test_a_run_continues_if_its_output_cannot_be_written(
    tmp_path: Path, redirection: str, output: str
):
    write_manifest(
        tmp_path / "w.yaml",
        make_shell_workflow(("first", "true"), ("second", "sleep 0.2"), ("third", "true")),
    )
    result = run_shell(f'"$REKINDLE" run --manifest w.yaml -o {output} {redirection}', tmp_path)
    # True if the requested output is lost
    lost = output == "json" and "/dev/full" in redirection and "2>" not in redirection
    assert result.returncode == int(lost), result.stderr
    assert "Traceback" not in result.stderr, result.stderr
    assert run_rekindle("status", cwd=tmp_path).stdout.splitlines()[1].split()[:2] == [
        "four",
        "Succeeded",
    ]

    if output == "json" and "2>" in redirection and ">&- 2" not in redirection:
        assert json.loads(result.stdout)["phase"] == "Succeeded"


@pytest.mark.slow
def test_a_full_stdout_is_not_reported_as_a_full_home(tmp_path: Path):
    result = run_shell('"$REKINDLE" status > /dev/full', tmp_path)
    assert result.returncode == 1
    assert "stdout cannot be written" in result.stderr
    assert "REKINDLE_HOME" not in result.stderr


def test_characters_that_stdout_cannot_encode_are_escaped(tmp_path: Path):
    file = write_manifest(tmp_path / "w.yaml", make_shell_workflow(("a", "echo h\u00f6her")))
    assert run_rekindle("run", "--manifest", file, cwd=tmp_path).returncode == 0
    result = run_shell('"$REKINDLE" logs', tmp_path, PYTHONIOENCODING="ascii")
    assert result.returncode == 0, result.stderr
    assert result.stdout.endswith("| h\\xf6her\n"), result.stderr


def test_a_full_disk_is_reported_and_resume_frees_space(tmp_path: Path):
    if run_shell("unshare -rm mount -t tmpfs tmpfs /mnt", tmp_path).returncode:
        pytest.skip("needs mounts")

    fills = "test -e /again/x || { touch /again/x; cat /dev/zero > /tmp/big; }"
    manifest = make_shell_workflow(
        ("fill", "seq 5000 > {{outputs.parameters.long.path}};" + fills),
        ("bye", "true"),
        onExit="bye",
    )

    manifest["spec"]["templates"][0]["dag"]["tasks"].pop()
    manifest["spec"]["volumeClaimTemplates"] = [{"metadata": {"name": "again"}, "spec": {}}]
    manifest["spec"]["templates"][1]["script"]["volumeMounts"] = [
        {"name": "again", "mountPath": "/again"}
    ]
    # the output is so long that the journal needs space for it
    manifest["spec"]["templates"][1]["outputs"] = {
        "parameters": [{"name": "long", "valueFrom": {"path": "/tmp/long"}}]
    }
    write_manifest(tmp_path / "w.yaml", manifest)
    (tmp_path / "home").mkdir()
    commands = '"$REKINDLE" run --manifest w.yaml || { "$REKINDLE" status; "$REKINDLE" resume; }'
    line = f"unshare -rm bash -c 'mount -t tmpfs -o size=4m tmpfs home && {commands}'"
    result = run_shell(line, tmp_path, REKINDLE_HOME="home")
    assert "cause   no space is left" in result.stderr
    assert "pods/" in result.stderr
    assert result.returncode == 0, result.stdout + result.stderr
    assert "onExit succeeded" in result.stdout, result.stdout + result.stderr


@pytest.mark.slow
def test_a_step_is_not_retried_while_the_disk_is_full(tmp_path: Path):
    if run_shell("unshare -rm mount -t tmpfs tmpfs /mnt", tmp_path).returncode:
        pytest.skip("needs mounts")

    fills = "echo tried; head -c 8000000 /dev/zero > /tmp/big || exit 1"
    manifest = make_shell_workflow(("fill", fills))
    manifest["spec"]["templates"][1]["retryStrategy"] = {"limit": 3}
    write_manifest(tmp_path / "w.yaml", manifest)
    (tmp_path / "home").mkdir()
    commands = (
        '"$REKINDLE" run --manifest w.yaml || { mount -o remount,size=20m tmpfs home; "$REKINDLE"'
        " resume; }"
    )
    line = (
        f"unshare -rm bash -c 'mount -t tmpfs -o size=4m tmpfs home && {{ {commands}; }} && cat"
        " home/runs/*/logs/*'"
    )
    result = run_shell(line, tmp_path, REKINDLE_HOME="home")
    assert (
        f"cause   no space is left for the state of the run in {tmp_path}/home/runs/"
        in result.stderr
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("fill running") == 2, result.stdout + result.stderr
    assert "fill(1)" not in result.stdout + result.stderr


NO_NAMESPACES = "for each in mnt user; do echo 0 > /proc/sys/user/max_${each}_namespaces; done"


@pytest.mark.slow
def test_without_mount_namespaces_path_tags_work_and_literal_paths_are_refused(tmp_path: Path):
    if run_shell(f"unshare -rm bash -c '{NO_NAMESPACES}'", tmp_path).returncode:
        pytest.skip("needs a kernel that can forbid namespaces")

    outputs = {"parameters": [{"name": "x", "valueFrom": {"path": "/tmp/x"}}]}
    path = "{{outputs.parameters.x.path}}"
    for file, source in ("moved.yaml", f"echo {path} > {path}"), ("spelt.yaml", "echo 1 > /tmp/x"):
        manifest = make_shell_workflow(("make", source))
        manifest["spec"]["templates"][1]["outputs"] = outputs
        write_manifest(tmp_path / file, manifest)

    line = f"unshare -rm bash -c '{NO_NAMESPACES}; \"$REKINDLE\" run --manifest moved.yaml -o json'"
    result = run_shell(line, tmp_path)
    assert result.returncode == 0, result.stderr
    assert "pods are processes of this machine with your rights" in result.stderr, result.stderr
    nodes = json.loads(result.stdout)["status"]["nodes"].values()
    parameters = next(node["outputs"]["parameters"] for node in nodes if node.get("outputs"))
    assert parameters[0]["value"].startswith(str(tmp_path))
    assert parameters[0]["value"].endswith("/tmp/x")
    result = run_shell(line.replace("moved", "spelt"), tmp_path)
    assert result.returncode == 2, result.stderr
    assert "contains the path /tmp/x" in result.stderr, result.stderr


# tests/rekindle/test_user_functions.py tests the message and the exit code, test_outcomes.py the
# retry strategy
@pytest.mark.slow
def test_an_exception_in_user_code_is_reported_with_its_line_and_not_retried(
    tmp_path: Path, s3_environment: dict[str, str], mlflow_server: str
):
    assert run_shell('"$REKINDLE" init shop', tmp_path).returncode == 0
    module = tmp_path / "shop/steps/shop.py"
    module.write_text(
        module.read_text().replace("    import numpy", '    {}["kwh"]\n    import numpy', 1)
    )
    line = 1 + module.read_text()[: module.read_text().index('{}["kwh"]')].count("\n")
    config = tmp_path / "shop/configs/shop.yaml"
    config.write_text(config.read_text().replace("port: 8080", f"port: {free_port()}"))
    command = (
        '"$REKINDLE" run configs/shop.yaml --yes -o json; code=$?; "$REKINDLE" down >&2; exit $code'
    )
    ended = run_shell(command, tmp_path / "shop", **s3_environment)
    error = f"{module}:{line}: KeyError: 'kwh'."
    reason = f"main: Error (exit code 70): {error}"
    lines = [
        text[9:] for text in ended.stderr.splitlines() if " prepare" in text and " failed" in text
    ]
    assert [text.partition(" failed")[0] for text in lines] == [
        "prepare(0)",
        "prepare",
    ], ended.stderr
    assert all(text.endswith(reason) for text in lines), "each attempt is reported at once"
    prepare = next(step for step in json.loads(ended.stdout)["steps"] if step["name"] == "prepare")
    assert ended.returncode == 1
    assert prepare["message"] == reason
    assert f"error: {error}" in ended.stderr
    assert "Traceback" not in ended.stderr
