"""The HTTP server of one model: health, limits, metrics, drain. The workload's scorer interprets the records.

One thread loads the model and then scores, so the event loop always answers probes. No state is kept between requests.
"""

import asyncio
import json
import signal
import socket
import sys
import time
import traceback
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import uvicorn
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, generate_latest
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from rekindle.errors import ConfigError, DataError, RekindleError, did_you_mean
from rekindle.serving.config import Limits, ServerSettings
from rekindle.serving.release import download
from rekindle.storage import Store
from rekindle.workload import Scorer, load

SECONDS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
SIZES = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 5000, 10_000)
OVERSIZE = 4  # a body up to this many times the limit is read to its end, so that the client sees the 413
KEEP_ALIVE = 75  # seconds; longer than load balancers keep idle connections (60)


@dataclass(frozen=True)
class Model:
    """A release, loaded and warm."""

    scorer: Scorer
    sha256: str
    version: str


class Refusal(Exception):
    """A request that gets no scores: the HTTP status and the reason."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class Metrics:
    """What `/metrics` shows."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        registered: dict[str, Any] = {"registry": self.registry}
        self.requests = Counter("rekindle_requests", "requests to /v1/score by HTTP status", ["status"], **registered)
        self.seconds = Histogram("rekindle_request_seconds", "time to answer a request", buckets=SECONDS, **registered)
        self.sizes = Histogram("rekindle_batch_size", "records in a scored request", buckets=SIZES, **registered)
        self.in_flight = Gauge("rekindle_requests_in_flight", "requests being read or scored", **registered)
        self.model = Info("rekindle_model", "the model that serves", **registered)


class ModelServer:
    """One model behind HTTP, from the first probe to the end of the drain."""

    def __init__(self, inputs: ServerSettings) -> None:
        self.inputs = inputs
        self.metrics = Metrics()
        self.model: Model | None = None
        self.failure: Exception | None = None
        self.draining = False
        self.in_flight = 0
        self.worker = ThreadPoolExecutor(1, "model")
        routes = [
            Route("/health/live", self.live),
            Route("/health/ready", self.ready),
            Route("/metrics", self.show_metrics),
            Route("/v1/score", self.score, methods=["POST"]),
            Route("/v1/example", self.example),
        ]
        self.http = uvicorn.Server(
            uvicorn.Config(
                Starlette(routes=routes, lifespan=self.lifespan),
                log_level="warning",
                access_log=False,
                timeout_keep_alive=KEEP_ALIVE,
                timeout_graceful_shutdown=max(1, round(inputs.grace_seconds)),
            )
        )

    @asynccontextmanager
    async def lifespan(self, _: Starlette) -> AsyncIterator[None]:
        """Load the model, and replace uvicorn's signal handlers, which cannot drain."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self.drain)
        loop.add_signal_handler(signal.SIGINT, self.stop)
        loading = asyncio.create_task(self.load())
        yield
        await loading

    async def load(self) -> None:
        try:
            model: Model = await self.in_thread(load_model, self.inputs.model, self.inputs.workdir / "release")
        except Exception as error:
            self.failure = error
            self.stop()
        else:
            self.model = model
            self.metrics.model.info({"sha256": model.sha256, "version": model.version})

    async def in_thread(self, function: Any, *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self.worker, function, *arguments)

    def drain(self) -> None:
        """SIGTERM: not ready, but still answering for `drain_seconds`. A second one, or one while loading: stop now."""
        if self.draining or not self.model:
            self.stop()
        self.draining = True
        asyncio.get_running_loop().call_later(self.inputs.drain_seconds, self.stop)

    def stop(self) -> None:
        """Accept no new connections; finish the requests in flight."""
        self.draining = True
        self.http.should_exit = True

    async def live(self, _: Request) -> Response:
        return answer(200, {"status": "live"})

    async def ready(self, _: Request) -> Response:
        model = self.model
        status = "draining" if self.draining else "ready" if model else "loading"
        identity = {"model_sha256": model.sha256, "version": model.version} if model else {}
        return answer(200 if status == "ready" else 503, {"status": status} | identity)

    async def show_metrics(self, _: Request) -> Response:
        return Response(generate_latest(self.metrics.registry), media_type="text/plain; version=0.0.4")

    async def example(self, _: Request) -> Response:
        """An example request for `/v1/score`."""
        return (
            answer(200, self.model.scorer.example()) if self.model else answer(503, {"error": "the model is loading"})
        )

    async def score(self, request: Request) -> Response:
        start = time.perf_counter()
        headers = {"connection": "close"} if self.draining else {}
        try:
            response = Response(await self.scored(request), 200, headers, "application/json")
        except Refusal as refusal:
            if refusal.status == 503:
                headers["retry-after"] = "1"
            response = answer(refusal.status, {"error": str(refusal)}, headers)
        self.metrics.requests.labels(response.status_code).inc()
        self.metrics.seconds.observe(time.perf_counter() - start)
        return response

    async def scored(self, request: Request) -> bytes:
        if not self.model:
            raise Refusal(503, "the model is still loading: try again soon.")
        if self.in_flight >= self.inputs.max_waiting:
            raise Refusal(503, f"{self.in_flight} requests are waiting already: try again soon.")
        self.in_flight += 1
        self.metrics.in_flight.set(self.in_flight)
        try:
            body = await read_body(request, self.inputs)
            result, size = await self.in_thread(score, self.model, body, self.inputs)
        finally:
            self.in_flight -= 1
            self.metrics.in_flight.set(self.in_flight)
        self.metrics.sizes.observe(size)
        return result


def serve(inputs: ServerSettings) -> None:
    """Listen at once, load in the background, answer until a signal. Raises the error that loading failed with."""
    listeners = [listen(inputs.host, inputs.port)]
    server = ModelServer(inputs)
    host, port = listeners[0].getsockname()[:2]
    address = ip_address(host)
    if not (address.is_loopback or address.is_unspecified):  # `kubectl port-forward` comes from within the pod
        listeners.append(listen("127.0.0.1" if address.version == 4 else "::1", port))
    sys.stderr.write(f"listening on http://{f'[{host}]' if ':' in host else host}:{port}\n")
    server.http.run(sockets=listeners)
    server.worker.shutdown(wait=False, cancel_futures=True)
    if server.failure:
        raise server.failure


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises ConfigError if the address is in use or not local."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # without IPPROTO_TCP asyncio leaves Nagle's algorithm on
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(2048)
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"cannot listen on {host}:{port} ({error}): stop what listens there, or choose another --port or --host."
        ) from error
    return listener


def load_model(prefix: str, folder: Path) -> Model:
    """The release below `prefix` in the object store, warm. Raises StorageError or DataError."""
    start = time.perf_counter()
    release = download(Store.from_env(), prefix, folder)
    sha256, version = release["model_sha256"], release["version"]
    workload: Any = load(release["workload"])
    scorer = workload.scorer(folder)
    scorer.score(scorer.example())
    seconds = time.perf_counter() - start
    sys.stderr.write(f"serving version {version} (sha256 {sha256[:12]}), ready after {seconds:.1f} s\n")
    return Model(scorer, sha256, version)


async def read_body(request: Request, limits: Limits) -> bytes:
    """The request's body, whatever its framing. Raises Refusal if it is too large, too slow or cut off."""
    too_large = Refusal(413, f"the request is larger than {limits.max_bytes:,} bytes: send it in parts.")
    read_at_most = OVERSIZE * limits.max_bytes
    if int(request.headers.get("content-length", 0)) > read_at_most:
        raise too_large
    body, size = bytearray(), 0
    try:
        async with asyncio.timeout(limits.body_seconds):
            async for chunk in request.stream():
                size += len(chunk)
                if size > read_at_most:
                    break
                if size <= limits.max_bytes:
                    body += chunk
    except TimeoutError as error:
        raise Refusal(408, f"the request took longer than {limits.body_seconds:g} s to arrive.") from error
    except ClientDisconnect as error:
        raise Refusal(400, "the client went away before its request had arrived.") from error
    if size > limits.max_bytes:
        raise too_large
    return bytes(body)


def score(model: Model, body: bytes, limits: Limits) -> tuple[bytes, int]:
    """(the answer's body, number of records) for a request's body. Raises Refusal."""
    try:
        request = parse_request(body, limits)
        scores = model.scorer.score(request)
    except DataError as error:
        raise Refusal(422, str(error)) from error
    except RekindleError as error:
        raise Refusal(500, str(error)) from error
    except Refusal:
        raise
    except Exception as error:
        traceback.print_exc()
        raise Refusal(500, "the model failed on this request; the server's log says why.") from error
    result = {"model_sha256": model.sha256, "version": model.version, "scores": scores}
    return json.dumps(result).encode(), len(scores)


def parse_request(body: bytes, limits: Limits) -> dict[str, Any]:
    """The parts of a request that all workloads share. Raises DataError or Refusal."""
    try:
        request = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise DataError(f"the request is not JSON ({error}).") from error
    if not isinstance(request, dict):
        raise DataError(f'the request is a {type(request).__name__}: it must be an object {{"transactions": [...]}}.')
    for key, max_rows in (("transactions", limits.max_batch), ("history", limits.max_history)):
        rows = request.setdefault(key, [])
        if not isinstance(rows, list):
            raise DataError(f"{key} is a {type(rows).__name__}: it must be a list.")
        if len(rows) > max_rows:
            raise Refusal(413, f"{key} has {len(rows):,} rows: at most {max_rows:,} are taken, send them in parts.")
    if not request["transactions"]:
        raise DataError("transactions is missing or empty: it must hold what is to be scored.")
    for key in request.keys() - {"transactions", "history"}:
        suggestion = did_you_mean(key, {"transactions", "history"})
        raise DataError(f'"{key}" is not known here: a request has transactions and history.{suggestion}')
    return request


def answer(status: int, body: dict[str, Any], headers: dict[str, str] | None = None) -> Response:
    return Response(json.dumps(body), status, headers, "application/json")
