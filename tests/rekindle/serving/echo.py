"""A workload whose predictor follows instructions in the request, for tests of the server."""

import fcntl
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field

from rekindle.errors import DataError
from rekindle.gate import Metric
from rekindle.sections import Section
from rekindle.workload import DataConfig

Data = DataConfig
Model = Section
metrics = (Metric("loss", max),)
prepare = dataset = model = loss = examples = None


class Instance(BaseModel):
    id: int | str
    sleep: float = Field(0, ge=0)
    # path of a file: the prediction creates GATE.PID and waits until the file is unlocked
    gate: str = ""
    bad: int | None = None
    bug: bool = False
    killed: bool = False
    answer: float | None = None
    warning: str = ""


class Request(BaseModel):
    instances: list[Instance] = Field(min_length=1)


class Predictor:
    Request = Request

    def __init__(self, release: Path) -> None:
        self.words = (release / "state" / "words.txt").read_text()

    def example(self) -> dict[str, Any]:
        return {
            "instances": [
                {"id": 0, "gate": os.environ.get("ECHO_GATE", ""), "bug": "ECHO_BUG" in os.environ}
            ]
        }

    def predict(self, requests: Sequence[Request]) -> list[list[Any]]:
        for index, instance in enumerate(i for request in requests for i in request.instances):
            time.sleep(instance.sleep)
            if instance.gate:
                Path(f"{instance.gate}.{os.getpid()}").touch()
                with open(instance.gate) as gate:
                    fcntl.flock(gate, fcntl.LOCK_SH)

            if instance.bad is not None:
                raise DataError(f"instances[{index}].bad is {instance.bad}: it must not be set.")
            if instance.bug:
                raise KeyError("a bug in the workload")
            if instance.killed:
                os.kill(os.getpid(), signal.SIGKILL)

        loaded = sorted({"torch", "mlflow", "polars", "starlette", "boto3"} & sys.modules.keys())
        about = {"loaded": loaded, "together": len(requests), "pid": os.getpid()}

        return [
            [
                i.answer * float("inf") if i.answer is not None else {"id": i.id} | about
                for i in request.instances
            ]
            for request in requests
        ]

    def warn(self, request: Request) -> str:
        return " ".join(instance.warning for instance in request.instances if instance.warning)


def predictor(release: Path) -> Predictor:
    return Predictor(release)
