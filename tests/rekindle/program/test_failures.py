"""Tests of a program that fails: the run ends with one sentence that names the cause, and its
checkpoints stay in the store."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from argolocal.common import exit_codes
from rekindle.kubernetes_names import PROGRAM_MODULES
from rekindle.storage import Store
from tests.rekindle.program.pods import ROOT, Pods, StartPods
from tests.waiting import until

# a program that writes checkpoints with torch.save and os.replace
SAVE = """
import os, sys, time
import torch
import torch.distributed as dist

folder = sys.argv[1]
rank = int(os.environ["RANK"])

def save(step):
    torch.save({"step": step}, f"{folder}/draft.tmp")
    os.replace(f"{folder}/draft.tmp", f"{folder}/step_{step}.pt")

"""

RunProgram = Callable[..., Pods]


@pytest.fixture
def run_program(start_pods: StartPods, tmp_path: Path) -> RunProgram:
    """Run a program until its coordinator has ended; all pods must end with the same exit code."""

    def run(text: str, code: int, *, agents: int = 1, **settings: Any) -> Pods:
        path = tmp_path / "train.py"
        path.write_text(text)
        pods = start_pods([str(path), "{checkpoints}"], workers=agents, **settings)
        workers = pods.start(agents)
        assert [pods.pods[0].wait(), *(worker.wait() for worker in workers)] == [code] * (
            agents + 1
        ), pods.logs()
        return pods

    return run


def last_line(pods: Pods) -> str:
    """Return the last line in the log of the coordinator, which is the error of the run."""
    return pods.pods[0].output.splitlines()[-1]


@pytest.mark.slow
def test_a_program_that_never_saves_is_told_how_to_save(run_program: RunProgram) -> None:
    pods = run_program("print('trained')", exit_codes.CODE_ERROR)
    assert last_line(pods) == (
        "error: worker-0: the program ended with exit code 0, but it has written no complete"
        " checkpoint. Let it save into {checkpoints}, or name the file or folder of its model in"
        " program.result."
    )


def test_a_missing_result_is_named(run_program: RunProgram, s3: Store) -> None:
    pods = run_program(
        SAVE + "save(1)", exit_codes.CODE_ERROR, program={"result": "{checkpoints}/final"}
    )
    assert "but its result" in last_line(pods)
    assert "/worker-0/final does not exist. Correct program.result" in last_line(pods)
    assert list(s3.list(f"{pods.prefix}/checkpoints/program/checkpoints"))


def test_an_exception_is_reported_with_the_line_and_the_rank_that_failed_first(
    run_program: RunProgram, s3: Store, tmp_path: Path
) -> None:
    text = SAVE + (
        "dist.init_process_group('gloo')\n"
        "if rank == 0: save(1)\n"
        "dist.barrier()\n"
        "if rank == 1:\n"
        "    raise ValueError('the learning rate is negative')\n"
        "dist.barrier()\n"
    )
    pods = run_program(text, 1, agents=2, min_workers=2)
    line = 1 + text[: text.index("    raise")].count("\n")
    name = next(pod.name for pod in pods.pods[1:] if "\nrank 1 of the program" in pod.output)
    assert last_line(pods) == (
        f"error: {name} (3 times without a newer step): rank 1 of the program ended with exit"
        f" code 1: {tmp_path / 'train.py'}:{line}: ValueError: the learning rate is negative"
    )
    assert list(s3.list(f"{pods.prefix}/checkpoints/program/checkpoints"))


@pytest.mark.slow
def test_a_command_that_does_not_exist_is_named(start_pods: StartPods) -> None:
    pods = start_pods(["trian", "{checkpoints}"])
    (agent,) = pods.start(1)
    assert agent.wait() == exit_codes.CODE_ERROR, pods.logs()
    assert last_line(pods) == (
        "error: worker-0: rank 0 of the program ended with exit code 127: trian: No such file or"
        " directory"
    )


@pytest.mark.slow
def test_a_rank_that_ends_alone_is_reported(run_program: RunProgram, s3: Store) -> None:
    text = SAVE + (
        "dist.init_process_group('gloo')\n"
        "if rank == 0:\n"
        "    save(1)\n"
        "    dist.barrier()\n"
        "    time.sleep(3600)\n"
        "dist.barrier()\n"
        "os._exit(0)\n"
    )
    pods = run_program(text, 1, agents=2, min_workers=2, hung_seconds=2)
    assert (
        "the program hangs: some of its processes ended with exit code 0, and the others had no"
        " output, progress or checkpoint for 2 s"
    ) in last_line(pods)
    assert list(s3.list(f"{pods.prefix}/checkpoints/program/checkpoints"))


@pytest.mark.slow
def test_a_program_that_does_nothing_is_reported_as_hanging(run_program: RunProgram) -> None:
    pods = run_program("import time; time.sleep(3600)", 1, hung_seconds=1)
    assert "the program hangs: it had no output, progress or checkpoint for 1 s" in last_line(pods)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs mounts")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.slow
def test_a_full_disk_is_named_and_the_checkpoint_before_stays(
    start_pods: StartPods, small_disk: Path, tmp_path: Path, s3: Store
) -> None:
    path = tmp_path / "train.py"
    path.write_text(
        SAVE + "save(1)\ntime.sleep(1.5)\nopen(f'{folder}/big', 'wb').write(bytes(8 << 20))\n"
    )
    pods = start_pods([str(path), "{checkpoints}"])
    pods.coordinator()
    agent = pods.agent(0, REKINDLE_CACHE=str(small_disk))
    assert agent.wait() == 1, pods.logs()
    assert re.search(r"The disk of \S*/worker-0 is full$", last_line(pods)), pods.logs()
    assert list(s3.list(f"{pods.prefix}/checkpoints/program/checkpoints"))


@pytest.mark.slow
def test_a_full_disk_at_the_restore_is_named_and_the_checkpoint_stays(
    start_pods: StartPods, small_disk: Path, tmp_path: Path, s3: Store
) -> None:
    path = tmp_path / "train.py"
    path.write_text(
        SAVE
        + "torch.save({'weights': torch.randn(1 << 20)}, f'{folder}/big.tmp')\n"
        + "os.replace(f'{folder}/big.tmp', f'{folder}/latest.pt')\ntime.sleep(3600)\n"
    )
    pods = start_pods([str(path), "{checkpoints}"])
    pods.coordinator()
    agent = pods.agent(0)
    checkpoints = f"{pods.prefix}/checkpoints/program/checkpoints"
    until("the upload", lambda: list(s3.list(checkpoints)), evidence=pods.logs)
    agent.send(signal.SIGKILL)
    agent.wait()

    replacement = pods.agent(0, REKINDLE_CACHE=str(small_disk))
    assert replacement.wait() == 1, pods.logs()
    assert re.search(
        r"\(3 times without a newer step\): the program cannot be started: \S*/latest\.pt cannot be"
        r" written \(No space left on device\)\. Free the disk of the pod",
        last_line(pods),
    ), pods.logs()
    assert list(s3.list(checkpoints))


@pytest.mark.slow
def test_a_program_that_starts_at_step_0_every_time_ends_after_equal_errors(
    run_program: RunProgram,
) -> None:
    # each start saves a newer checkpoint, so the errors are not without a newer step
    text = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "folder = Path(sys.argv[1])\n"
        "step = len(list(folder.iterdir())) + 1\n"
        "for number in (step, step + 1):\n"
        "    (folder / 'draft.tmp').write_text('{}')\n"
        "    os.replace(folder / 'draft.tmp', folder / f'step_{number}.json')\n"
        "raise ValueError('no data')\n"
    )
    pods = run_program(text, exit_codes.CODE_ERROR, program={"preload": []})
    assert re.search(r"\(10 times\) rank 0 .*train\.py:8: ValueError: no data$", last_line(pods))


@pytest.fixture
def small_memory() -> Iterator[Path]:
    """A memory cgroup of 600 MB."""
    cgroup_folder = Path(f"/sys/fs/cgroup/memory/rekindle-program-{os.getpid()}")
    try:
        cgroup_folder.mkdir()
        (cgroup_folder / "memory.limit_in_bytes").write_text(str(600 << 20))
    except OSError:
        pytest.skip("needs cgroups of version 1")
    yield cgroup_folder
    until("the end of its processes", lambda: not (cgroup_folder / "cgroup.procs").read_text())
    cgroup_folder.rmdir()


@pytest.mark.slow
def test_a_program_without_enough_memory_is_told_the_limit(
    start_pods: StartPods, small_memory: Path, tmp_path: Path
) -> None:
    path = tmp_path / "train.py"
    path.write_text("data = [bytes([1]) * (1 << 20) for number in range(4000)]\n")
    pods = start_pods([str(path), "{checkpoints}"], program={"preload": []})
    coordinator = pods.coordinator()
    agent = subprocess.Popen(
        [
            *("sh", "-c", 'echo $$ > "$0" && exec "$@"', str(small_memory / "cgroup.procs")),
            *(sys.executable, "-m", PROGRAM_MODULES.launcher, *pods.flags),
        ],
        env={**os.environ, **pods.environment, "POD_NAME": "worker-0", "POD_IP": "127.0.0.2"},
        cwd=ROOT,
    )
    try:
        assert coordinator.wait() == 1, pods.logs()
        assert last_line(pods) == (
            "error: worker-0 (3 times without a newer step): rank 0 of the program was OOM-killed:"
            " its pod may use 0.586 GiB. Raise cluster.pods.train.memory"
        )
        assert agent.wait(60) == 1
    finally:
        agent.kill()
        agent.wait()
