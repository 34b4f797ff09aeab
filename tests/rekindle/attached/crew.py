"""Start real processes of a program that attaches its state, which are forked from a process that
has loaded torch."""

import json
import multiprocessing
import os
import signal
import sys
import traceback
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from argolocal.common.linux import die_with_parent
from tests.ports import free_port
from tests.rekindle.attached import programs
from tests.waiting import until


def run_rank(variables: dict[str, str], log: str, folder: str, settings: dict[str, Any]) -> None:
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout = sys.stderr = os.fdopen(output, "w", buffering=1)

    die_with_parent(os.getppid())
    programs.set_variables(variables)
    try:
        programs.train(folder, **settings)
    except Exception:
        traceback.print_exc()
        sys.exit(1)


class Crew:
    """The processes of a program between its start and its end. `pods`: names of the pods, one for
    each rank, if each pod has its own folder and its own shared memory; by default, all ranks share
    one folder and one shared memory."""

    def __init__(
        self, folder: Path, world: int, pods: list[str] | None = None, **settings: Any
    ) -> None:
        self.folder = folder
        self.world = world
        self.pods = pods
        self.processes: list[BaseProcess] = []
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.rekindle.attached.loaded"])
        port = free_port()
        for rank in range(world):
            rank_folder = self.rank_folder(rank)
            (rank_folder / "shm").mkdir(parents=True, exist_ok=True)
            variables = {
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "WORLD_SIZE": str(world),
                "RANK": str(rank),
                "OMP_NUM_THREADS": "1",
                "REKINDLE_SHM": str(rank_folder / "shm"),
                "POD_NAME": pods[rank] if pods else "pod",
            }
            process = context.Process(
                target=run_rank,
                args=(variables, str(folder / "log"), str(rank_folder), settings),
            )
            process.start()
            self.processes.append(process)

    def rank_folder(self, rank: int) -> Path:
        return self.folder / self.pods[rank] if self.pods else self.folder

    @property
    def log(self) -> str:
        path = self.folder / "log"
        return path.read_text(errors="replace") if path.exists() else ""

    def lines(self, rank: int = 0) -> list[list[str]]:
        """Return the words of each line that a rank has written about its steps."""
        path = self.rank_folder(rank) / f"steps-{rank}"
        return [line.split() for line in path.read_text().splitlines()] if path.exists() else []

    def starts(self, rank: int = 0) -> list[tuple[int, str]]:
        """Return, for each start of a rank, the step and the tier (memory or store) that it was
        restored from."""
        return [(int(line[1]), line[2]) for line in self.lines(rank) if line[0] == "start"]

    def newest_step(self, rank: int = 0) -> int:
        """Return the last completed step since the last start of the program."""
        lines = self.lines(rank)
        return int(lines[-1][1]) if lines else -1

    def wait_for_step(self, step: int, starts: int = 1, rank: int = 0) -> None:
        """Wait until the program has reached a step since its last start. `starts`: number of
        starts of the program so far."""
        until(
            f"step {step}",
            lambda: len(self.starts(rank)) >= starts and self.newest_step(rank) >= step,
            evidence=lambda: self.log,
        )

    def wait_for_checkpoint(self) -> None:
        """Wait until a checkpoint of shards is complete."""
        until(
            "a checkpoint",
            lambda: any((self.folder / "checkpoints").glob("step-*/.metadata")),
            evidence=lambda: self.log,
        )

    def kill(self) -> None:
        """Kill all processes of the program at once."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()

    def terminate(self, rank: int) -> None:
        pid = self.processes[rank].pid
        assert pid
        os.kill(pid, signal.SIGTERM)

    def wait(self, seconds: float = 90) -> list[int | None]:
        """Wait until all processes of the program have ended, and return their exit codes."""
        for process in self.processes:
            process.join(seconds)
        return [process.exitcode for process in self.processes]

    def result(self) -> dict[str, Any]:
        """Wait for the end of the program, and return its result."""
        assert self.wait() == [0] * self.world, self.log
        return json.loads((self.rank_folder(0) / "result.json").read_text())
