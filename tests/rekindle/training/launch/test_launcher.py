"""Tests of the launcher as a real process: its exit codes are correct, no step is lost, and no
process is left at the end."""

import json
import os
import re
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from argolocal.common.processes import read_start_ticks
from rekindle.storage import Store
from rekindle.training.launch.forkserver import Forkserver, WorkerSlot
from rekindle.training.launch.launcher import MAX_CRASHES, ExitKind, RestartBudget
from tests.rekindle.training.crew import Crew, Member, make_flags

TROUBLE = "tests.rekindle.training.trouble"


@pytest.fixture
def crew(toy_dataset: None, s3_environment: dict[str, str], tmp_path: Path) -> Iterator[Crew]:
    """Yield a Crew, which starts processes; at the end, check that no process of the crew is
    left."""
    (tmp_path / "shm").mkdir()
    crew = Crew(s3_environment | {"REKINDLE_SHM": str(tmp_path / "shm")}, tmp_path)
    yield crew
    crew.close()
    crew.until(lambda: not find_parent_pids(crew), 10)


def launch_forked(crew: Crew, prefix: str, **environment: str) -> Member:
    """Start a launcher without a coordinator, forked from a process that has torch loaded."""
    return crew.start_light_launcher(
        prefix, make_flags(prefix, workload=TROUBLE), MASTER_ADDR="", **environment
    )


def launch_command(crew: Crew, prefix: str, **environment: str) -> Member:
    """Start a launcher without a coordinator, as a new command that loads torch."""
    return crew.start_launcher(
        prefix, make_flags(prefix, workload=TROUBLE), MASTER_ADDR="", **environment
    )


def read_model_digest(s3: Store, prefix: str) -> str:
    return json.loads(s3.get(f"{prefix}/model/model.json"))["sha256"]


def list_shared_memory(crew: Crew) -> list[str]:
    return os.listdir(crew.environment["REKINDLE_SHM"])


def find_parent_pids(crew: Crew) -> dict[int, int]:
    """Return pid → parent pid of the crew's processes, found by their logs, which child processes
    inherit."""
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if os.readlink(folder / "fd/2").startswith(f"{crew.logs}/"):
                parents[int(folder.name)] = int(
                    (folder / "stat").read_text().rpartition(")")[2].split()[1]
                )
    return parents


def find_children(crew: Crew, launcher: Member) -> tuple[int, list[int]]:
    """Return the pids of a launcher's forkserver (its oldest child) and workers."""
    assert launcher.process.pid
    children = [
        pid for pid, parent in find_parent_pids(crew).items() if parent == launcher.process.pid
    ]
    forkserver, *workers = sorted(children, key=lambda pid: read_start_ticks(pid) or 0)
    return forkserver, workers


def survives_sigterm(pid: int | None) -> bool:
    """Return True if the process handles or blocks SIGTERM."""
    fields = dict(line.split(":") for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return any(int(fields[name], 16) >> signal.SIGTERM - 1 & 1 for name in ("SigBlk", "SigCgt"))


def loads_torch(crew: Crew, launcher: Member) -> bool:
    with suppress(ValueError, OSError):
        return "libtorch" in Path(f"/proc/{find_children(crew, launcher)[0]}/maps").read_text()
    return False


@pytest.mark.parametrize(
    ("trouble", "code"), [("config", 78), pytest.param("data", 65, marks=pytest.mark.slow)]
)
def test_permanent_errors_are_not_retried(crew: Crew, trouble: str, code: int) -> None:
    launcher = launch_forked(crew, trouble, TROUBLE=trouble)
    assert launcher.wait_for_exit_code() == code, launcher.read_log()
    assert launcher.read_log().count("is wrong") == 1
    assert not list_shared_memory(crew)


def test_a_loss_that_is_not_a_scalar_is_rejected_with_its_shape(crew: Crew) -> None:
    launcher = launch_forked(crew, "shape", TROUBLE="reshape")
    assert launcher.wait_for_exit_code() == 78, launcher.read_log()
    rule = "it must return a tensor with one element"
    assert f"loss(model, batch) returned a tensor of shape (3,): {rule}" in launcher.read_log()


def test_a_workloads_exception_is_reported_with_its_line_and_retried_once(crew: Crew) -> None:
    argv = make_flags("line", workload=TROUBLE, workers=1)
    coordinator = crew.start_coordinator(argv)
    launcher = crew.start_light_launcher(
        "pod", argv, TROUBLE=" ".join(9 * ["traceback"]), TROUBLE_AT="0"
    )
    assert launcher.wait_for_exit_code() == 70, launcher.read_log()
    assert coordinator.wait_for_exit_code() == 70, launcher.read_log()
    assert launcher.read_log().count("restarting it") == 1, launcher.read_log()
    for process in (launcher, coordinator):
        assert re.search(
            r"error: .*/trouble\.py:\d+: RuntimeError: toy trouble", process.read_log()
        )


def test_a_workloads_connection_error_is_retried_twice(
    crew: Crew, s3: Store, undisturbed: str
) -> None:
    launcher = launch_forked(crew, "cut", TROUBLE="cut cut")
    assert launcher.wait_for_exit_code() == 0, launcher.read_log()
    assert read_model_digest(s3, "cut") == undisturbed


def test_a_worker_resumes_after_any_kind_of_end(crew: Crew, s3: Store, undisturbed: str) -> None:
    troubles = "traceback exit crash storage preempted told exit preempted"
    launcher = launch_forked(crew, "again", TROUBLE=troubles)
    assert launcher.wait_for_exit_code() == 0, launcher.read_log()
    log = launcher.read_log()
    assert log.count("restarting it") == len(troubles.split()), log
    assert "toy trouble" in log
    assert "Segmentation fault" in log
    assert "ended with code 3" in log
    assert read_model_digest(s3, "again") == undisturbed
    assert not list_shared_memory(crew)


@pytest.mark.slow
def test_a_worker_that_always_crashes_ends_the_run_with_its_traceback(crew: Crew) -> None:
    argv = make_flags("crash", workload=TROUBLE, workers=1)
    coordinator = crew.start_coordinator(argv)
    launcher = crew.start_light_launcher(
        "pod", argv, TROUBLE=" ".join(9 * ["crash"]), TROUBLE_AT="0"
    )
    assert launcher.wait_for_exit_code() == 1, launcher.read_log()
    assert coordinator.wait_for_exit_code() == 1, launcher.read_log()
    assert (
        "error: pod was ended by SIGSEGV, 3 times without a newer step (now -1)"
        in launcher.read_log()
    )
    # the files in shared memory are kept, because a pod of the same name may start again
    assert list_shared_memory(crew)
    assert "trouble.py" in launcher.read_log()
    assert "pod (3 times without a newer step)" in coordinator.read_log()


@pytest.mark.slow
def test_a_sigterm_is_handled_before_and_while_torch_is_loaded(crew: Crew) -> None:
    command = launch_command(crew, "early")
    crew.until(lambda: survives_sigterm(command.process.pid))
    command.send(signal.SIGTERM)
    assert command.wait_for_exit_code(10) == 143, command.read_log()
    loading = launch_command(crew, "loading")
    crew.until(lambda: loads_torch(crew, loading))
    loading.send(signal.SIGINT)
    assert loading.wait_for_exit_code(10) == 143, loading.read_log()


@pytest.mark.slow
def test_two_sigterms_during_training_lose_no_step(crew: Crew, s3: Store, undisturbed: str) -> None:
    launcher = launch_command(crew, "launcher-term", TOY_HOLD="20", TOY_LOADER="1")
    crew.wait_until_held(20, launcher)
    launcher.send(signal.SIGTERM)
    launcher.send(signal.SIGTERM)
    crew.release(20)
    assert launcher.wait_for_exit_code() == 143, launcher.read_log()
    step = launcher.read_log().split("left after step ")[1].split(",")[0]
    assert not list_shared_memory(crew)
    second_launcher = launch_forked(crew, "launcher-term")
    assert second_launcher.wait_for_exit_code() == 0, second_launcher.read_log()
    assert f"resuming from step {step} " in second_launcher.read_log(), second_launcher.read_log()
    assert read_model_digest(s3, "launcher-term") == undisturbed


@pytest.mark.slow
def test_a_worker_that_does_not_leave_is_killed_within_the_grace_period(crew: Crew) -> None:
    launcher = launch_command(crew, "stuck", TOY_HOLD="20", TOY_LOADER="1", REKINDLE_GRACE="2")
    crew.wait_until_held(20, launcher)
    _, workers = find_children(crew, launcher)
    os.kill(workers[0], signal.SIGSTOP)
    launcher.send(signal.SIGTERM)
    assert launcher.wait_for_exit_code(10) == 143, launcher.read_log()
    assert "is killed: it did not exit in time" in launcher.read_log()


@pytest.mark.slow
def test_two_workers_of_a_pod_survive_their_forkserver_and_each_other(
    crew: Crew, s3: Store, undisturbed: str
) -> None:
    argv = make_flags("two", workload=TROUBLE, workers=2)
    coordinator = crew.start_coordinator(argv)
    launcher = crew.start_light_launcher("pod", argv, PET_NPROC_PER_NODE="2", TOY_HOLD="20 40 60")
    crew.wait_until_held(20, launcher)
    forkserver, workers = find_children(crew, launcher)
    os.kill(forkserver, signal.SIGKILL)
    crew.until(lambda: "torch for the workers was ended by SIGKILL" in launcher.read_log())
    assert {*workers} <= {*find_parent_pids(crew)}
    crew.release(20)
    crew.wait_until_held(40, launcher)
    os.kill(workers[0], signal.SIGKILL)

    for number in (40, 60):
        crew.release(number)

    assert launcher.wait_for_exit_code() == 0, launcher.read_log()
    assert coordinator.wait_for_exit_code() == 0, launcher.read_log()
    assert {"pod pod/1", "pod/1 pod"} & {
        line.partition(": ")[2] for line in coordinator.read_log().splitlines()
    }
    assert read_model_digest(s3, "two") == undisturbed
    assert not list_shared_memory(crew)


def test_ending_a_forkserver_that_has_already_ended_is_allowed() -> None:
    forkserver = Forkserver([], WorkerSlot())
    forkserver.end()
    os.waitpid(forkserver.pid, 0)
    forkserver.end()
    assert not forkserver.take_started()


@pytest.mark.slow
def test_after_killing_all_processes_a_run_resumes_from_shared_memory(
    crew: Crew, s3: Store, undisturbed: str
) -> None:
    launcher = launch_command(crew, "launcher-killed", TOY_HOLD="70", TOY_LOADER="1")
    crew.wait_until_held(70, launcher)
    # the five processes are the launcher, the forkserver, the worker, and the two DataLoader
    # processes of the worker
    crew.until(lambda: len(find_parent_pids(crew)) == 5)
    launcher.send(signal.SIGKILL)
    launcher.wait_for_exit_code()
    crew.until(lambda: not find_parent_pids(crew), 10)
    assert list_shared_memory(crew)
    second_launcher = launch_forked(crew, "launcher-killed")
    assert second_launcher.wait_for_exit_code() == 0, second_launcher.read_log()
    assert read_model_digest(s3, "launcher-killed") == undisturbed
    assert not list_shared_memory(crew)


@pytest.mark.slow
def test_the_error_of_an_oom_killed_worker_names_the_memory_limit(crew: Crew) -> None:
    memory = Path("/sys/fs/cgroup/memory")
    original_group = (
        memory / Path("/proc/self/cgroup").read_text().partition(":memory:/")[2].partition("\n")[0]
    )
    cgroup_folder = memory / f"rekindle-{os.getpid()}"

    try:
        cgroup_folder.mkdir()
        (cgroup_folder / "memory.limit_in_bytes").write_text(str(800 << 20))
    except OSError:
        pytest.skip("needs cgroups of version 1")

    try:
        # child processes that start after this line belong to this cgroup
        (cgroup_folder / "cgroup.procs").write_text(str(os.getpid()))
        launcher = launch_command(crew, "hoard", TROUBLE="hoard hoard hoard", TROUBLE_AT="0")
        (original_group / "cgroup.procs").write_text(str(os.getpid()))
        assert launcher.wait_for_exit_code() == 1, launcher.read_log()
        assert "was OOM-killed, 3 times" in launcher.read_log()
        assert "may use 0.781 GiB" in launcher.read_log()
    finally:
        cgroup_folder.rmdir()


def test_invalid_settings_are_rejected(crew: Crew) -> None:
    for environment in (
        {"REKINDLE_GRACE": "soon"},
        {"PET_NPROC_PER_NODE": "2"},
        {"PET_NPROC_PER_NODE": "0"},
        {"PET_NPROC_PER_NODE": "9" * 90},
    ):
        launcher = launch_forked(crew, "bad", **environment)
        ((name, value),) = environment.items()
        assert launcher.wait_for_exit_code() == 78, launcher.read_log()
        assert f"{name} is " in launcher.read_log(), launcher.read_log()
        assert value in launcher.read_log(), launcher.read_log()


def test_only_crashes_without_progress_end_a_run() -> None:
    budget = RestartBudget()
    assert [budget.record_exit(ExitKind.BUG, step) for step in range(20)] == 20 * [0.0]
    pauses = [budget.record_exit(ExitKind.PREEMPTED, 19) for _ in range(40)]
    assert pauses[0] == 0.0
    assert None not in pauses
    assert pauses[-1] == 30
    assert None not in [budget.record_exit(ExitKind.UNAVAILABLE, 19) for _ in range(40)]
    # the crash at step 19 above also counts
    assert [budget.record_exit(ExitKind.BUG, 19) for _ in range(MAX_CRASHES - 1)][-1] is None
