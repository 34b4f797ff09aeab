"""The launcher as a process: what its exit code says, and that neither a step nor a process is left behind."""

import json
import os
import re
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from argolocal.common.processes import started
from rekindle.storage import Store
from rekindle.training.launch.forkserver import Forkserver, WorkerSlot
from rekindle.training.launch.launcher import BUGS, Budget, ExitKind
from tests.rekindle.training.crew import Crew, Member, flags

TROUBLE = "tests.rekindle.training.trouble"


@pytest.fixture
def crew(toy_dataset: None, s3_environment: dict[str, str], tmp_path: Path) -> Iterator[Crew]:
    """Nothing of it is left: no process, and after a run that is over no shared memory."""
    (tmp_path / "shm").mkdir()
    crew = Crew(s3_environment | {"REKINDLE_SHM": str(tmp_path / "shm")}, tmp_path)
    yield crew
    crew.close()
    crew.until(lambda: not of(crew), 10)


def alone(crew: Crew, prefix: str, **environment: str) -> Member:
    """A launcher without a coordinator."""
    return crew.light_launcher(prefix, flags(prefix, workload=TROUBLE), MASTER_ADDR="", **environment)


def executed(crew: Crew, prefix: str, **environment: str) -> Member:
    """The same as a command of its own, that loads torch."""
    return crew.launcher(prefix, flags(prefix, workload=TROUBLE), MASTER_ADDR="", **environment)


def sha256(s3: Store, prefix: str) -> str:
    """Of its weights, as those of another workload: both are the toy's."""
    return json.loads(s3.get(f"{prefix}/model/model.json"))["sha256"]


def shared(crew: Crew) -> list[str]:
    return os.listdir(crew.environment["REKINDLE_SHM"])


def of(crew: Crew) -> dict[int, int]:
    """The processes that log for it, and their parents: all that its members start inherit their logs."""
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if os.readlink(folder / "fd/2").startswith(f"{crew.logs}/"):
                parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
    return parents


def below(crew: Crew, launcher: Member) -> tuple[int, list[int]]:
    """The forkserver and the workers of a launcher; the oldest child is the forkserver, whatever its pid."""
    assert launcher.process.pid
    children = [pid for pid, parent in of(crew).items() if parent == launcher.process.pid]
    nursery, *workers = sorted(children, key=lambda pid: started(pid) or 0)
    return nursery, workers


def listens(pid: int | None) -> bool:
    """Whether a SIGTERM to this process is handled, or kept until it is."""
    fields = dict(line.split(":") for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return any(int(fields[name], 16) >> signal.SIGTERM - 1 & 1 for name in ("SigBlk", "SigCgt"))


def loads_torch(crew: Crew, launcher: Member) -> bool:
    with suppress(ValueError, OSError):
        return "libtorch" in Path(f"/proc/{below(crew, launcher)[0]}/maps").read_text()
    return False


@pytest.mark.parametrize(("trouble", "code"), [("config", 78), pytest.param("data", 65, marks=pytest.mark.slow)])
def test_what_no_retry_cures_is_not_tried_again(crew: Crew, trouble: str, code: int) -> None:
    launcher = alone(crew, trouble, TROUBLE=trouble)
    assert launcher.code() == code, launcher.said()
    assert launcher.said().count("is wrong") == 1
    assert not shared(crew)


def test_a_loss_that_is_no_number_is_refused_with_its_shape(crew: Crew) -> None:
    launcher = alone(crew, "shape", TROUBLE="reshape")
    assert launcher.code() == 78, launcher.said()
    rule = "it must return a tensor with one element"
    assert f"loss(model, batch) returned a tensor of shape (3,): {rule}" in launcher.said()


def test_an_error_of_the_workload_is_reported_with_its_line_and_not_tried_a_third_time(crew: Crew) -> None:
    argv = flags("line", workload=TROUBLE, workers=1)
    coordinator = crew.coordinator(argv)
    launcher = crew.light_launcher("pod", argv, TROUBLE=" ".join(9 * ["traceback"]), TROUBLE_AT="0")
    assert (launcher.code(), coordinator.code()) == (70, 70), launcher.said()
    assert launcher.said().count("restarting it") == 1, launcher.said()
    for process in (launcher, coordinator):
        assert re.search(r"error: .*/trouble\.py:\d+: RuntimeError: toy trouble", process.said())


def test_a_connection_that_a_workload_loses_twice_is_tried_again(crew: Crew, s3: Store, undisturbed: str) -> None:
    launcher = alone(crew, "cut", TROUBLE="cut cut")
    assert launcher.code() == 0, launcher.said()
    assert sha256(s3, "cut") == undisturbed


def test_whatever_ends_a_worker_it_goes_on_where_it_was(crew: Crew, s3: Store, undisturbed: str) -> None:
    troubles = "traceback exit crash storage preempted told exit preempted"
    launcher = alone(crew, "again", TROUBLE=troubles)
    assert launcher.code() == 0, launcher.said()
    said = launcher.said()
    assert said.count("restarting it") == len(troubles.split()), said
    assert "toy trouble" in said and "Segmentation fault" in said and "ended with code 3" in said
    assert sha256(s3, "again") == undisturbed
    assert not shared(crew)


def test_a_worker_that_always_crashes_ends_the_run_with_the_place_of_the_crash(crew: Crew) -> None:
    argv = flags("crash", workload=TROUBLE, workers=1)
    coordinator = crew.coordinator(argv)
    launcher = crew.light_launcher("pod", argv, TROUBLE=" ".join(9 * ["crash"]), TROUBLE_AT="0")
    assert (launcher.code(), coordinator.code()) == (1, 1), launcher.said()
    assert "error: pod was ended by SIGSEGV, 3 times without a newer step (now -1)" in launcher.said()
    assert shared(crew)  # the same pod may start again
    assert "trouble.py" in launcher.said() and "pod (3 times without a newer step)" in coordinator.said()


def test_a_sigterm_is_heard_before_torch_is_there_and_while_it_is_loaded(crew: Crew) -> None:
    early = executed(crew, "early")
    crew.until(lambda: listens(early.process.pid))
    early.send(signal.SIGTERM)
    assert early.code(10) == 143, early.said()
    loading = executed(crew, "loading")
    crew.until(lambda: loads_torch(crew, loading))
    loading.send(signal.SIGINT)
    assert loading.code(10) == 143, loading.said()


def test_a_sigterm_in_training_loses_no_step_although_it_comes_twice(crew: Crew, s3: Store, undisturbed: str) -> None:
    launcher = executed(crew, "launcher-term", TOY_HOLD="20", TOY_LOADER="1")
    crew.held(20, launcher)
    launcher.send(signal.SIGTERM)
    launcher.send(signal.SIGTERM)
    crew.release(20)
    assert launcher.code() == 143, launcher.said()
    step = launcher.said().split("left after step ")[1].split(",")[0]
    assert not shared(crew)
    again = alone(crew, "launcher-term")
    assert again.code() == 0 and f"resuming from step {step} " in again.said(), again.said()
    assert sha256(s3, "launcher-term") == undisturbed


def test_a_worker_that_does_not_leave_is_ended_within_the_grace(crew: Crew) -> None:
    launcher = executed(crew, "stuck", TOY_HOLD="20", TOY_LOADER="1", REKINDLE_GRACE="2")
    crew.held(20, launcher)
    _, workers = below(crew, launcher)
    os.kill(workers[0], signal.SIGSTOP)
    launcher.send(signal.SIGTERM)
    assert launcher.code(10) == 143, launcher.said()
    assert "is killed: it has not left in time" in launcher.said()


def test_two_workers_in_a_pod_outlive_their_nursery_and_each_other(crew: Crew, s3: Store, undisturbed: str) -> None:
    argv = flags("two", workload=TROUBLE, workers=2)
    coordinator = crew.coordinator(argv)
    launcher = crew.light_launcher("pod", argv, PET_NPROC_PER_NODE="2", TOY_HOLD="20 40 60")
    crew.held(20, launcher)
    nursery, workers = below(crew, launcher)
    os.kill(nursery, signal.SIGKILL)
    crew.until(lambda: "torch for the workers was ended by SIGKILL" in launcher.said())
    assert {*workers} <= {*of(crew)}
    crew.release(20)
    crew.held(40, launcher)
    os.kill(workers[0], signal.SIGKILL)
    for number in (40, 60):
        crew.release(number)
    assert (launcher.code(), coordinator.code()) == (0, 0), launcher.said()
    assert {"pod pod/1", "pod/1 pod"} & {line.partition(": ")[2] for line in coordinator.said().splitlines()}
    assert sha256(s3, "two") == undisturbed
    assert not shared(crew)


def test_a_forkserver_that_ended_with_the_last_worker_does_not_fail_the_run() -> None:
    forkserver = Forkserver([], WorkerSlot())
    forkserver.end()
    os.waitpid(forkserver.pid, 0)
    forkserver.end()
    assert not forkserver.started()


def test_everything_killed_at_once_goes_on_from_shared_memory(crew: Crew, s3: Store, undisturbed: str) -> None:
    launcher = executed(crew, "launcher-killed", TOY_HOLD="70", TOY_LOADER="1")
    crew.held(70, launcher)
    crew.until(lambda: len(of(crew)) == 5)  # launcher, nursery, worker, its two
    launcher.send(signal.SIGKILL)
    launcher.code()
    crew.until(lambda: not of(crew), 10)
    assert shared(crew)
    again = alone(crew, "launcher-killed")
    assert again.code() == 0, again.said()
    assert sha256(s3, "launcher-killed") == undisturbed
    assert not shared(crew)


def test_a_worker_without_memory_is_told_its_limit(crew: Crew) -> None:
    memory = Path("/sys/fs/cgroup/memory")
    ours = memory / Path("/proc/self/cgroup").read_text().partition(":memory:/")[2].partition("\n")[0]
    group = memory / f"rekindle-{os.getpid()}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(800 << 20))
    except OSError:
        pytest.skip("needs cgroups of version 1")
    try:
        (group / "cgroup.procs").write_text(str(os.getpid()))  # what it starts now is born there
        launcher = executed(crew, "hoard", TROUBLE="hoard hoard hoard", TROUBLE_AT="0")
        (ours / "cgroup.procs").write_text(str(os.getpid()))
        assert launcher.code() == 1, launcher.said()
        assert "was OOM-killed, 3 times" in launcher.said() and "may use 0.781 GiB" in launcher.said()
    finally:
        group.rmdir()


def test_bad_settings_are_refused(crew: Crew) -> None:
    for environment in ({"REKINDLE_GRACE": "soon"}, {"PET_NPROC_PER_NODE": "2"}, {"PET_NPROC_PER_NODE": "0"}):
        launcher = alone(crew, "bad", **environment)
        ((name, value),) = environment.items()
        assert launcher.code() == 78 and f"{name} is " in launcher.said() and value in launcher.said(), launcher.said()


def test_only_deaths_without_progress_count_and_a_preemption_never_ends_a_run() -> None:
    budget = Budget()
    assert [budget.pause(ExitKind.BUG, step) for step in range(20)] == 20 * [0.0]
    pauses = [budget.pause(ExitKind.PREEMPTED, 19) for _ in range(40)]
    assert pauses[0] == 0.0 and None not in pauses and pauses[-1] == 30
    assert None not in [budget.pause(ExitKind.AWAY, 19) for _ in range(40)]
    assert [budget.pause(ExitKind.BUG, 19) for _ in range(BUGS - 1)][-1] is None  # the one at step 19 counts, too
