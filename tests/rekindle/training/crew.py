"""Start the real processes of a training run as forks of a process that has loaded torch, so that a
worker starts in a tenth of a second."""

import faulthandler
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

from argolocal.common.linux import die_with_parent
from rekindle.kubernetes_names import REKINDLE_SECRET
from rekindle.storage import Store
from tests.ports import free_port
from tests.rekindle.training import toy
from tests.waiting import until

ROOT = str(Path(__file__).parents[3])
if ROOT not in sys.path:
    # the processes inherit sys.path, and import the toy workload
    sys.path.append(ROOT)
TOY = "tests.rekindle.training.toy"
DATASET = "toy/dataset"
# the digest of the dataset that `toy.write` makes
DIGEST = "fdc408d9bc8d8bb55d06620bcbfbe4b8a446b7bb563a32cdd8451ae732cce13e"
SAMPLES = 300
SECRET = "0123456789" * 4


def make_flags(prefix: str, **settings: object) -> list[str]:
    """Return the command line of a toy run, whose results are stored below `prefix`."""
    defaults = {
        "workload": TOY,
        "dataset": DATASET,
        "digest": DIGEST,
        "batch_size": 8,
        "virtual_workers": 7,
        "out": f"{prefix}/model",
        "checkpoints": f"{prefix}/checkpoints",
        "steps": 30,
        "checkpoint_steps": 5,
    }

    return [f"--{name.replace('_', '-')}={value}" for name, value in (defaults | settings).items()]


def open_store(environment: dict[str, str]) -> Store:
    """Return the object store of processes with the given environment variables."""
    variables = ("S3_BUCKET", "S3_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
    return Store(*(environment[variable] for variable in variables))


def upload_dataset(environment: dict[str, str], folder: Path) -> None:
    """Create the toy dataset, and upload it to the prefix that `make_flags` uses."""
    assert toy.write(folder / "dataset", SAMPLES) == DIGEST
    open_store(environment).upload(folder / "dataset", DATASET)


def has_joined(s3: Store, prefix: str, name: str = "") -> bool:
    """Return True if the ledger of the run below `prefix` records that a member has joined: the
    member `name`, or any member if `name` is empty."""
    lines = [
        line
        for entry in s3.list(f"{prefix}/checkpoints/ledger")
        for line in s3.get(entry.key).splitlines()
    ]
    return any(b'"join"' in line and name.encode() in line for line in lines)


def run_member(argv: list[str], environment: dict[str, str], log: str) -> None:
    """Run the command `argv` in this forked process: with the variables of `environment`, and with
    its output in the file `log`."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(file, stream)

    sys.stderr = sys.stdout = os.fdopen(file, "w", buffering=1)
    faulthandler.register(signal.SIGUSR1)
    die_with_parent(os.getppid())
    os.environ.update(environment)

    if argv[0] == "coordinator":
        from rekindle.training.membership.server import main

        sys.exit(main(argv[1:]))

    if argv[0] == "launcher":
        from rekindle.training.launch.launcher import main

        sys.exit(main(argv[1:]))

    from rekindle.step import main

    sys.exit(main(argv))


class CommandProcess(subprocess.Popen[bytes]):
    """A command with the interface of a forked process."""

    @property
    def exitcode(self) -> int | None:
        return self.poll()

    def join(self, seconds: float | None = None) -> None:
        with suppress(subprocess.TimeoutExpired):
            self.wait(seconds)


@dataclass
class Member:
    """A process of the run, with the file of its output."""

    process: BaseProcess | CommandProcess
    log: Path

    def read_log(self) -> str:
        """Return what the process has written to its log so far."""
        if self.log.exists():
            return self.log.read_text()
        return ""

    def wait_for_exit_code(self, seconds: float = 60) -> int:
        """Wait for the end of the process, and return its exit code."""
        self.process.join(seconds)
        assert self.process.exitcode is not None, f"still running:\n{self.read_log()}"
        return self.process.exitcode

    def send(self, signal_number: signal.Signals) -> None:
        assert self.process.pid
        os.kill(self.process.pid, signal_number)


class Crew:
    """Starts the processes of trainings, and kills them at the end of the test."""

    def __init__(self, environment: dict[str, str], logs: Path) -> None:
        port = free_port()
        # other tests must not find the files of this test
        environment = {"REKINDLE_SHM": str(logs)} | environment
        self.environment = environment | {
            "REKINDLE_CACHE": str(logs / "cache"),
            "OMP_NUM_THREADS": "1",
            "TOY_GATES": str(logs),
        }
        self.meeting = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            REKINDLE_SECRET: SECRET,
        }
        self.logs = logs
        self.members = list[Member]()
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(["tests.rekindle.training.loaded"])

    def start_lone_worker(self, argv: list[str], **environment: str) -> Member:
        """Start `rekindle step steps.train` without a coordinator."""
        return self._start("alone", ["steps.train", *argv], environment)

    def start_worker(self, name: str, argv: list[str], **environment: str) -> Member:
        return self._start(
            name, ["steps.train", *argv], self.meeting | {"POD_NAME": name} | environment
        )

    def start_coordinator(self, argv: list[str], **environment: str) -> Member:
        return self._start("coordinator", ["coordinator", *argv], self.meeting | environment)

    def start_light_launcher(self, name: str, argv: list[str], **environment: str) -> Member:
        """Start a launcher whose forkserver has torch already."""
        return self._start(
            name, ["launcher", *argv], self.meeting | {"POD_NAME": name} | environment
        )

    def start_launcher(self, name: str, argv: list[str], **environment: str) -> Member:
        """Start the first process of a worker pod, as a command, as in the pod."""
        log = self._log_path(name)
        with open(log, "ab") as file:
            variables = {"POD_NAME": name, "PYTHONPATH": ROOT} | environment
            environment = os.environ | self.environment | self.meeting | variables
            command = [sys.executable, "-m", "rekindle.training.launch.launcher", *argv]
            process = CommandProcess(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=file
            )
        self.members.append(Member(process, log))
        return self.members[-1]

    def _start(self, name: str, argv: list[str], environment: dict[str, str]) -> Member:
        log = self._log_path(name)
        process = self.context.Process(
            target=run_member, args=(argv, self.environment | environment, str(log))
        )
        process.start()
        self.members.append(Member(process, log))
        return self.members[-1]

    def _log_path(self, name: str) -> Path:
        return self.logs / f"{len(self.members)}-{name}.log"

    def until(self, condition: Callable[[], bool], seconds: float = 60) -> None:
        """Wait for a condition, or fail with the logs of all processes."""
        logs = lambda: "\n".join(f"== {m.log.name}\n{m.read_log()}" for m in self.members)  # noqa: E731
        until("the condition of the test", condition, seconds, evidence=logs)

    def wait_until_held(self, micro_batches: int, *members: Member) -> None:
        """Wait until one of `members` pauses after `micro_batches` micro-batches (TOY_HOLD), until
        `release(number)` is called; the other members wait for this member."""
        self.until(
            lambda: any(f"held at {micro_batches}\n" in member.read_log() for member in members)
        )

    def release(self, micro_batches: int) -> None:
        """Let the member continue that pauses after `micro_batches` micro-batches."""
        (self.logs / str(micro_batches)).touch()

    def close(self) -> None:
        for member in self.members:
            member.process.kill()
            member.process.join()
