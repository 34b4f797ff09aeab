"""A process that holds the model and answers batches of requests; the server talks to it through a pipe.

So neither a long prediction nor a crash of the model keeps the server from answering probes, and `serve.processes` of
them use as many cores, each with the whole of the model.
"""

import gc
import json
import multiprocessing
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rekindle import user_code
from rekindle.errors import DataError, RekindleError
from rekindle.release.predictor import InstancePredictor, open_predictor
from rekindle.release.validation import parse
from rekindle.release.watch.reference import features
from rekindle.release.watch.scores import Counts, counted
from rekindle.serving.openapi import schemas
from rekindle.workload import Predictor, data_until

LOG = "the server's log says why."


@dataclass(frozen=True)
class Answer:
    """The answer to one request: an HTTP status and a JSON body; how many instances were predicted."""

    status: int
    body: bytes
    instances: int = 0


@dataclass(frozen=True)
class Batch:
    """The answers to requests that were predicted together, and what was counted of them."""

    answers: list[Answer]
    scores: Counts
    features: Counts


@dataclass(frozen=True)
class ModelFacts:
    """What the server tells about a model without having it."""

    example: dict[str, Any]
    schemas: dict[str, Any]  # JSON schemas of a request and its parts, by name
    data_until: str  # ISO 8601; empty if its dataset does not say
    together: bool  # whether several requests at once take less time than one after the other


class ModelProcess:
    """The server's end of a process: it works on one batch, and the next one may wait in its pipe."""

    def __init__(self, release: Path, max_instances: int) -> None:
        context = multiprocessing.get_context("spawn")  # torch does not survive a fork
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=work, args=(theirs, release, max_instances), daemon=True)
        self.process.start()
        theirs.close()
        self.threads = ThreadPoolExecutor(2, "model")  # one waits for answers while the other sends

    def loaded(self) -> ModelFacts:
        """Blocks until the model is ready. Raises the error that loading ended with."""
        result = self._received()
        if isinstance(result, Exception):
            raise result
        return result

    def send(self, bodies: list[bytes]) -> None:
        """Give the process a batch; blocks while the pipe is full. Raises RekindleError if the process ended."""
        try:
            self.pipe.send(bodies)
        except OSError as error:
            raise self._ended() from error

    def batch(self) -> Batch:
        """Blocks until the oldest batch is answered. Raises RekindleError if the process ended."""
        return self._received()

    def _received(self) -> Any:
        try:
            return self.pipe.recv()
        except (EOFError, OSError) as error:
            raise self._ended() from error

    def _ended(self) -> RekindleError:
        self.process.join(1)
        return RekindleError(
            f"a process that holds the model ended with code {self.process.exitcode}"
            f"{' (killed: out of memory?)' if self.process.exitcode == -signal.SIGKILL else ''}; {LOG}"
        )

    def end(self) -> None:
        """Kill the process: nobody waits for its answers any more."""
        self.process.kill()
        self.threads.shutdown(wait=False, cancel_futures=True)


def work(pipe: Connection, release: Path, max_instances: int) -> None:
    """The process: load, say so, then answer batches until the server closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes of a terminal; the server decides
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        predictor = open_predictor(release)
        example = predictor.example()
        _warm_up(predictor, example)
        together = not isinstance(predictor, InstancePredictor)
        gc.collect()
        gc.freeze()  # what is loaded stays: looking through it takes 60 ms, in which nobody is answered
        pipe.send(ModelFacts(example, schemas(predictor.Request), data_until(release), together))
        while True:
            pipe.send(answered(predictor, pipe.recv(), max_instances))
    except (EOFError, BrokenPipeError):
        return  # the server has ended
    except RekindleError as error:
        pipe.send(error)
    except Exception as error:
        traceback.print_exc()
        pipe.send(user_code.as_error(error, "the model cannot be loaded"))


def _warm_up(predictor: Predictor, example: dict[str, Any]) -> None:
    """Predict the example. Raises RekindleError with the place in the workload's code if that fails."""
    where = "the model fails on its own example"
    try:
        request = parse(predictor.Request, json.dumps(example).encode())
        (predictions,) = predictor.predict([request])
        encoded(request, predictions)
    except RekindleError as error:
        raise type(error)(f"{where}: {error}") from error
    except Exception as error:
        traceback.print_exc()
        raise user_code.as_error(error, where) from error


def answered(predictor: Predictor, bodies: Sequence[bytes], max_instances: int) -> Batch:
    """An answer to each body; the requests are predicted together, and one that fails harms no other."""
    results: list[Any] = [parsed(predictor, body, max_instances) for body in bodies]
    places = [place for place, result in enumerate(results) if not isinstance(result, Answer)]
    predictions, instances = list[Any](), list[Any]()
    for place, (answer, values) in zip(places, predicted(predictor, [results[at] for at in places]), strict=True):
        if values:
            predictions += values
            instances += results[place].instances
        results[place] = answer
    return Batch(results, counted(predictions), counted(features(instances)))


def parsed(predictor: Predictor, body: bytes, max_instances: int) -> Any:
    """The request, or the answer that refuses it."""
    try:
        request = parse(predictor.Request, body)
    except DataError as error:
        return failure(422, str(error))
    except Exception as error:  # of a validator of the workload
        return failure(500, f"the request could not be checked ({type(error).__name__}); {LOG}", error)
    if (count := len(getattr(request, "instances"))) > max_instances:  # noqa: B009
        return failure(413, f"instances has {count:,}: at most {max_instances:,} are taken, send them in parts.")
    return request


def predicted(predictor: Predictor, requests: list[Any]) -> list[tuple[Answer, list[Any]]]:
    """The answers to requests that are right, each with its predictions; after a failure each is tried alone."""
    try:
        results = predictor.predict(requests) if requests else []
        return [(encoded(request, values), values) for request, values in zip(requests, results, strict=True)]
    except Exception as error:
        if len(requests) > 1:
            return [answer for request in requests for answer in predicted(predictor, [request])]
        if isinstance(error, DataError):
            return [(failure(422, str(error)), [])]
        reason = str(error) if isinstance(error, RekindleError) else f"the model failed on this request; {LOG}"
        return [(failure(500, reason, error), [])]


def encoded(request: Any, predictions: list[Any]) -> Answer:
    """The predictions as JSON. Raises RekindleError that names the instance whose prediction is none."""
    if len(predictions) != len(request.instances):
        raise RekindleError(f"{len(predictions)} predictions came for {len(request.instances)} instances.")
    try:
        body = json.dumps({"predictions": predictions}, allow_nan=False).encode()
        return Answer(200, body, len(predictions))
    except (TypeError, ValueError):
        for place, prediction in enumerate(predictions):
            try:
                json.dumps(prediction, allow_nan=False)
            except (TypeError, ValueError) as error:
                raise RekindleError(
                    f"the prediction for instances[{place}] is no JSON ({error}): the model gives NaN or infinity, or "
                    "`predict` gives something else than numbers, text, lists and objects."
                ) from error
        raise


def failure(status: int, reason: str, error: Exception | None = None) -> Answer:
    """The answer to a request without predictions; `error` goes to the log."""
    if error:
        sys.stderr.write(time.strftime("%Y-%m-%dT%H:%M:%S ") + "".join(traceback.format_exception(error)))
        sys.stderr.flush()
    return Answer(status, json.dumps({"error": reason}).encode())
