"""A run in the foreground, where its terminal, its streams or its disk fail it, or it does not come to an end."""

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
from tests.rekindle.cli.test_cli import REKINDLE, rekindle, started, workflow, written
from tests.waiting import until


def typed(line: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """What a shell makes of `line`, in which $REKINDLE is the command."""
    environ = {**os.environ, "REKINDLE": REKINDLE, **environment}
    return subprocess.run(
        ["bash", "-o", "pipefail", "-c", line], cwd=folder, env=environ, capture_output=True, text=True, timeout=60
    )


def left(pods: list[psutil.Process]) -> list[psutil.Process]:
    """Those that do not go: what is killed takes its time on a busy machine."""
    with contextlib.suppress(AssertionError):
        until("the pods to end", lambda: not any(map(lives, pods)))
    return [pod for pod in pods if lives(pod)]


def lives(pod: psutil.Process) -> bool:
    try:
        return pod.is_running() and pod.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_second_signal_ends_a_run_that_never_comes_to_wait(tmp_path: Path, number: int):
    manifest = workflow(("long", "echo begun; sleep 100 & wait"))
    tasks = [{"name": "a", "template": "twice"}, {"name": "b", "template": "twice"}]
    manifest["spec"]["templates"].append({"name": "twice", "dag": {"tasks": tasks}})
    manifest["spec"]["templates"][0]["dag"]["tasks"] = [
        {"name": "first", "template": "long"},
        {"name": "never", "template": "twice", "depends": "first"},
    ]
    manifest["spec"]["templates"][1]["daemon"] = True  # it runs on while the runner is busy
    file = written(tmp_path / "w.yaml", manifest)
    process = subprocess.Popen([REKINDLE, "run", "--manifest", file], cwd=tmp_path, stdin=subprocess.DEVNULL,
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)  # fmt: skip
    pods = started(process, tmp_path)
    until_busy(process, 0.5)
    process.send_signal(number)
    until_busy(process, 1)  # so more than half a second has passed
    process.send_signal(number)
    told, _ = process.communicate(timeout=60)
    assert (process.returncode, "Traceback" in told) == (128 + number, False), told
    assert told.splitlines()[-1] == "resume  rekindle resume four"
    assert left(pods) == []


def until_busy(process: subprocess.Popen[str], seconds: float) -> None:
    """Wait until the process, which must not end, has computed for that long."""
    times = psutil.Process(process.pid).cpu_times
    before = times().user
    until("the runner to compute", lambda: process.poll() is None and times().user > before + seconds)


def on_a_terminal(tmp_path: Path, script: str, hangup: Any) -> tuple[subprocess.Popen[bytes], int]:
    """A run whose terminal it is, and the other end of that."""
    file = written(tmp_path / "w.yaml", workflow(("long", script)))
    ours, theirs = pty.openpty()

    def alone() -> None:
        os.setsid()
        fcntl.ioctl(theirs, termios.TIOCSCTTY, 0)
        signal.signal(signal.SIGHUP, hangup)

    process = subprocess.Popen([REKINDLE, "run", "--manifest", file], cwd=tmp_path, stdin=theirs, stdout=theirs,
                               stderr=theirs, preexec_fn=alone, env={**os.environ, "TERM": "xterm"})  # fmt: skip
    os.close(theirs)
    return process, ours


def test_a_closed_terminal_leaves_nothing_running(tmp_path: Path):
    process, terminal = on_a_terminal(tmp_path, "echo begun; sleep 100 & wait", signal.SIG_DFL)
    pods = started(process, tmp_path)
    os.close(terminal)
    assert process.wait(timeout=60) == 129
    assert left(pods) == []
    assert rekindle("status", cwd=tmp_path).stdout.splitlines()[1].split()[:2] == ["four", "Interrupted"]


def test_under_nohup_a_closed_terminal_ends_nothing(tmp_path: Path):
    with tempfile.TemporaryDirectory(dir="/dev/shm") as shared:  # a pod has a /tmp of its own
        script = f"echo begun; for i in $(seq 600); do test -e {shared}/closed && exit 0; sleep 0.1; done; exit 1"
        process, terminal = on_a_terminal(tmp_path, script, signal.SIG_IGN)
        started(process, tmp_path)
        os.close(terminal)
        Path(shared, "closed").touch()
        assert process.wait(timeout=60) == 0


@pytest.mark.parametrize("where", ["| head -1", ">&-", ">/dev/full", "2>&-", "2>/dev/full", "<&- >&- 2>&-"])
@pytest.mark.parametrize("output", ["text", "json"])
def test_a_run_goes_on_though_nobody_can_be_told_of_it(tmp_path: Path, where: str, output: str):
    written(tmp_path / "w.yaml", workflow(("first", "true"), ("second", "sleep 0.2"), ("third", "true")))
    done = typed(f'"$REKINDLE" run --manifest w.yaml -o {output} {where}', tmp_path)
    lost = output == "json" and "/dev/full" in where and "2>" not in where  # the object is what was asked for
    assert (done.returncode, "Traceback" in done.stderr) == (int(lost), False), done.stderr
    assert rekindle("status", cwd=tmp_path).stdout.splitlines()[1].split()[:2] == ["four", "Succeeded"]
    if output == "json" and "2>" in where and ">&- 2" not in where:
        assert json.loads(done.stdout)["phase"] == "Succeeded"


def test_a_full_stdout_is_not_taken_for_a_full_home(tmp_path: Path):
    done = typed('"$REKINDLE" status > /dev/full', tmp_path)
    assert (done.returncode, "stdout cannot be written" in done.stderr) == (1, True)
    assert "REKINDLE_HOME" not in done.stderr


def test_a_log_that_stdout_cannot_spell_is_printed_all_the_same(tmp_path: Path):
    file = written(tmp_path / "w.yaml", workflow(("a", "echo h\u00f6her")))
    assert rekindle("run", "--manifest", file, cwd=tmp_path).returncode == 0
    done = typed('"$REKINDLE" logs', tmp_path, PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stdout.endswith("| h\\xf6her\n")) == (0, True), done.stderr


def test_a_disk_that_a_step_filled_is_the_cause_and_resume_makes_room(tmp_path: Path):
    if typed("unshare -rm mount -t tmpfs tmpfs /mnt", tmp_path).returncode:
        pytest.skip("needs mounts")
    fills = "test -e /again/x || { touch /again/x; cat /dev/zero > /tmp/big; }"
    manifest = workflow(("fill", "seq 5000 > {{outputs.parameters.long.path}};" + fills), ("bye", "true"), onExit="bye")
    manifest["spec"]["templates"][0]["dag"]["tasks"].pop()
    manifest["spec"]["volumeClaimTemplates"] = [{"metadata": {"name": "again"}, "spec": {}}]
    manifest["spec"]["templates"][1]["script"]["volumeMounts"] = [{"name": "again", "mountPath": "/again"}]
    manifest["spec"]["templates"][1]["outputs"] = {  # the journal needs room for it
        "parameters": [{"name": "long", "valueFrom": {"path": "/tmp/long"}}]
    }
    written(tmp_path / "w.yaml", manifest)
    (tmp_path / "home").mkdir()
    both = '"$REKINDLE" run --manifest w.yaml || { "$REKINDLE" status; "$REKINDLE" resume; }'
    line = f"unshare -rm bash -c 'mount -t tmpfs -o size=4m tmpfs home && {both}'"
    done = typed(line, tmp_path, REKINDLE_HOME="home")
    assert "cause   no space is left" in done.stderr and "pods/" in done.stderr
    assert (done.returncode, "onExit succeeded" in done.stdout) == (0, True), done.stdout + done.stderr


def test_a_step_that_fails_of_a_full_disk_is_not_tried_again_before_there_is_room(tmp_path: Path):
    if typed("unshare -rm mount -t tmpfs tmpfs /mnt", tmp_path).returncode:
        pytest.skip("needs mounts")
    fills = "echo tried; head -c 8000000 /dev/zero > /tmp/big || exit 1"
    manifest = workflow(("fill", fills))
    manifest["spec"]["templates"][1]["retryStrategy"] = {"limit": 3}
    written(tmp_path / "w.yaml", manifest)
    (tmp_path / "home").mkdir()
    both = '"$REKINDLE" run --manifest w.yaml || { mount -o remount,size=20m tmpfs home; "$REKINDLE" resume; }'
    line = f"unshare -rm bash -c 'mount -t tmpfs -o size=4m tmpfs home && {{ {both}; }} && cat home/runs/*/logs/*'"
    done = typed(line, tmp_path, REKINDLE_HOME="home")
    assert f"cause   no space is left for the state of the run in {tmp_path}/home/runs/" in done.stderr
    assert done.returncode == 0 and done.stdout.count("fill running") == 2, done.stdout + done.stderr
    assert "fill(1)" not in done.stdout + done.stderr


NO_NAMESPACES = "for each in mnt user; do echo 0 > /proc/sys/user/max_${each}_namespaces; done"


def test_where_pods_cannot_have_a_root_placeholders_keep_them_apart_and_paths_are_refused(tmp_path: Path):
    if typed(f"unshare -rm bash -c '{NO_NAMESPACES}'", tmp_path).returncode:
        pytest.skip("needs a kernel that can take away namespaces")
    out, path = {"parameters": [{"name": "x", "valueFrom": {"path": "/tmp/x"}}]}, "{{outputs.parameters.x.path}}"
    for file, source in ("moved.yaml", f"echo {path} > {path}"), ("spelt.yaml", "echo 1 > /tmp/x"):
        manifest = workflow(("make", source))
        manifest["spec"]["templates"][1]["outputs"] = out
        written(tmp_path / file, manifest)
    line = f"unshare -rm bash -c '{NO_NAMESPACES}; \"$REKINDLE\" run --manifest moved.yaml -o json'"
    done = typed(line, tmp_path)
    assert done.returncode == 0 and "pods are processes of this machine with your rights" in done.stderr, done.stderr
    nodes = json.loads(done.stdout)["status"]["nodes"].values()
    made = next(node["outputs"]["parameters"] for node in nodes if node.get("outputs"))
    assert made[0]["value"].startswith(str(tmp_path)) and made[0]["value"].endswith("/tmp/x")
    done = typed(line.replace("moved", "spelt"), tmp_path)
    assert (done.returncode, "contains the path /tmp/x" in done.stderr) == (2, True), done.stderr


def test_an_exception_in_a_function_of_the_user_is_told_at_once_with_its_line_and_not_tried_again(
    tmp_path: Path, s3_environment: dict[str, str], mlflow_server: str
):
    assert typed('"$REKINDLE" init shop', tmp_path).returncode == 0
    module = tmp_path / "shop/steps/shop.py"
    module.write_text(module.read_text().replace("    import numpy", '    {}["kwh"]\n    import numpy', 1))
    line = 1 + module.read_text()[: module.read_text().index('{}["kwh"]')].count("\n")
    config = tmp_path / "shop/configs/shop.yaml"
    config.write_text(config.read_text().replace("port: 8080", f"port: {free_port()}"))
    command = '"$REKINDLE" run configs/shop.yaml --yes -o json; code=$?; "$REKINDLE" down >&2; exit $code'
    ended = typed(command, tmp_path / "shop", **s3_environment)
    error = f"{module}:{line}: KeyError: 'kwh'."
    reason = f"main: Error (exit code 70): {error}"
    told = [text[9:] for text in ended.stderr.splitlines() if " prepare" in text and " failed" in text]
    assert [text.partition(" failed")[0] for text in told] == ["prepare(0)", "prepare"], ended.stderr
    assert all(text.endswith(reason) for text in told), "the attempt is told before it is known whether it is the last"
    prepare = next(step for step in json.loads(ended.stdout)["steps"] if step["name"] == "prepare")
    assert (ended.returncode, prepare["message"]) == (1, reason)
    assert f"error: {error}" in ended.stderr
    assert "Traceback" not in ended.stderr
