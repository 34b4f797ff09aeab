"""The HTTP server around one model: health, limits, metrics, drain. What a request means is the workload's scorer's.

One thread loads the model and then scores, so the event loop always answers probes. Nothing is kept between requests.
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
from rekindle.storage import file_sha256 as sha256
from rekindle.workload import Scorer, load

SECONDS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
SIZES = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 5000, 10_000)
PATIENCE = 4  # a body of up to this many times the limit is read to its end, so that its sender sees the 413
KEEP_ALIVE = 75  # seconds; longer than what load balancers in front keep idle connections (60)


@dataclass(frozen=True)
class Model:
    """A release, loaded and warm."""

    scorer: Scorer
    sha256: str
    version: str


class Refused(Exception):
    """A request that is not answered as asked: HTTP status and the reason."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class Metrics:
    """What `/metrics` shows."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        own: dict[str, Any] = {"registry": self.registry}
        self.requests = Counter("rekindle_requests", "requests to /v1/score by HTTP status", ["status"], **own)
        self.seconds = Histogram("rekindle_request_seconds", "time to answer a request", buckets=SECONDS, **own)
        self.sizes = Histogram("rekindle_batch_size", "records in a scored request", buckets=SIZES, **own)
        self.in_flight = Gauge("rekindle_requests_in_flight", "requests being read or scored", **own)
        self.model = Info("rekindle_model", "the model that serves", **own)


class Server:
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
        """Runs around the serving; uvicorn's own signal handlers know of no drain, so ours take their place."""
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
        """SIGTERM: not ready, but answering until the routes are gone. The second, or while loading: stop now."""
        if self.draining or not self.model:
            self.stop()
        self.draining = True
        asyncio.get_running_loop().call_later(self.inputs.drain_seconds, self.stop)

    def stop(self) -> None:
        """Accept nothing new, let what is in flight end."""
        self.draining = True
        self.http.should_exit = True

    async def live(self, _: Request) -> Response:
        return answer(200, {"status": "live"})

    async def ready(self, _: Request) -> Response:
        model = self.model
        status = "draining" if self.draining else "ready" if model else "loading"
        shown = {"model_sha256": model.sha256, "version": model.version} if model else {}
        return answer(200 if status == "ready" else 503, {"status": status} | shown)

    async def show_metrics(self, _: Request) -> Response:
        return Response(generate_latest(self.metrics.registry), media_type="text/plain; version=0.0.4")

    async def example(self, _: Request) -> Response:
        """A request to try `/v1/score` with."""
        return (
            answer(200, self.model.scorer.example()) if self.model else answer(503, {"error": "the model is loading"})
        )

    async def score(self, request: Request) -> Response:
        began = time.perf_counter()
        headers = {"connection": "close"} if self.draining else {}
        try:
            response = Response(await self.scored(request), 200, headers, "application/json")
        except Refused as refused:
            if refused.status == 503:
                headers["retry-after"] = "1"
            response = answer(refused.status, {"error": str(refused)}, headers)
        self.metrics.requests.labels(response.status_code).inc()
        self.metrics.seconds.observe(time.perf_counter() - began)
        return response

    async def scored(self, request: Request) -> bytes:
        if not self.model:
            raise Refused(503, "the model is still loading: try again soon.")
        if self.in_flight >= self.inputs.max_waiting:
            raise Refused(503, f"{self.in_flight} requests are waiting already: try again soon.")
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
    """Listen at once, load meanwhile, answer until a signal. Raises what made loading fail."""
    listeners = [listen(inputs.host, inputs.port)]
    server = Server(inputs)
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
    """A listening socket. Raises ConfigError if the address is taken or not this machine's."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(
        family, socket.SOCK_STREAM, socket.IPPROTO_TCP
    )  # without a protocol asyncio keeps Nagle on
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
    from rekindle.storage import Store

    began = time.perf_counter()
    store = Store.from_env()
    store.download(prefix.rstrip("/") + "/", folder)
    try:
        release = json.loads((folder / "release.json").read_text())
        damaged = [key for key, wanted in release["files"].items() if sha256(folder / key) != wanted]
        model = (release["workload"], release["model_sha256"], release["version"])
    except (OSError, ValueError, KeyError) as error:
        raise DataError(
            f"{store.uri(prefix)} is not a whole release ({type(error).__name__}: {error}). Release it again."
        ) from error
    if damaged:
        raise DataError(f"{store.uri(prefix)}: {', '.join(damaged)} changed since the release. Release it again.")
    workload, identity, version = model
    scorer = load(workload).scorer(folder)
    scorer.score(scorer.example())
    took = time.perf_counter() - began
    sys.stderr.write(f"serving version {version} (sha256 {identity[:12]}), ready after {took:.1f} s\n")
    return Model(scorer, identity, version)


async def read_body(request: Request, limits: Limits) -> bytes:
    """The request's body, whatever its framing. Raises Refused if it is too large, too slow or cut off."""
    too_large = Refused(413, f"the request is larger than {limits.max_bytes:,} bytes: send it in parts.")
    most = PATIENCE * limits.max_bytes
    if int(request.headers.get("content-length", 0)) > most:
        raise too_large
    body, size = bytearray(), 0
    try:
        async with asyncio.timeout(limits.body_seconds):
            async for chunk in request.stream():
                size += len(chunk)
                if size > most:
                    break
                if size <= limits.max_bytes:
                    body += chunk
    except TimeoutError as error:
        raise Refused(408, f"the request took longer than {limits.body_seconds:g} s to arrive.") from error
    except ClientDisconnect as error:
        raise Refused(400, "the client went away before its request had arrived.") from error
    if size > limits.max_bytes:
        raise too_large
    return bytes(body)


def score(model: Model, body: bytes, limits: Limits) -> tuple[bytes, int]:
    """(the answer's body, number of records) for a request's body. Raises Refused."""
    try:
        request = checked(body, limits)
        scores = model.scorer.score(request)
    except DataError as error:
        raise Refused(422, str(error)) from error
    except RekindleError as error:
        raise Refused(500, str(error)) from error
    except Refused:
        raise
    except Exception as error:
        traceback.print_exc()
        raise Refused(500, "the model failed on this request; the server's log says why.") from error
    result = {"model_sha256": model.sha256, "version": model.version, "scores": scores}
    return json.dumps(result).encode(), len(scores)


def checked(body: bytes, limits: Limits) -> dict[str, Any]:
    """The request as far as it is the same for every workload. Raises DataError or Refused."""
    try:
        request = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise DataError(f"the request is not JSON ({error}).") from error
    if not isinstance(request, dict):
        raise DataError(f'the request is a {type(request).__name__}: it must be an object {{"transactions": [...]}}.')
    for key, most in (("transactions", limits.max_batch), ("history", limits.max_history)):
        rows = request.setdefault(key, [])
        if not isinstance(rows, list):
            raise DataError(f"{key} is a {type(rows).__name__}: it must be a list.")
        if len(rows) > most:
            raise Refused(413, f"{key} has {len(rows):,} rows: at most {most:,} are taken, send them in parts.")
    if not request["transactions"]:
        raise DataError("transactions is missing or empty: it must hold what is to be scored.")
    for key in request.keys() - {"transactions", "history"}:
        near = did_you_mean(key, {"transactions", "history"})
        raise DataError(f'"{key}" is not known here: a request has transactions and history.{near}')
    return request


def answer(status: int, body: dict[str, Any], headers: dict[str, str] | None = None) -> Response:
    return Response(json.dumps(body), status, headers, "application/json")
