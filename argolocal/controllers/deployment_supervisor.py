"""The supervisor is the process that runs the Deployments and Services of a home, the directory of
runs. The supervisor starts and ends pods as the objects on disk demand, and listens on the ports of
the Services.

On SIGTERM, the supervisor terminates the pods and exits. No request is lost when a pod is
terminated: the client's connection stays open, and requests that the pod's server has not read are
sent to another pod. When the selector of a Service changes, open connections are not affected. The
supervisor implements HTTPRoutes itself, without a Gateway. The supervisor distributes the
connections to the first Service of an HTTPRoute among all Services of the route, and copies the
requests to the route's mirrors.
"""

import asyncio
import select
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from random import random
from typing import Any

from argolocal.controllers.controller import Controller
from argolocal.controllers.deployment import Deployments, is_headless, selects_pods
from argolocal.controllers.rollout import Replica, Rollout
from argolocal.errors import describe
from argolocal.interfaces import Cluster
from argolocal.manifest.types import Object
from argolocal.pods.containers import find_port_number

POLL_INTERVAL_S = 0.05
CHUNK_BYTES = 1 << 16
# a connection to a mirror is closed when this many bytes are waiting to be sent
MAX_MIRROR_BACKLOG_BYTES = 1 << 24
# a response counts as complete if no bytes arrive for this many seconds
IDLE_AFTER_S = 1.0
Address = tuple[str, int]


@dataclass
class ListeningPort:
    """A port on which the supervisor listens for a Service."""

    server: asyncio.Server
    service: str
    selector: dict[str, str]
    # `targetPort` of the Service: number or name of a container's port
    target: Any


@dataclass
class Route:
    """A rule of an HTTPRoute: the Services that share the connections to its first Service."""

    # name of a Service → its weight
    weights: dict[str, int]
    # names of the Services that get a copy of each request
    mirrors: list[str]
    connections: Counter[str] = field(default_factory=Counter, compare=False)

    def choose_backend(self) -> str:
        """Return the Service with the fewest connections relative to its weight, and add 1 to its
        connection count."""
        load_shares = {
            service_name: (self.connections[service_name] + 1) / weight
            for service_name, weight in self.weights.items()
            if weight
        }
        service_name = min(
            load_shares,
            key=lambda service_name: load_shares[service_name],
            default=next(iter(self.weights)),
        )
        self.connections[service_name] += 1
        return service_name


@dataclass(eq=False)
class Client:
    """A client's connection to a Service."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    # bytes from the client that were not sent to a server yet
    unread_bytes: bytes = b""
    # True if bytes were sent to a server that has not answered yet
    awaits_answer: bool = False
    # time of the last bytes in either direction
    last_activity: float = field(default_factory=time.monotonic)

    @property
    def has_unread_bytes(self) -> bool:
        """True if bytes from the client have arrived that were not sent to a server yet."""
        return not self.reader.at_eof() and (
            bool(self.unread_bytes) or _has_event(self.writer, select.POLLIN)
        )

    @property
    def idle(self) -> bool:
        """True if no response is pending, and the last bytes are older than IDLE_AFTER_S."""
        return not self.awaits_answer and time.monotonic() - self.last_activity > IDLE_AFTER_S


class Supervisor:
    """Runs the pods of all Deployments of a home (a directory of runs), and forwards connections
    from the Services to the pods."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.deployments = Deployments(cluster)
        self.services = Controller(cluster, "Service")
        self.rollouts: dict[str, Rollout] = {}
        self.listening_ports: dict[Address, ListeningPort] = {}
        # name of the Service that clients connect to → the route for its connections
        self.routes: dict[str, Route] = {}
        self.mirror_tasks: set[asyncio.Task] = set()
        self.clients: set[Client] = set()

    async def run(self) -> None:
        """Run until SIGTERM, or until all Deployments are deleted."""
        stop_event = asyncio.Event()
        event_loop = asyncio.get_running_loop()

        for signal_number in (signal.SIGTERM, signal.SIGINT):
            event_loop.add_signal_handler(signal_number, stop_event.set)

        while not stop_event.is_set() and (deployments := self.deployments.objects()):
            await self._update_listening_ports(deployments)
            for name, kubernetes_object in deployments.items():
                self._reconcile(name, kubernetes_object)

            is_busy = any(rollout.busy for rollout in self.rollouts.values())
            with suppress(TimeoutError):
                await asyncio.wait_for(
                    stop_event.wait(), POLL_INTERVAL_S if is_busy else 4 * POLL_INTERVAL_S
                )

        for listening_port in self.listening_ports.values():
            listening_port.server.close()

        while not all([rollout.end() for rollout in self.rollouts.values()]):
            for client in self.clients:
                # close idle connections, because a server would otherwise wait for the client's
                # next request before it exits
                if client.idle:
                    client.writer.close()

            await asyncio.sleep(POLL_INTERVAL_S)

        for name, kubernetes_object in self.deployments.objects().items():
            if name in self.rollouts:
                self.rollouts[name].update_status(kubernetes_object)

    def _reconcile(self, name: str, kubernetes_object: Object) -> None:
        if name not in self.rollouts:
            self.rollouts[name] = Rollout(self.cluster, self.deployments, name)

        rollout = self.rollouts[name]
        if kubernetes_object["metadata"].get("deletionTimestamp"):
            if rollout.end():
                self.deployments.remove(name)
                del self.rollouts[name]

            return

        try:
            rollout.reconcile(kubernetes_object)
        except Exception as error:
            # an error, such as a missing Secret, must not affect the other Deployments
            rollout.fail(describe(error))

        rollout.update_status(kubernetes_object)

    async def _update_listening_ports(self, deployments: dict[str, Object]) -> None:
        """Open and close ports until the ports of all Services that select the pods of a Deployment
        are open, and no others."""
        self._read_routes()
        desired_listeners: dict[Address, tuple[str, dict[str, str], Any]] = {}

        for name, service in self.services.objects().items():
            if any(
                selects_pods(service, kubernetes_object["spec"]["template"])
                for kubernetes_object in deployments.values()
            ):
                if is_headless(service):
                    host = self.cluster.address(f"service/{name}")
                else:
                    host = "127.0.0.1"

                for port in service["spec"]["ports"]:
                    target_port = port.get("targetPort", port["port"])
                    desired_listeners[host, port["port"]] = (
                        name,
                        service["spec"]["selector"],
                        target_port,
                    )

        for address in [
            address for address in self.listening_ports if address not in desired_listeners
        ]:
            self.listening_ports.pop(address).server.close()

        for address, (name, selector, target_port) in desired_listeners.items():
            listening_port = self.listening_ports.get(address)
            if listening_port:
                listening_port.selector = selector
                listening_port.target = target_port
                continue

            try:
                server = await asyncio.start_server(
                    lambda reader, writer, address=address: self._connect(
                        self.listening_ports[address], reader, writer
                    ),
                    *address,
                )
                self.listening_ports[address] = ListeningPort(server, name, selector, target_port)
            except OSError as error:
                # another program may use the port; the next call of this method tries again
                print(f"port {address[1]}: {error}", file=sys.stderr, flush=True)

    def _read_routes(self) -> None:
        """Read the HTTPRoutes. An HTTPRoute that has not changed keeps its connection counts."""
        routes: dict[str, Route] = {}

        for kubernetes_object in Controller(self.cluster, "HTTPRoute").objects().values():
            for route_rule in kubernetes_object["spec"].get("rules", ()):
                backend_weights = {
                    backend["name"]: backend.get("weight", 1)
                    for backend in route_rule.get("backendRefs", ())
                }
                mirror_filters = [
                    route_filter["requestMirror"]
                    for route_filter in route_rule.get("filters", ())
                    if "requestMirror" in route_filter
                ]

                route = Route(
                    backend_weights,
                    [route_filter["backendRef"]["name"] for route_filter in mirror_filters],
                )

                name = next(iter(backend_weights), "")
                if name:
                    routes[name] = self.routes[name] if self.routes.get(name) == route else route

        self.routes = routes

    def _choose_replica(self, selector: dict[str, str]) -> Replica | None:
        """Return the ready pod with the fewest open connections, or None if no pod is ready. If
        several pods have the fewest connections, choose one of them at random."""
        replicas = [replica for rollout in self.rollouts.values() for replica in rollout.replicas]
        ready_replicas = [
            replica
            for replica in replicas
            if replica.ready and selector.items() <= replica.labels.items()
        ]
        return min(
            ready_replicas, key=lambda replica: (replica.connections, random()), default=None
        )

    def _find_selector(self, service_name: str) -> dict[str, str] | None:
        """Return the selector of a Service, or None if the Service does not exist."""
        kubernetes_object = self.services.get(service_name)
        return kubernetes_object and kubernetes_object["spec"]["selector"]

    async def _connect(
        self,
        listening_port: ListeningPort,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        """Serve a client's connection until it is closed, with one pod after the other."""
        client = Client(reader, writer)
        self.clients.add(client)
        try:
            while await self._serve(listening_port, client):
                client.unread_bytes = client.unread_bytes or await client.reader.read(CHUNK_BYTES)
                if not client.unread_bytes:
                    return client.writer.close()
        except OSError:
            writer.transport.abort()
        finally:
            self.clients.discard(client)

    async def _serve(self, listening_port: ListeningPort, client: Client) -> bool:
        """Forward bytes between a client and the server of a pod until one of them disconnects.
        Return True if the client's next request must go to another pod."""
        route = self.routes.get(listening_port.service)
        selector = listening_port.selector

        if route:
            selector = self._find_selector(route.choose_backend()) or selector

        replica = self._choose_replica(selector)
        if not replica:
            client.writer.transport.abort()
            return False

        replica.connections += 1
        mirror_replicas = [
            self._choose_replica(mirror_selector)
            for service_name in (route.mirrors if route else ())
            if (mirror_selector := self._find_selector(service_name))
        ]

        mirror_writers = [
            writer
            for mirror_replica in mirror_replicas
            if mirror_replica
            and (writer := await self._open_mirror(listening_port, mirror_replica))
        ]

        server_writer = None

        try:
            server_reader, server_writer = await asyncio.open_connection(
                replica.pod.ip, _find_target_port(replica, listening_port)
            )
            request_task = asyncio.create_task(
                _copy_requests(client, server_writer, mirror_writers)
            )
            await _copy_answers(server_reader, client)
            # let `request_task` run, so that it sees bytes that have just arrived
            await asyncio.sleep(0)

            if (
                replica.pod.is_ending
                and not client.awaits_answer
                and not client.writer.is_closing()
                # in all other states of the client, the server may have closed the connection after
                # its response on purpose
                and (client.has_unread_bytes or client.idle)
            ):
                request_task.cancel()
                # only one task may read from the client
                await asyncio.wait([request_task])
                return True

            client.writer.close()
            await request_task
            return False
        finally:
            replica.connections -= 1
            if server_writer:
                server_writer.close()

    async def _open_mirror(
        self, listening_port: ListeningPort, replica: Replica
    ) -> asyncio.StreamWriter | None:
        """Open a connection to a pod that gets copies of requests, and discard the pod's responses.
        Return None if the pod cannot be reached."""
        try:
            response_reader, writer = await asyncio.open_connection(
                replica.pod.ip, _find_target_port(replica, listening_port)
            )
        except OSError:
            return None
        discard_task = asyncio.create_task(_discard_input(response_reader))
        self.mirror_tasks.add(discard_task)
        discard_task.add_done_callback(self.mirror_tasks.discard)
        return writer


def _find_target_port(replica: Replica, listening_port: ListeningPort) -> int:
    """Return the number of the pod's port to which a Service forwards connections."""
    return find_port_number(replica.pod.spec["containers"][0], listening_port.target)


async def _discard_input(reader: asyncio.StreamReader) -> None:
    """Read and drop all bytes until the connection is closed."""
    with suppress(OSError):
        while await reader.read(CHUNK_BYTES):
            pass


async def _copy_requests(
    client: Client,
    server_writer: asyncio.StreamWriter,
    mirror_writers: Sequence[asyncio.StreamWriter],
) -> None:
    """Copy bytes from a client to a server and to mirrors until the client or the server
    disconnects. Disconnect a mirror that reads too slowly."""
    try:
        while chunk := client.unread_bytes or await client.reader.read(CHUNK_BYTES):
            client.unread_bytes = chunk
            if not client.awaits_answer and _has_event(server_writer, select.POLLRDHUP):
                # the server no longer reads requests
                return

            client.unread_bytes = b""
            client.awaits_answer = True
            client.last_activity = time.monotonic()
            server_writer.write(chunk)

            for writer in mirror_writers:
                if writer.transport.get_write_buffer_size() < MAX_MIRROR_BACKLOG_BYTES:
                    writer.write(chunk)
                else:
                    writer.transport.abort()

            await server_writer.drain()

        # close only this direction, because the client may still wait for a response
        server_writer.write_eof()
    except OSError:
        server_writer.transport.abort()
    finally:
        for writer in mirror_writers:
            writer.close()


async def _copy_answers(server_reader: asyncio.StreamReader, client: Client) -> None:
    """Copy bytes from a server to a client until the server disconnects."""
    while chunk := await server_reader.read(CHUNK_BYTES):
        client.awaits_answer = False
        client.last_activity = time.monotonic()
        client.writer.write(chunk)
        await client.writer.drain()


def _has_event(writer: asyncio.StreamWriter, poll_event: int) -> bool:
    """Return True if the connection is closed, or if poll(2) reports `poll_event` for it now.
    asyncio would report the event only in the next iteration of its loop."""
    if writer.is_closing():
        return True
    poller = select.poll()
    poller.register(writer.get_extra_info("socket").fileno(), poll_event)
    return bool(poller.poll(0))
