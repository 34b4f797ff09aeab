"""The HTTP server of a model: the REST API of TensorFlow Serving and KServe (v1), with probes,
limits, metrics and graceful shutdown.

The event loop only does I/O, and separate processes run the model (model_process.py), so the server
always answers probes. A request is queued only after its body has arrived, so slow clients do not
delay other clients.
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
from rekindle.release.model_client import (
    DATA_UNTIL_HEADER,
    REPLAY_HEADER,
    SHA256_HEADER,
    VERSION_HEADER,
)
from rekindle.release.release_files import download
from rekindle.release.serve_config import ServerSettings
from rekindle.release.watch.reference import FEATURE_METRIC
from rekindle.release.watch.scores import HistogramMetric
from rekindle.serving.authentication import Authentication, read_tokens
from rekindle.serving.batching import RequestQueue
from rekindle.serving.bodies import ArrivingBodies, RefusalError
from rekindle.serving.connections import KEEP_ALIVE_S, ConnectionRegistry, raise_descriptor_limit
from rekindle.serving.model_process import Batch, ModelInfo, ModelProcess
from rekindle.serving.openapi import make_openapi
from rekindle.storage import Store

# upper bounds of the latency buckets in seconds, dense enough to detect a version that is 1.5 times
# slower
SECONDS_BUCKETS = tuple(float(f"{10 ** (k / 10 - 3):.3g}") for k in range(41))
SIZE_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 5000, 10_000)
PAGE_FILE = Path(__file__).with_name("page.html")


@dataclass(frozen=True)
class LoadedModel:
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
            data_until = {DATA_UNTIL_HEADER: self.info.data_until}
        else:
            data_until = {}
        return {VERSION_HEADER: self.version, SHA256_HEADER: self.sha256} | data_until


class ServerMetrics:
    """The metrics of `/metrics`."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        registry_arguments: dict[str, Any] = {"registry": self.registry}

        self.requests = Counter(
            "rekindle_requests",
            "requests for predictions by HTTP status",
            ["version", "status"],
            **registry_arguments,
        )

        self.seconds = Histogram(
            "rekindle_request_seconds",
            "time to answer a request",
            ["version"],
            buckets=SECONDS_BUCKETS,
            **registry_arguments,
        )

        self.warned = Counter(
            "rekindle_warned_requests", "answers with a warning", ["version"], **registry_arguments
        )
        self.replayed = Counter(
            "rekindle_replayed_instances",
            "instances sent by verify",
            ["version"],
            **registry_arguments,
        )
        self.scores = HistogramMetric()
        self.registry.register(self.scores)
        ProcessCollector(registry=self.registry)
        self.features = HistogramMetric(FEATURE_METRIC, "numbers of the instances", "feature")
        self.registry.register(self.features)
        self.instances = Histogram(
            "rekindle_instances",
            "instances in an answered request",
            buckets=SIZE_BUCKETS,
            **registry_arguments,
        )
        self.waiting = Gauge(
            "rekindle_requests_waiting", "requests queued or in progress", **registry_arguments
        )
        self.model = Info("rekindle_model", "the served model", **registry_arguments)
        self.age = Gauge(
            "rekindle_data_age_seconds", "time since the model's data cut-off", **registry_arguments
        )
        # the value NaN means that the age is unknown
        self.age.set(math.nan)

    def count(self, batch: Batch) -> None:
        """Count the predictions and instances of a batch."""
        self.scores.add(batch.scores)
        self.features.add(batch.features)

    def report_data_age(self, data_until: str) -> None:
        """Let `/metrics` report the age of the model's data, which is the time since the data
        cut-off."""
        # if the cut-off is empty or not a time, the age stays unknown
        with suppress(ValueError, OverflowError):
            cutoff_seconds = datetime.fromisoformat(data_until).timestamp()
            self.age.set_function(lambda: time.time() - cutoff_seconds)


class ModelServer:
    """The HTTP server of a model, from its start to the end of its shutdown."""

    def __init__(self, server_settings: ServerSettings, max_connections: int) -> None:
        self.inputs = server_settings
        self.connections = ConnectionRegistry(server_settings.body_seconds, max_connections)
        self.max_waiting = min(server_settings.max_waiting, max_connections)
        self.metrics = ServerMetrics()
        self.model: LoadedModel | None = None
        self.failure: Exception | None = None
        self.processes: list[ModelProcess] = []
        self.draining = False
        # number of requests queued or in progress
        self.waiting = 0
        self.bodies = ArrivingBodies(server_settings)
        self.connections.drop_body = self.bodies.drop_oldest

        http_routes = [
            # this route comes first, since the first matching route counts
            Route("/v1/models/{name}:predict", self.predict, methods=["POST"]),
            Route("/", self.page),
            Route(
                "/v1/models/{name}:predict",
                self.answer_wrong_method,
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
            routes=http_routes,
            lifespan=self.lifespan,
            exception_handlers={RefusalError: self.reject},
            middleware=[Middleware(Authentication, self.tokens)] if self.tokens else [],
        )

        self.http = uvicorn.Server(
            uvicorn.Config(
                app,
                http=self.connections.protocol,
                # WebSockets are disabled, because their connections would bypass the class
                # Connection
                ws="none",
                log_level="warning",
                access_log=False,
                proxy_headers=False,
                # never reached: uvicorn's own timeout is long, because ConnectionRegistry.sweep
                # closes idle connections
                timeout_keep_alive=int(2 * KEEP_ALIVE_S),
                # long enough for a request that a client starts at the end of the grace period
                timeout_graceful_shutdown=math.ceil(
                    server_settings.grace_seconds + server_settings.body_seconds
                )
                + 1,
            )
        )

    @asynccontextmanager
    async def lifespan(self, _: Starlette) -> AsyncIterator[None]:
        """Start loading the model, and replace uvicorn's signal handlers, which would end the
        server without the grace period of `drain`."""
        event_loop = asyncio.get_running_loop()
        event_loop.add_signal_handler(signal.SIGTERM, self.drain)
        event_loop.add_signal_handler(signal.SIGINT, self.stop)
        background_tasks = [
            asyncio.create_task(self.run()),
            asyncio.create_task(self.connections.sweep()),
        ]
        yield
        for background_task in background_tasks:
            background_task.cancel()

    async def run(self) -> None:
        """Load the model in all model processes, then answer requests until a process fails."""
        try:
            self.model = await self.load()
            await self.model.batches.run()
        except Exception as error:
            self.failure = error
            self.stop()

    async def load(self) -> LoadedModel:
        """Load the release in all model processes. Raises StorageError, DataError or
        RekindleError."""
        start_seconds = time.perf_counter()
        release_folder = self.inputs.workdir / "release"

        # start the processes during the download of the release
        for _ in range(self.inputs.processes):
            self.processes.append(ModelProcess(self.inputs.max_instances, self.inputs.max_batch))

        release_record = await asyncio.to_thread(
            download, Store.from_env(), self.inputs.model, release_folder
        )
        event_loop = asyncio.get_running_loop()

        # all processes return the same information
        model_info, *_ = await asyncio.gather(
            *(
                event_loop.run_in_executor(
                    model_process.threads, model_process.load, release_folder
                )
                for model_process in self.processes
            )
        )

        model_name = release_record.name
        model_version = release_record.version
        model_sha256 = release_record.model_sha256

        self.metrics.scores.version = model_version
        self.metrics.features.version = model_version
        for labelled_counter in (self.metrics.warned, self.metrics.replayed):
            # create the counter with the value 0
            labelled_counter.labels(model_version)

        info_labels = {
            "name": model_name,
            "sha256": model_sha256,
            "version": model_version,
            "deployment": self.inputs.deployment,
        }

        self.metrics.model.info(info_labels)
        self.metrics.report_data_age(model_info.data_until)
        gc.freeze()  # see model_process.py
        load_seconds = time.perf_counter() - start_seconds
        sys.stderr.write(
            f"serving {model_name} version {model_version} (sha256 {model_sha256[:12]}), ready"
            f" after {load_seconds:.1f} s\n"
        )

        request_queue = RequestQueue(
            self.processes,
            self.inputs.max_batch,
            self.inputs.batch_delay_ms / 1000,
            self.metrics.count,
        )

        return LoadedModel(model_name, model_version, model_sha256, model_info, request_queue)

    def drain(self) -> None:
        """Handle SIGTERM: report that the server is not ready, but answer requests for
        `drain_seconds`.

        If the server is loading or already draining, stop the server at once.
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
            self.inputs.grace_seconds, self.connections.close_idle_connections
        )

    def stop(self) -> None:
        """Accept no new connections and close idle connections, but answer the requests that have
        arrived."""
        self.draining = True
        self.connections.close_idle_connections()
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

    def require_model(self) -> LoadedModel:
        """Return the loaded model. Raises RefusalError while the model is loading."""
        if not self.model:
            raise RefusalError(503, "the model is still loading: try again soon.")
        return self.model

    def require_named_model(self, request: Request) -> LoadedModel:
        """Return the loaded model if the request's path contains the model's name. Raises
        RefusalError."""
        loaded_model = self.require_model()
        requested_name = request.path_params["name"]
        if requested_name != loaded_model.name:
            raise RefusalError(
                404,
                f'this server does not serve the model "{requested_name[:100]}", but'
                f" {loaded_model.name}.",
            )
        return loaded_model

    async def live(self, _: Request) -> Response:
        return make_json_response(200, {"status": "live"})

    async def ready(self, _: Request) -> Response:
        server_state = self.state()
        loaded_model = self.model
        if loaded_model:
            model_identity = {
                "name": loaded_model.name,
                "version": loaded_model.version,
                "sha256": loaded_model.sha256,
            }
        else:
            model_identity = {}
        return make_json_response(
            200 if server_state == "ready" else 503, {"status": server_state} | model_identity
        )

    async def show_metrics(self, _: Request) -> Response:
        return Response(
            generate_latest(self.metrics.registry), media_type="text/plain; version=0.0.4"
        )

    async def page(self, _: Request) -> Response:
        return FileResponse(PAGE_FILE)

    async def models(self, _: Request) -> Response:
        """List the names of the models (KServe)."""
        return make_json_response(200, {"models": [self.model.name] if self.model else []})

    async def status(self, request: Request) -> Response:
        """Return the fields of KServe (`name`, `ready`), of TensorFlow Serving
        (`model_version_status`), and details of the model."""
        loaded_model = self.require_named_model(request)
        is_ready = self.state() == "ready"
        model_status = {"error_code": "OK", "error_message": ""}

        version_states = [
            {
                "version": loaded_model.version,
                "state": "AVAILABLE" if is_ready else "UNLOADING",
                "status": model_status,
            }
        ]

        answer_body = {
            "name": loaded_model.name,
            "ready": is_ready,
            "version": loaded_model.version,
            "sha256": loaded_model.sha256,
            "data_until": loaded_model.info.data_until,
            "max_batch": self.inputs.max_batch,
            "numerics": loaded_model.info.numerics,
        }

        return make_json_response(
            200, answer_body | {"model_version_status": version_states}, loaded_model.headers
        )

    async def example(self, request: Request) -> Response:
        """Return a valid request for `:predict`."""
        loaded_model = self.require_named_model(request)
        return make_json_response(200, loaded_model.info.example, loaded_model.headers)

    async def openapi(self, _: Request) -> Response:
        loaded_model = self.require_model()
        model_info = loaded_model.info
        return make_json_response(
            200,
            make_openapi(
                loaded_model.name,
                loaded_model.version,
                model_info.example,
                model_info.schemas,
                bool(self.tokens),
            ),
        )

    async def unknown(self, request: Request) -> Response:
        """Answer 404 with the available paths."""
        model_path = f"/v1/models/{self.model.name if self.model else 'NAME'}"
        raise RefusalError(
            404,
            f"{request.url.path[:100]} does not exist: POST {model_path}:predict, or GET"
            f" {model_path}/example.",
        )

    async def answer_wrong_method(self, request: Request) -> Response:
        raise RefusalError(
            405, f"{request.url.path[:100]} requires POST, with the instances in the body."
        )

    async def predict(self, request: Request) -> Response:
        start_seconds = time.perf_counter()
        try:
            response = await self.answer_predict(request)
        except RefusalError as refusal:
            response = self.reject(request, refusal)
        except RekindleError as error:
            # a model process has ended, so the server will end
            response = self.reject(request, RefusalError(503, str(error)))
        model_version = self.model.version if self.model else ""
        self.metrics.requests.labels(model_version, response.status_code).inc()
        self.metrics.seconds.labels(model_version).observe(time.perf_counter() - start_seconds)
        return response

    async def answer_predict(self, request: Request) -> Response:
        loaded_model = self.require_named_model(request)
        is_replay = REPLAY_HEADER in request.headers
        request_body = await self.bodies.read(request)

        if self.waiting >= self.max_waiting:
            raise RefusalError(503, f"{self.waiting} requests are waiting already: try again soon.")

        self.waiting += 1
        self.metrics.waiting.set(self.waiting)
        try:
            predict_answer = await loaded_model.batches.answer(request_body, is_replay)
        finally:
            self.waiting -= 1
            self.metrics.waiting.set(self.waiting)

        if is_replay:
            self.metrics.replayed.labels(loaded_model.version).inc(predict_answer.instances)
        elif predict_answer.instances:
            self.metrics.instances.observe(predict_answer.instances)

        if predict_answer.warned:
            self.metrics.warned.labels(loaded_model.version).inc()

        return Response(
            predict_answer.body, predict_answer.status, loaded_model.headers, "application/json"
        )

    def reject(self, _: Request, refusal: Exception) -> Response:
        assert isinstance(refusal, RefusalError)
        retry_headers = {"retry-after": "1"} if refusal.status == 503 else {}
        retry_headers.update({"connection": "close"} if refusal.close else {})
        return make_json_response(refusal.status, {"error": str(refusal)}, retry_headers)


def serve(server_settings: ServerSettings) -> None:
    """Listen at once, load the model in the background, and answer requests until a signal arrives.
    Raises the error of a model that cannot be loaded."""
    max_connections = raise_descriptor_limit(server_settings.processes)
    listening_sockets = [create_listening_socket(server_settings.host, server_settings.port)]
    model_server = ModelServer(server_settings, max_connections)
    server_host, server_port = listening_sockets[0].getsockname()[:2]

    server_address = ip_address(server_host)
    # `kubectl port-forward` connects to the loopback address of the pod
    if not (server_address.is_loopback or server_address.is_unspecified):
        listening_sockets.append(
            create_listening_socket(
                "127.0.0.1" if server_address.version == 4 else "::1", server_port
            )
        )

    sys.stderr.write(
        "listening on"
        f" http://{f'[{server_host}]' if ':' in server_host else server_host}:{server_port}\n"
    )
    try:
        model_server.http.run(sockets=listening_sockets)
    finally:
        for model_process in model_server.processes:
            model_process.end()

    if model_server.failure:
        raise model_server.failure


def create_listening_socket(host: str, port: int) -> socket.socket:
    """Return a listening socket of the server. Raises ConfigError if the address is in use, or is
    not an address of this machine."""
    address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # without IPPROTO_TCP asyncio does not disable Nagle's algorithm
    listening_socket = socket.socket(address_family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listening_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)

    try:
        listening_socket.bind((host, port))
        listening_socket.listen(2048)
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"cannot listen on {host}:{port} ({error}): stop the other process, or choose another"
            " --port or --host."
        ) from error

    return listening_socket


def make_json_response(
    http_status: int, body: dict[str, Any], response_headers: dict[str, str] | None = None
) -> Response:
    return Response(to_json(body), http_status, response_headers, "application/json")
