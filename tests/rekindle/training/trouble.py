"""The toy workload with failures: each process ends like the next word of TROUBLE, after TROUBLE_AT
micro-batches."""

import os
import signal
from pathlib import Path
from typing import Any

from rekindle.errors import ConfigError, DataError, StorageError
from tests.rekindle.training import toy
from tests.rekindle.training.toy import Data, Model, examples, metrics, model, predictor, prepare

__all__ = ["Data", "Model", "examples", "metrics", "model", "predictor", "prepare"]
STEP = 7  # micro-batches


def _raise_error(error: BaseException) -> None:
    raise error


def _fill_memory() -> None:
    kept_memory = [b"x" * (1 << 20)]
    while True:
        kept_memory.append(bytes(kept_memory[0]) + b"x")


TROUBLES: dict[str, Any] = {
    "config": lambda: _raise_error(ConfigError("toy.width is wrong")),
    "data": lambda: _raise_error(DataError("the toy data is wrong")),
    "storage": lambda: _raise_error(StorageError("s3://toy is away")),
    "reshape": lambda: __import__("torch").zeros(3),
    "traceback": lambda: _raise_error(RuntimeError("toy trouble")),
    "cut": lambda: _raise_error(ConnectionResetError("reset by the feature store")),
    "exit": lambda: os._exit(3),
    "crash": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "preempted": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "told": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "hoard": _fill_memory,
}


class Fed:
    """The samples of the toy workload, read by a DataLoader whose processes must all be alive."""

    def __init__(self, path: Path) -> None:
        from torch.utils.data import DataLoader

        self.numbers = toy.Numbers(path)
        self.loader = iter(DataLoader(range(10**6), num_workers=2))  # type: ignore[arg-type]

    def __len__(self) -> int:
        return len(self.numbers)

    def batch(self, indices: Any) -> tuple[Any, ...]:
        next(self.loader)
        return self.numbers.batch(indices)


def dataset(path: Path, split: str) -> Any:
    if os.environ.get("TOY_LOADER"):
        return Fed(path)
    return toy.dataset(path, split)


done = 0


def loss(model: Any, batch: tuple[Any, ...]) -> Any:
    global done
    troubles = os.environ.get("TROUBLE", "").split()
    if troubles and done == int(os.environ.get("TROUBLE_AT", STEP)):
        with open(Path(os.environ["TOY_GATES"]) / "lives", "a+") as file:
            file.seek(0)
            life = len(file.read())
            file.write("x")
            file.flush()
            if life < len(troubles) and (wrong := TROUBLES[troubles[life]]()) is not None:
                return wrong
    done += 1
    return toy.loss(model, batch)
