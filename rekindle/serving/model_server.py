"""The HTTP server of a model: the REST API of TensorFlow Serving and KServe (v1), with probes,
limits, metrics and graceful shutdown.

The event loop only does I/O, and separate processes run the model (model_process.py), so the server
always answers probes. A request is queued only after its body has arrived, so slow clients do not
delay others.
"""

import asyncio
import gc
import math
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import uvicorn
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Info,
    ProcessCollector,
    generate_latest,
)
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse, RedirectResponse, Response
from starlette.routing import Route

from argolocal.common.json_text import to_json
from rekindle.errors import ConfigError, RekindleError
from rekindle.release.model_client import DATA_UNTIL, REPLAY, SHA256, VERSION
from rekindle.release.release_files import download
from rekindle.release.serve_config import ServerSettings
from rekindle.release.watch.reference import FEATURE_METRIC
from rekindle.release.watch.scores import Histograms
from rekindle.serving.authentication import Authentication, read_tokens
from rekindle.serving.batching import RequestQueue
from rekindle.serving.bodies import Bodies, Refusal
from rekindle.serving.connections import KEEP_ALIVE_S, Connections, raise_descriptor_limit
from rekindle.serving.model_process import Batch, ModelInfo, ModelProcess
from rekindle.serving.openapi import make_openapi
from rekindle.storage import Store

# upper bounds of the latency buckets in seconds, dense enough to detect a version that is 1.5 times
# slower
SECONDS = tuple(float(f"{10 ** (k / 10 - 3):.3g}") for k in range(41))
SIZES = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 5000, 10_000)
PAGE = Path(__file__).with_name("page.html")


@dataclass(frozen=True)
class Model:
    """A loaded release."""

    name: str
    version: str
    sha256: str
    info: ModelInfo
    batches: RequestQueue

    @property
    def headers(self) -> dict[str, str]:
        """Response headers: model version, sha256, data cut-off."""
        if self.info.data_until:
            data_until = {DATA_UNTIL: self.info.data_until}
        else:
            data_until = {}
        return {VERSION: self.version, SHA256: self.sha256} | data_until


class Metrics:
    """The metrics of `/metrics`."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        registered: dict[str, Any] = {"registry": self.registry}

        self.requests = Counter(
            "rekindle_requests",
            "requests for predictions by HTTP status",
            ["version", "status"],
            **registered,
        )

        self.seconds = Histogram(
            "rekindle_request_seconds",
            "time to answer a request",
            ["version"],
            buckets=SECONDS,
            **registered,
        )

        self.warned = Counter(
            "rekindle_warned_requests", "answers with a warning", ["version"], **registered
        )
        self.replayed = Counter(
            "rekindle_replayed_instances", "instances sent by verify", ["version"], **registered
        )
        self.scores = Histograms()
        self.registry.register(self.scores)
        ProcessCollector(registry=self.registry)
        self.features = Histograms(FEATURE_METRIC, "numbers of the instances", "feature")
        self.registry.register(self.features)
        self.instances = Histogram(
            "rekindle_instances", "instances in an answered request", buckets=SIZES, **registered
        )
        self.waiting = Gauge(
            "rekindle_requests_waiting", "requests queued or in progress", **registered
        )
        self.model = Info("rekindle_model", "the served model", **registered)
        self.age = Gauge(
            "rekindle_data_age_seconds", "time since the model's data cut-off", **registered
        )
        self.age.set(math.nan)  # NaN: the age is unknown

    def count(self, batch: Batch) -> None:
        """Count the predictions and instances of a batch."""
        self.scores.add(batch.scores)
        self.features.add(batch.features)

    def show_age(self, data_until: str) -> None:
        """Let `/metrics` report the age of the model's data: the time since its data cut-off."""
        # the cut-off is empty or not a time
        with suppress(ValueError, OverflowError):
            end = datetime.fromisoformat(data_until).timestamp()
            self.age.set_function(lambda: time.time() - end)


class ModelServer:
    """The HTTP server of a model, from its start to the end of its shutdown."""

    def __init__(self, inputs: ServerSettings, max_connections: int) -> None:
        self.inputs = inputs
        self.connections = Connections(inputs.body_seconds, max_connections)
        self.max_waiting = min(inputs.max_waiting, max_connections)
        self.metrics = Metrics()
        self.model: Model | None = None
        self.failure: Exception | None = None
        self.processes: list[ModelProcess] = []
        self.draining = False
        self.waiting = 0  # number of requests queued or in progress
        self.bodies = Bodies(inputs)
        self.connections.drop_body = self.bodies.drop_oldest

        routes = [
            # first, since the first matching route counts
            Route("/v1/models/{name}:predict", self.predict, methods=["POST"]),
            Route("/", self.page),
            Route(
                "/v1/models/{name}:predict",
                self.wrong_method,
                methods=["GET", "PUT", "PATCH", "DELETE"],
            ),
            Route("/v1/models", self.models),
            Route("/v1/models/{name}/example", self.example),
            Route("/v1/models/{name}", self.status),
            Route("/health/live", self.live),
            Route("/health/ready", self.ready),
            Route("/metrics", self.show_metrics),
            Route("/openapi.json", self.openapi),
            Route("/docs", lambda _: RedirectResponse("/")),
            Route("/{path:path}", self.unknown, methods=["GET", "POST"]),
        ]

        self.tokens = read_tokens()

        app = Starlette(
            routes=routes,
            lifespan=self.lifespan,
            exception_handlers={Refusal: self.reject},
            middleware=[Middleware(Authentication, self.tokens)] if self.tokens else [],
        )

        self.http = uvicorn.Server(
            uvicorn.Config(
                app,
                http=self.connections.protocol,
                ws="none",  # WebSocket connections would bypass Connection
                log_level="warning",
                access_log=False,
                proxy_headers=False,
                # never reached: Connections.sweep closes idle connections
                timeout_keep_alive=int(2 * KEEP_ALIVE_S),
                # long enough for a request that a client starts at the end of the grace period
                timeout_graceful_shutdown=math.ceil(inputs.grace_seconds + inputs.body_seconds) + 1,
            )
        )

    @asynccontextmanager
    async def lifespan(self, _: Starlette) -> AsyncIterator[None]:
        """Start loading the model, and replace uvicorn's signal handlers, which do not drain."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self.drain)
        loop.add_signal_handler(signal.SIGINT, self.stop)
        tasks = [asyncio.create_task(self.run()), asyncio.create_task(self.connections.sweep())]
        yield
        for task in tasks:
            task.cancel()

    async def run(self) -> None:
        """Load the model in all processes, then answer requests until a process fails."""
        try:
            self.model = await self.load()
            await self.model.batches.run()
        except Exception as error:
            self.failure = error
            self.stop()

    async def load(self) -> Model:
        """Load the release in all processes. Raises StorageError, DataError or RekindleError."""
        start = time.perf_counter()
        folder = self.inputs.workdir / "release"

        # the processes start during the download
        for _ in range(self.inputs.processes):
            self.processes.append(ModelProcess(self.inputs.max_instances, self.inputs.max_batch))

        release = await asyncio.to_thread(download, Store.from_env(), self.inputs.model, folder)
        loop = asyncio.get_running_loop()

        info, *_ = await asyncio.gather(
            *(
                loop.run_in_executor(process.threads, process.load, folder)
                for process in self.processes
            )
        )

        name = release.name
        version = release.version
        sha256 = release.model_sha256

        self.metrics.scores.version = self.metrics.features.version = version
        for counter in (self.metrics.warned, self.metrics.replayed):
            counter.labels(version)  # creates the counter with the value 0

        info_labels = {
            "name": name,
            "sha256": sha256,
            "version": version,
            "deployment": self.inputs.deployment,
        }

        self.metrics.model.info(info_labels)
        self.metrics.show_age(info.data_until)
        gc.freeze()  # see model_process.py
        seconds = time.perf_counter() - start
        sys.stderr.write(
            f"serving {name} version {version} (sha256 {sha256[:12]}), ready after"
            f" {seconds:.1f} s\n"
        )

        batches = RequestQueue(
            self.processes,
            self.inputs.max_batch,
            self.inputs.batch_delay_ms / 1000,
            self.metrics.count,
        )

        return Model(name, version, sha256, info, batches)

    def drain(self) -> None:
        """Handle SIGTERM: report that the server is not ready, but answer requests for
        `drain_seconds`.

        If the server is loading or already draining, stop it at once.
        """
        if self.draining or not self.model:
            return self.stop()
        self.draining = True
        self.connections.drain(self.http.server_state.connections)
        asyncio.get_running_loop().call_later(self.inputs.drain_seconds, self.stop_accepting)

    def stop_accepting(self) -> None:
        """Accept no new connections. Clients may send requests on open connections for another
        `grace_seconds`."""
        self.http.should_exit = True
        asyncio.get_running_loop().call_later(
            self.inputs.grace_seconds, self.connections.close_idle
        )

    def stop(self) -> None:
        """Accept no new connections and close idle ones, but answer the requests in flight."""
        self.draining = True
        self.connections.close_idle()
        self.http.should_exit = True

    def state(self) -> str:
        if self.failure or self.draining or not self.model:
            if self.failure:
                return "failed"
            if self.draining:
                return "draining"
            return "loading"
        if self.waiting >= self.max_waiting:
            return "overloaded"
        return "ready"

    def require_model(self) -> Model:
        """Return the model. Raises Refusal while the model is loading."""
        if not self.model:
            raise Refusal(503, "the model is still loading: try again soon.")
        return self.model

    def require_named_model(self, request: Request) -> Model:
        """Return the model if the request's path contains its name. Raises Refusal."""
        model = self.require_model()
        name = request.path_params["name"]
        if name != model.name:
            raise Refusal(
                404, f'this server does not serve the model "{name[:100]}", but {model.name}.'
            )
        return model

    async def live(self, _: Request) -> Response:
        return answer(200, {"status": "live"})

    async def ready(self, _: Request) -> Response:
        state = self.state()
        model = self.model
        if model:
            identity = {"name": model.name, "version": model.version, "sha256": model.sha256}
        else:
            identity = {}
        return answer(200 if state == "ready" else 503, {"status": state} | identity)

    async def show_metrics(self, _: Request) -> Response:
        return Response(
            generate_latest(self.metrics.registry), media_type="text/plain; version=0.0.4"
        )

    async def page(self, _: Request) -> Response:
        return FileResponse(PAGE)

    async def models(self, _: Request) -> Response:
        """List the names of the models (KServe)."""
        return answer(200, {"models": [self.model.name] if self.model else []})

    async def status(self, request: Request) -> Response:
        """Return the fields of KServe (`name`, `ready`), of TensorFlow Serving
        (`model_version_status`), and details of the model."""
        model = self.require_named_model(request)
        ready = self.state() == "ready"
        status = {"error_code": "OK", "error_message": ""}

        versions = [
            {
                "version": model.version,
                "state": "AVAILABLE" if ready else "UNLOADING",
                "status": status,
            }
        ]

        body = {
            "name": model.name,
            "ready": ready,
            "version": model.version,
            "sha256": model.sha256,
            "data_until": model.info.data_until,
            "max_batch": self.inputs.max_batch,
            "numerics": model.info.numerics,
        }

        return answer(200, body | {"model_version_status": versions}, model.headers)

    async def example(self, request: Request) -> Response:
        """Return a valid request for `:predict`."""
        model = self.require_named_model(request)
        return answer(200, model.info.example, model.headers)

    async def openapi(self, _: Request) -> Response:
        model = self.require_model()
        info = model.info
        return answer(
            200,
            make_openapi(model.name, model.version, info.example, info.schemas, bool(self.tokens)),
        )

    async def unknown(self, request: Request) -> Response:
        """Answer 404 with the available paths."""
        path = f"/v1/models/{self.model.name if self.model else 'NAME'}"
        raise Refusal(
            404,
            f"{request.url.path[:100]} does not exist: POST {path}:predict, or GET {path}/example.",
        )

    async def wrong_method(self, request: Request) -> Response:
        raise Refusal(
            405, f"{request.url.path[:100]} requires POST, with the instances in the body."
        )

    async def predict(self, request: Request) -> Response:
        start = time.perf_counter()
        try:
            response = await self.answer_predict(request)
        except Refusal as refusal:
            response = self.reject(request, refusal)
        except RekindleError as error:  # a model process has ended, so the server will end
            response = self.reject(request, Refusal(503, str(error)))
        version = self.model.version if self.model else ""
        self.metrics.requests.labels(version, response.status_code).inc()
        self.metrics.seconds.labels(version).observe(time.perf_counter() - start)
        return response

    async def answer_predict(self, request: Request) -> Response:
        model = self.require_named_model(request)
        is_replay = REPLAY in request.headers
        body = await self.bodies.read(request)

        if self.waiting >= self.max_waiting:
            raise Refusal(503, f"{self.waiting} requests are waiting already: try again soon.")

        self.waiting += 1
        self.metrics.waiting.set(self.waiting)
        try:
            result = await model.batches.answer(body, is_replay)
        finally:
            self.waiting -= 1
            self.metrics.waiting.set(self.waiting)

        if is_replay:
            self.metrics.replayed.labels(model.version).inc(result.instances)
        elif result.instances:
            self.metrics.instances.observe(result.instances)

        if result.warned:
            self.metrics.warned.labels(model.version).inc()

        return Response(result.body, result.status, model.headers, "application/json")

    def reject(self, _: Request, refusal: Exception) -> Response:
        assert isinstance(refusal, Refusal)
        headers = {"retry-after": "1"} if refusal.status == 503 else {}
        headers.update({"connection": "close"} if refusal.close else {})
        return answer(refusal.status, {"error": str(refusal)}, headers)


def serve(inputs: ServerSettings) -> None:
    """Listen at once, load the model in the background, and answer until a signal. Raises the error
    if loading fails.
    """
    max_connections = raise_descriptor_limit(inputs.processes)
    listeners = [listen(inputs.host, inputs.port)]
    server = ModelServer(inputs, max_connections)
    host, port = listeners[0].getsockname()[:2]

    address = ip_address(host)
    # `kubectl port-forward` connects to the loopback address of the pod
    if not (address.is_loopback or address.is_unspecified):
        listeners.append(listen("127.0.0.1" if address.version == 4 else "::1", port))

    sys.stderr.write(f"listening on http://{f'[{host}]' if ':' in host else host}:{port}\n")
    try:
        server.http.run(sockets=listeners)
    finally:
        for process in server.processes:
            process.end()

    if server.failure:
        raise server.failure


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens. Raises ConfigError if the address is in use, or is not an
    address of this machine."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # without IPPROTO_TCP asyncio does not disable Nagle's algorithm
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)

    try:
        listener.bind((host, port))
        listener.listen(2048)
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"cannot listen on {host}:{port} ({error}): stop the other process, or choose another"
            " --port or --host."
        ) from error

    return listener


def answer(status: int, body: dict[str, Any], headers: dict[str, str] | None = None) -> Response:
    return Response(to_json(body), status, headers, "application/json")
