"""The toy workload, in trouble: what TROUBLE names happens in the second step, TROUBLE_TIMES times (else always)."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

from steps.errors import ConfigError, DataError, StorageError
from tests.steps.training import toy
from tests.steps.training.toy import Data, Model, evaluate, model, prepare, scorer

__all__ = ["Data", "Model", "evaluate", "model", "prepare", "scorer"]
LEAVES = 7  # of a step


def _raise(error: BaseException) -> None:
    raise error


TROUBLES: dict[str, Any] = {
    "config": lambda: _raise(ConfigError("toy.width is wrong")),
    "data": lambda: _raise(DataError("the toy data is wrong")),
    "storage": lambda: _raise(StorageError("s3://toy is away")),
    "traceback": lambda: _raise(RuntimeError("toy trouble")),
    "exit": lambda: os._exit(3),
    "crash": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "preempted": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "memory": lambda: bytearray(1 << 30),
}


class Fed:
    """The toy's samples, beside a DataLoader with processes of its own, each of which must live."""

    def __init__(self, path: Path) -> None:
        from torch.utils.data import DataLoader

        self.numbers = toy.Numbers(path)
        self.facts = self.numbers.facts
        self.loader = iter(DataLoader(range(10**6), num_workers=2))  # type: ignore[arg-type]

    def __len__(self) -> int:
        return len(self.numbers)

    def batch(self, indices: Any) -> tuple[Any, ...]:
        next(self.loader)
        return self.numbers.batch(indices)


def dataset(path: Path, split: str) -> Any:
    return Fed(path) if os.environ.get("TOY_LOADER") else toy.dataset(path, split)


done = 0


def loss(model: Any, batch: tuple[Any, ...]) -> Any:
    global done
    done += 1
    mark = Path(os.environ["TOY_GATES"]) / "troubles"
    if (name := os.environ.get("TROUBLE")) and (done > LEAVES or mark.exists()):
        with open(mark, "a") as file:
            file.write(f"{os.getpid()}\n")
        if len(mark.read_text().splitlines()) <= int(os.environ.get("TROUBLE_TIMES", 1000)):
            sys.stderr.write(f"trouble: {name}\n")
            sys.stderr.flush()
            TROUBLES[name]()
    return toy.loss(model, batch)
