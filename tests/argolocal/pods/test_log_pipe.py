"""Tests of container logs: every line must reach the log file and the result."""

import errno
import json
import os
import shlex
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from argolocal.engine.nodes import StartPod
from argolocal.pods import filesystem
from argolocal.pods.kinds.sidecars import Sidecars
from argolocal.pods.log_pipe import LogPipe
from argolocal.pods.pod_run import PodRun
from argolocal.pods.process import ContainerRun, start_container
from argolocal.runner.cluster import LocalCluster
from tests.argolocal.running import execute_manifest
from tests.builders import make_shell_container, make_workflow
from tests.waiting import until


def run_script(
    source: str, log: Path, copy: Path | None = None, folder: Path | None = None
) -> LogPipe:
    """Run a script and return the log pipe after the script has ended."""
    with LogPipe(log, copy) as log_pipe:
        process = subprocess.Popen(
            ["sh", "-c", source], stdout=log_pipe.out, stderr=log_pipe.err, cwd=folder
        )
    process.wait()
    log_pipe.finish()
    return log_pipe


@pytest.mark.parametrize("name", ["stdout", "stderr", "fd/1", "fd/2"])
def test_a_container_that_opens_stdout_again_does_not_truncate_the_log(
    tmp_path: Path, name: str
) -> None:
    run_script(
        f"echo one; echo two | tee /dev/{name}; echo three > /dev/{name}; echo four",
        log := tmp_path / "log",
    )
    assert sorted(log.read_text().split()) == ["four", "one", "three", "two", "two"]


def test_a_result_is_the_whole_stdout(tmp_path: Path) -> None:
    source = "echo one; echo two > /dev/stdout; echo no >&2; echo three | tee /dev/stderr"
    script = {"image": "busybox", "command": ["sh"], "source": source}
    say = {"name": "say", "template": "say"}

    use = {
        "name": "use",
        "template": "use",
        "arguments": {"parameters": [{"name": "x", "value": "{{steps.say.outputs.result}}"}]},
    }

    templates = [
        {"name": "main", "steps": [[say], [use]]},
        {"name": "say", "script": script},
        {"name": "use", "inputs": {"parameters": [{"name": "x"}]}, "suspend": {"duration": "0"}},
    ]

    status = execute_manifest(make_workflow(*templates), {}, LocalCluster(tmp_path))
    nodes = {node["name"]: node for node in status["nodes"].values()}
    assert nodes["w[0].say"]["outputs"]["result"] == "one\ntwo\nthree"
    (log,) = (tmp_path / "runs/w/logs").iterdir()
    assert sorted(log.read_text().split()) == ["no", "one", "three", "three", "two"]


def test_output_just_before_the_exit_is_completely_logged(tmp_path: Path) -> None:
    log = tmp_path / "log"
    copy = tmp_path / "copy"
    code = "import os; [os.write(n, bytes([48 + n]) * 65536) for _ in range(64) for n in (1, 2)]"
    source = shlex.join([sys.executable, "-c", code])
    for _ in range(5):
        run_script(source, log, copy)
    assert log.stat().st_size == 5 << 23
    assert copy.stat().st_size == 5 << 22
    assert log.read_bytes().count(b"2") == 5 << 22
    assert set(copy.read_bytes()) == {ord("1")}


@pytest.mark.slow
def test_orphan_processes_of_a_container_do_not_delay_its_end(tmp_path: Path) -> None:
    run_script(
        "echo begun; setsid sh -c 'echo $$ > silent; exec sleep 1000' & setsid sh -c 'echo $$ >"
        " loud; exec yes' & until [ -s silent ] && [ -s loud ]; do sleep 0.01; done",
        log := tmp_path / "log",
        folder=tmp_path,
    )

    log_bytes = log.stat().st_size
    assert log.read_bytes().startswith(b"begun\n")
    silent, loud = (
        psutil.Process(int((tmp_path / name).read_text())) for name in ("silent", "loud")
    )
    assert silent.is_running()
    silent.kill()
    until("the end of what goes on to say something", lambda: not loud.is_running())
    assert log.stat().st_size == log_bytes


def test_a_log_write_error_is_reported_and_stops_no_container(tmp_path: Path) -> None:
    pipe = run_script(f"head -c 1000000 /dev/zero && touch {tmp_path}/done", Path("/dev/full"))
    assert pipe.error
    assert pipe.error.errno == errno.ENOSPC
    assert (tmp_path / "done").exists()


@pytest.mark.slow
def test_more_pods_can_run_than_the_soft_limit_of_open_files_allows(tmp_path: Path) -> None:
    pod_template = {"name": "one", "container": {"image": "busybox", "command": ["sleep", "1"]}}
    main_template = {
        "name": "main",
        "steps": [[{"name": "each", "template": "one", "withSequence": {"count": "60"}}]],
    }
    (tmp_path / "w.json").write_text(json.dumps(make_workflow(main_template, pod_template)))
    run = (
        f"ulimit -S -n 128; {shlex.quote(str(Path(sys.executable).with_name('rekindle')))} run"
        " --manifest w.json"
    )
    environment = {**os.environ, "REKINDLE_HOME": str(tmp_path / "home")}
    result = subprocess.run(
        ["bash", "-c", run], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr[-2000:]


def test_all_threads_that_end_a_pipe_see_the_complete_log(tmp_path: Path) -> None:
    """Two threads end the same sidecar: the thread that collects its log, and the interrupted main
    thread."""
    for number in range(20):
        with LogPipe(log := tmp_path / str(number)) as log_pipe:
            process = subprocess.Popen(
                ["head", "-c", "60000", "/dev/zero"], stdout=log_pipe.out, stderr=log_pipe.err
            )

        process.wait()
        sizes: list[int] = []

        def finish(log_pipe: LogPipe = log_pipe, log: Path = log, sizes: list[int] = sizes) -> None:
            log_pipe.finish()
            sizes.append(log.stat().st_size)

        threads = [threading.Thread(target=finish) for _ in range(4)]
        for thread in threads:
            thread.start()

        for thread in threads:
            thread.join()

        assert sizes == [60000] * 4


@pytest.mark.skipif(not filesystem.supports_namespaces(), reason="needs mount namespaces")
def test_a_log_write_error_of_a_sidecar_is_reported(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/w.beside.log").symlink_to("/dev/full")

    other_container = make_shell_container("echo hi; exec sleep 9", name="beside")

    template = {
        "name": "main",
        "container": {"image": "busybox", "command": ["true"]},
        "sidecars": [other_container],
    }

    start = StartPod("w", "w", {**template, "inputs": {"parameters": [], "artifacts": []}}, False)
    pod = PodRun(start, tmp_path / "w", tmp_path / "logs/w.log")
    run = ContainerRun("w", {"name": "main", **template["container"]}, pod.root, pod.log)
    cluster = LocalCluster(tmp_path)
    pod.sidecars = Sidecars(template, run, cluster)
    pod.sidecars.start_sidecars()
    pod.process = start_container(run, cluster)
    pod.process.wait()
    log_pipe = pod.sidecars.running["beside"].log_pipe
    until("the sidecar's log to fail", lambda: log_pipe.error)

    with pytest.raises(OSError, match="No space left"):
        pod.collect("w", cluster.store)


@pytest.mark.slow
@pytest.mark.skipif(os.getuid() != 0 or not filesystem.supports_namespaces(), reason="needs root")
def test_a_log_that_fills_the_disk_ends_the_run_which_can_be_resumed(tmp_path: Path) -> None:
    container = make_shell_container("head -c 9000000 /dev/zero; test ! -e /tmp/x")

    manifest = make_workflow({"name": "main", "container": container})

    (tmp_path / "w.json").write_text(json.dumps(manifest))
    (tmp_path / "home").mkdir()
    rekindle = Path(sys.executable).with_name("rekindle")
    script = f"""mount -t tmpfs -o size=4m x home && {rekindle} run --manifest w.json; echo ended $?
                 mount -o remount,size=64m home && {rekindle} resume w; echo ended $?"""
    environment = {**os.environ, "REKINDLE_HOME": str(tmp_path / "home")}

    result = subprocess.run(
        ["unshare", "-m", "sh", "-c", script],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )

    assert [line for line in result.stdout.splitlines() if line.startswith("ended")] == [
        "ended 1",
        "ended 0",
    ], result
    assert "No space left on device" in result.stderr
    assert "Traceback" not in result.stderr
