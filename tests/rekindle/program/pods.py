"""Start the real processes of a program's run: the coordinator, and the agent of each pod."""

import importlib
import json
import multiprocessing
import os
import re
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil

from argolocal.common.linux import die_with_parent
from rekindle.kubernetes_names import PROGRAM_MODULES, REKINDLE_SECRET
from rekindle.program.spec import ProgramSpec
from tests.ports import free_port
from tests.waiting import until

ROOT = Path(__file__).parents[3]
PROGRAMS = ROOT / "tests/programs"


# modules that the forkserver, which forks the pods, has imported
_preloaded: list[str] = []


@dataclass
class Pod:
    """The first process of a pod, and the output of this process."""

    name: str
    process: BaseProcess
    log: Path

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    @property
    def program(self) -> list[psutil.Process]:
        """The processes of the program on this pod."""
        children = psutil.Process(self.process.pid).children()
        # the first child is the process that forks the program's processes
        return sorted(children, key=lambda child: child.create_time())[1:]

    def send(self, signal_number: signal.Signals) -> None:
        assert self.process.pid
        os.kill(self.process.pid, signal_number)

    def wait(self, seconds: float = 90) -> int:
        self.process.join(seconds)
        assert self.process.exitcode is not None, f"{self.name} still runs:\n{self.output}"
        return self.process.exitcode


def run_module(module: str, flags: list[str], environment: dict[str, str], log: str) -> None:
    """Run the module of a pod in this process, which was forked from a process that has loaded
    torch."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    # write to the descriptors that the processes of the program replace by their pipes
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)

    die_with_parent(os.getppid())
    os.chdir(Path(log).parent)
    os.environ.update(environment)
    importlib.import_module(module)
    sys.exit(sys.modules[module].main(flags))


def preload_modules(names: Iterable[str]) -> None:
    """Let the forkserver import modules, in addition to the modules that it has imported."""
    missing = [name for name in names if name not in _preloaded]
    if missing:
        _preloaded.extend(missing)
        # torch reads this variable when it is imported, before the pods get their environment
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        forkserver._forkserver._stop()  # type: ignore[attr-defined]
        forkserver.set_forkserver_preload(list(_preloaded))


class Pods:
    """Starts the pods of one run, and kills them at the end."""

    def __init__(
        self,
        environment: dict[str, str],
        folder: Path,
        command: list[str],
        *,
        preload: Sequence[str] = (),
        program: dict[str, Any] | None = None,
        **inputs: Any,
    ) -> None:
        self.folder = folder
        self.prefix = f"runs/{folder.parent.name}-{folder.name}"
        section = {"command": command, **(program or {})}
        values = {
            "program": json.dumps(section),
            "workload": "tests.rekindle.program.slopes",
            "dataset": "none",
            "digest": "",
            "out": f"{self.prefix}/model",
            "checkpoints": f"{self.prefix}/checkpoints",
            "workers": 1,
            "max_workers": inputs.get("workers", 1),
            **inputs,
        }
        self.flags = [f"--{name.replace('_', '-')}={value}" for name, value in values.items()]
        self.spec = ProgramSpec.from_flags(self.flags)
        port = str(free_port())
        self.environment = {
            **environment,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            # the training operator sets these variables for the elasticPolicy of a PyTorchJob
            "PET_RDZV_BACKEND": "c10d",
            "PET_RDZV_ENDPOINT": f"127.0.0.2:{port}",
            "OMP_NUM_THREADS": "1",
            "REKINDLE_CACHE": str(folder / "cache"),
            REKINDLE_SECRET: "0123456789" * 4,
        }
        self.pods: list[Pod] = []
        self.context = multiprocessing.get_context("forkserver")
        preload_modules(["tests.rekindle.program.loaded", *preload])
        folder.mkdir(parents=True, exist_ok=True)

    def coordinator(self) -> Pod:
        return self._start("coordinator", PROGRAM_MODULES.coordinator, {})

    def agent(self, pod_number: int, **environment: str) -> Pod:
        """Start the agent of a pod with an address of its own."""
        name = f"worker-{pod_number}"
        variables = {"POD_NAME": name, "POD_IP": f"127.0.0.{pod_number + 2}", **environment}
        return self._start(name, PROGRAM_MODULES.launcher, variables)

    def start(self, agents: int) -> list[Pod]:
        """Start the coordinator and the agents, and return the agents."""
        self.coordinator()
        return [self.agent(number) for number in range(agents)]

    def _start(self, name: str, module: str, environment: dict[str, str]) -> Pod:
        log = self.folder / f"{len(self.pods)}-{name}.log"
        log.touch()
        process = self.context.Process(
            target=run_module,
            args=(module, self.flags, {**self.environment, **environment}, str(log)),
        )
        process.start()
        self.pods.append(Pod(name, process, log))
        return self.pods[-1]

    def logs(self) -> str:
        return "\n".join(f"== {pod.log.name}\n{pod.output}" for pod in self.pods)

    def kill(self, pods: Iterable[Pod]) -> None:
        """Kill the given pods at the same moment."""
        for pod in pods:
            pod.process.kill()
        for pod in pods:
            pod.process.join()

    def checkpoint_folders(self, name: str = "*") -> list[Path]:
        """Return the checkpoint folders on the disks of the pods with the given name."""
        return list(self.folder.glob(f"cache/programs/*/{name}"))

    def wait_for(self, text: str, seconds: float = 60) -> None:
        until(
            f"the output {text!r}",
            lambda: re.search(text, self.logs()),
            seconds,
            evidence=self.logs,
        )

    def start_steps(self) -> list[int]:
        """Return the steps at which the generations start, from the output of rank 0, sorted."""
        steps = re.findall(r"rank 0 of \d starts at step (\d+)", self.logs())
        return sorted(map(int, steps))

    def close(self) -> None:
        self.kill(self.pods)


StartPods = Callable[..., Pods]
