"""A process that holds the model and answers batches of requests, which the server sends through a
pipe.

So the server can answer probes during a long prediction or after a crash of the model, and several
processes (`serve.processes`), each with its copy of the model, can use several cores.
"""

import gc
import multiprocessing
import signal
import sys
import time
import traceback
from collections.abc import Container, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from argolocal.common.json_text import to_json
from rekindle.errors import DataError, RekindleError
from rekindle.project import user_exceptions
from rekindle.release.predictor import find_warning, open_predictor
from rekindle.release.request_validation import parse
from rekindle.release.watch.reference import convert_instances
from rekindle.release.watch.scores import Counts, count_numbers
from rekindle.serving.openapi import make_schemas
from rekindle.workload import Predictor, read_data_until

LOG = "see the server's log."


@dataclass(frozen=True)
class Answer:
    """The answer to a request."""

    status: int  # HTTP status
    body: bytes  # JSON
    instances: int = 0  # number of predicted instances
    warned: bool = False  # True: the body contains a warning


@dataclass(frozen=True)
class Batch:
    """The answers to the requests of a batch, and their counts for `/metrics`."""

    answers: list[Answer]
    scores: Counts
    features: Counts


@dataclass(frozen=True)
class ModelInfo:
    """The information about the model that the server publishes."""

    example: dict[str, Any]
    schemas: dict[str, Any]  # name → JSON schema, for the request and its parts
    data_until: str  # data cut-off, ISO 8601; empty if unknown
    # software and hardware (device.describe_numerics); empty if the workload has its own predictor
    numerics: str


class ModelProcess:
    """The server's handle of a model process. While the process works on a batch, the next batch
    can wait in its pipe."""

    def __init__(self, max_instances: int, max_batch: int) -> None:
        # spawned, because torch does not survive a fork
        context = multiprocessing.get_context("spawn")
        self.pipe, worker_pipe = context.Pipe()
        self.process = context.Process(
            target=run_model_process, args=(worker_pipe, max_instances, max_batch), daemon=True
        )
        self.process.start()
        worker_pipe.close()
        # two threads: one waits for answers while the other sends
        self.threads = ThreadPoolExecutor(2, "model")

    def load(self, release: Path) -> ModelInfo:
        """Let the process load the model, and wait until it is ready. Raises the error of the
        process if loading fails."""
        self._send(release)
        result = self.receive()
        if isinstance(result, Exception):
            raise result
        return result

    def send(self, bodies: list[bytes], replays: set[int]) -> None:
        """Send a batch, and block while the pipe is full. Raises RekindleError if the process has
        ended.

        `replays`: indices of requests from `rekindle verify`, which are left out of the metrics.
        """
        self._send((bodies, replays))

    def receive(self) -> Any:
        """Wait for the answer to the oldest batch, and return it. Raises RekindleError if the
        process has ended."""
        try:
            return self.pipe.recv()
        except (EOFError, OSError) as error:
            raise self._exit_error() from error

    def _send(self, item: object) -> None:
        try:
            self.pipe.send(item)
        except OSError as error:
            raise self._exit_error() from error

    def _exit_error(self) -> RekindleError:
        self.process.join(1)
        code = self.process.exitcode
        cause = " (killed: out of memory?)" if code == -signal.SIGKILL else ""
        return RekindleError(f"a model process ended with code {code}{cause}; {LOG}")

    def end(self) -> None:
        """Kill the process."""
        self.process.kill()
        self.threads.shutdown(wait=False, cancel_futures=True)


def run_model_process(pipe: Connection, max_instances: int, max_batch: int) -> None:
    """Run a model process: receive the folder of the release, load the model, then answer batches
    until the server closes the pipe."""
    # ignored, because a terminal sends signals to all of its processes, but the server decides when
    # this process ends
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)

    try:
        release: Path = pipe.recv()
        predictor = open_predictor(release, max_batch)
        example = predictor.example()
        _warm_up(predictor, example)
        numerics = getattr(predictor, "numerics", "")
        gc.collect()
        # excludes the loaded objects from garbage collections, which would delay answers by 60 ms
        gc.freeze()
        pipe.send(
            ModelInfo(example, make_schemas(predictor.Request), read_data_until(release), numerics)
        )

        while True:
            bodies, replays = pipe.recv()
            pipe.send(answer_batch(predictor, bodies, max_instances, replays))
    except (EOFError, BrokenPipeError):
        return  # the server has closed the pipe
    except RekindleError as error:
        pipe.send(error)
    except Exception as error:
        traceback.print_exc()
        pipe.send(user_exceptions.as_error(error, "the model cannot be loaded"))


def _warm_up(predictor: Predictor, example: dict[str, Any]) -> None:
    """Predict the example request. If that fails, raises RekindleError with the location in the
    workload's code."""
    where = "the model fails on its own example"
    try:
        request = parse(predictor.Request, to_json(example).encode())
        (predictions,) = predictor.predict([request])
        encode_predictions(request, predictions, find_warning(predictor, request))
    except RekindleError as error:
        raise type(error)(f"{where}: {' '.join(error.lines)}") from error
    except Exception as error:
        traceback.print_exc()
        raise user_exceptions.as_error(error, where) from error


def answer_batch(
    predictor: Predictor, bodies: Sequence[bytes], max_instances: int, replays: Container[int] = ()
) -> Batch:
    """Answer the requests with these bodies. `replays`: indices of the requests that are left out
    of the metrics.

    The model predicts the requests together, but a request that fails does not affect the others.
    """
    results: list[Any] = [parse_request(predictor, body, max_instances) for body in bodies]
    valid = [index for index, result in enumerate(results) if not isinstance(result, Answer)]
    predictions = list[Any]()
    instances = list[Any]()

    for index, (answer, values) in zip(
        valid, predict(predictor, [results[index] for index in valid]), strict=True
    ):
        if values and index not in replays:
            predictions += values
            instances += results[index].instances

        results[index] = answer

    return Batch(results, count_numbers(predictions), count_numbers(convert_instances(instances)))


def parse_request(predictor: Predictor, body: bytes, max_instances: int) -> Any:
    """Return the parsed request, or an Answer with an error if it is invalid."""
    try:
        request = parse(predictor.Request, body)
    except DataError as error:
        return make_failure(422, str(error))
    except Exception as error:  # a validator of the workload failed
        return make_failure(
            500, f"the request could not be validated ({type(error).__name__}); {LOG}", error
        )

    count = len(getattr(request, "instances"))  # noqa: B009
    if count > max_instances:
        return make_failure(
            413,
            f"instances has {count:,} items: at most {max_instances:,} are allowed, send them in"
            " parts.",
        )

    return request


def predict(predictor: Predictor, requests: list[Any]) -> list[tuple[Answer, list[Any]]]:
    """Return (answer, predictions) of each valid request. If the prediction of several requests
    fails, predict each half of them again, until only the failing request is left."""
    try:
        results = predictor.predict(requests) if requests else []
        return [
            (encode_predictions(request, values, find_warning(predictor, request)), values)
            for request, values in zip(requests, results, strict=True)
        ]
    except Exception as error:
        half = len(requests) // 2
        if half:
            return predict(predictor, requests[:half]) + predict(predictor, requests[half:])
        if isinstance(error, DataError):
            return [(make_failure(422, str(error)), [])]

        if isinstance(error, RekindleError):
            reason = str(error)
        else:
            reason = f"the model failed on this request; {LOG}"

        return [(make_failure(500, reason, error), [])]


def encode_predictions(request: Any, predictions: list[Any], warning: str = "") -> Answer:
    """Return the answer with the predictions as JSON. Raises RekindleError that names the instance
    of an invalid prediction."""
    if len(predictions) != len(request.instances):
        raise RekindleError(
            f"predict returned {len(predictions)} predictions for {len(request.instances)}"
            " instances."
        )

    try:
        content = {"predictions": predictions} | ({"warning": warning} if warning else {})
        return Answer(200, to_json(content).encode(), len(predictions), bool(warning))
    except (TypeError, ValueError):
        for index, prediction in enumerate(predictions):
            try:
                to_json(prediction)
            except (TypeError, ValueError) as error:
                raise RekindleError(
                    f"the prediction for instances[{index}] is not JSON ({error}): it must consist"
                    " of numbers, text, lists and objects, without NaN or infinity."
                ) from error

        raise


def make_failure(status: int, reason: str, error: Exception | None = None) -> Answer:
    """Return the answer to a request that has failed, and log `error`."""
    if error:
        sys.stderr.write(
            time.strftime("%Y-%m-%dT%H:%M:%S ") + "".join(traceback.format_exception(error))
        )
        sys.stderr.flush()
    return Answer(status, to_json({"error": reason}).encode())
