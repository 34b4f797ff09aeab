"""A model process holds the model and answers batches of requests, which the server sends through a
pipe.

Since the model runs in another process, the server can answer probes during a long prediction or
after a crash of the model. Several processes (`serve.processes`), each with its copy of the model,
can use several cores.
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
from rekindle.release.request_validation import parse_body
from rekindle.release.watch.reference import convert_instances
from rekindle.release.watch.scores import Counts, count_numbers
from rekindle.serving.openapi import make_schemas
from rekindle.workload import Predictor, read_data_until

LOG_HINT = "see the server's log."


@dataclass(frozen=True)
class Answer:
    """The answer to a request."""

    status: int  # HTTP status
    body: bytes  # JSON
    # number of predicted instances
    instances: int = 0
    # True if the body contains a warning
    warned: bool = False


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
    # name → JSON schema, for the request and its parts
    schemas: dict[str, Any]
    # data cut-off, ISO 8601; empty if unknown
    data_until: str
    # software and hardware (device.describe_numerics); empty if the workload has its own predictor
    numerics: str


class ModelProcess:
    """The server's handle of a model process. While the process works on a batch, the next batch
    can wait in the process's pipe."""

    def __init__(self, max_instances: int, max_batch: int) -> None:
        # spawn the process, because torch does not survive a fork
        spawn_context = multiprocessing.get_context("spawn")
        self.pipe, worker_pipe = spawn_context.Pipe()
        self.process = spawn_context.Process(
            target=run_model_process, args=(worker_pipe, max_instances, max_batch), daemon=True
        )
        self.process.start()
        worker_pipe.close()
        # with two threads, one thread can wait for answers while the other thread sends
        self.threads = ThreadPoolExecutor(2, "model")

    def load(self, release_folder: Path) -> ModelInfo:
        """Let the process load the model, and wait until the process is ready. Raises the error of
        the process if loading fails."""
        self._send(release_folder)
        info_or_error = self.receive()
        if isinstance(info_or_error, Exception):
            raise info_or_error
        return info_or_error

    def send(self, request_bodies: list[bytes], replay_indices: set[int]) -> None:
        """Send a batch to the process, and block while the pipe is full. Raises RekindleError if
        the process has ended.

        `replay_indices`: indices of requests from `rekindle verify`, which are left out of the
        metrics.
        """
        self._send((request_bodies, replay_indices))

    def receive(self) -> Any:
        """Wait for the answer to the oldest batch, and return it. Raises RekindleError if the
        process has ended."""
        try:
            return self.pipe.recv()
        except (EOFError, OSError) as error:
            raise self._make_exit_error() from error

    def _send(self, pipe_message: object) -> None:
        try:
            self.pipe.send(pipe_message)
        except OSError as error:
            raise self._make_exit_error() from error

    def _make_exit_error(self) -> RekindleError:
        self.process.join(1)
        exit_code = self.process.exitcode
        exit_cause = " (killed: out of memory?)" if exit_code == -signal.SIGKILL else ""
        return RekindleError(f"a model process ended with code {exit_code}{exit_cause}; {LOG_HINT}")

    def end(self) -> None:
        """Kill the process."""
        self.process.kill()
        self.threads.shutdown(wait=False, cancel_futures=True)


def run_model_process(server_pipe: Connection, max_instances: int, max_batch: int) -> None:
    """Run a model process: receive the folder of the release, load the model, then answer batches
    until the server closes the pipe."""
    # ignore the signal, because a terminal sends signals to all of its processes, but the server
    # decides when this process ends
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)

    try:
        release_folder: Path = server_pipe.recv()
        predictor = open_predictor(release_folder, max_batch)
        example_request = predictor.example()
        _warm_up_model(predictor, example_request)
        numerics = getattr(predictor, "numerics", "")
        gc.collect()
        # exclude the loaded objects from garbage collections, which would delay answers by 60 ms
        gc.freeze()
        server_pipe.send(
            ModelInfo(
                example_request,
                make_schemas(predictor.Request),
                read_data_until(release_folder),
                numerics,
            )
        )

        while True:
            request_bodies, replay_indices = server_pipe.recv()
            server_pipe.send(answer_batch(predictor, request_bodies, max_instances, replay_indices))
    except (EOFError, BrokenPipeError):
        # the server has closed the pipe
        return
    except RekindleError as error:
        server_pipe.send(error)
    except Exception as error:
        traceback.print_exc()
        server_pipe.send(user_exceptions.convert_exception(error, "the model cannot be loaded"))


def _warm_up_model(predictor: Predictor, example_request: dict[str, Any]) -> None:
    """Predict the example request. If the prediction fails, raises RekindleError with the location
    in the workload's code."""
    failure = "the model fails on its own example"
    try:
        request = parse_body(predictor.Request, to_json(example_request).encode())
        (predictions,) = predictor.predict([request])
        encode_predictions(request, predictions, find_warning(predictor, request))
    except RekindleError as error:
        raise type(error)(f"{failure}: {' '.join(error.lines)}") from error
    except Exception as error:
        traceback.print_exc()
        raise user_exceptions.convert_exception(error, failure) from error


def answer_batch(
    predictor: Predictor,
    request_bodies: Sequence[bytes],
    max_instances: int,
    replay_indices: Container[int] = (),
) -> Batch:
    """Answer the requests with the given bodies. `replay_indices`: indices of the requests that are
    left out of the metrics.

    The model predicts the requests together, but a request that fails does not affect the other
    requests.
    """
    # answers to invalid requests, and valid requests until they are answered
    requests_or_answers: list[Any] = [
        parse_request(predictor, request_body, max_instances) for request_body in request_bodies
    ]
    valid_indices = [
        index
        for index, request_or_answer in enumerate(requests_or_answers)
        if not isinstance(request_or_answer, Answer)
    ]
    counted_predictions = list[Any]()
    counted_instances = list[Any]()

    for index, (answer, request_predictions) in zip(
        valid_indices,
        predict(predictor, [requests_or_answers[index] for index in valid_indices]),
        strict=True,
    ):
        if request_predictions and index not in replay_indices:
            counted_predictions += request_predictions
            counted_instances += requests_or_answers[index].instances

        requests_or_answers[index] = answer

    return Batch(
        requests_or_answers,
        count_numbers(counted_predictions),
        count_numbers(convert_instances(counted_instances)),
    )


def parse_request(predictor: Predictor, request_body: bytes, max_instances: int) -> Any:
    """Return the parsed request, or an Answer with an error if the request is invalid."""
    try:
        request = parse_body(predictor.Request, request_body)
    except DataError as error:
        return make_failure_answer(422, str(error))
    except Exception as error:
        # a validator of the workload failed
        return make_failure_answer(
            500, f"the request could not be validated ({type(error).__name__}); {LOG_HINT}", error
        )

    instance_count = len(getattr(request, "instances"))  # noqa: B009
    if instance_count > max_instances:
        return make_failure_answer(
            413,
            f"instances has {instance_count:,} items: at most {max_instances:,} are allowed, send"
            " them in parts.",
        )

    return request


def predict(predictor: Predictor, requests: list[Any]) -> list[tuple[Answer, list[Any]]]:
    """Return (answer, predictions) of each valid request. If the prediction of several requests
    fails, predict each half of the requests again, until only the failing request is left."""
    try:
        predictions_by_request = predictor.predict(requests) if requests else []
        return [
            (
                encode_predictions(request, request_predictions, find_warning(predictor, request)),
                request_predictions,
            )
            for request, request_predictions in zip(requests, predictions_by_request, strict=True)
        ]
    except Exception as error:
        half_count = len(requests) // 2
        if half_count:
            return predict(predictor, requests[:half_count]) + predict(
                predictor, requests[half_count:]
            )
        if isinstance(error, DataError):
            return [(make_failure_answer(422, str(error)), [])]

        if isinstance(error, RekindleError):
            error_text = str(error)
        else:
            error_text = f"the model failed on this request; {LOG_HINT}"

        return [(make_failure_answer(500, error_text, error), [])]


def encode_predictions(request: Any, predictions: list[Any], warning_text: str = "") -> Answer:
    """Return the answer with the predictions as JSON. Raises RekindleError that names the instance
    of an invalid prediction."""
    if len(predictions) != len(request.instances):
        raise RekindleError(
            f"predict returned {len(predictions)} predictions for {len(request.instances)}"
            " instances."
        )

    try:
        answer_content = {"predictions": predictions} | (
            {"warning": warning_text} if warning_text else {}
        )
        return Answer(200, to_json(answer_content).encode(), len(predictions), bool(warning_text))
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


def make_failure_answer(http_status: int, reason: str, error: Exception | None = None) -> Answer:
    """Return the answer to a request that has failed, and log `error`."""
    if error:
        sys.stderr.write(
            time.strftime("%Y-%m-%dT%H:%M:%S ") + "".join(traceback.format_exception(error))
        )
        sys.stderr.flush()
    return Answer(http_status, to_json({"error": reason}).encode())
