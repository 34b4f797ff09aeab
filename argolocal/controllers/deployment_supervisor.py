"""The supervisor of a home's Deployments and Services. The supervisor reconciles pods with the
objects on disk, and listens on the ports of the Services.

On SIGTERM, the supervisor terminates the pods and exits. No request is lost when a pod is
terminated: the client's connection stays open, and requests that the pod's server has not read are
sent to another pod. A new selector of a Service applies to new connections. The supervisor
implements HTTPRoutes itself, without a Gateway. It distributes connections to the first Service of
an HTTPRoute among all Services of the route, and mirrors them.
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
from argolocal.controllers.deployment import Deployments, is_headless, selects
from argolocal.controllers.rollout import Replica, Rollout
from argolocal.errors import describe
from argolocal.interfaces import Cluster
from argolocal.manifest.types import Object
from argolocal.pods.containers import port_number

POLL_INTERVAL_S = 0.05
CHUNK_BYTES = 1 << 16
# a connection to a mirror is closed when this many bytes are waiting to be sent
MAX_MIRROR_BACKLOG_BYTES = 1 << 24
IDLE_AFTER_S = 1.0  # a response counts as complete if no bytes arrive for this many seconds
Address = tuple[str, int]


@dataclass
class ListeningPort:
    """A listening port of a Service."""

    server: asyncio.Server
    service: str
    selector: dict[str, str]
    target: Any  # `targetPort` of the Service: number or name of a container's port


@dataclass
class Route:
    """The backends of one rule of an HTTPRoute, which share the connections to a Service."""

    weights: dict[str, int]  # name of a Service → its weight
    mirrors: list[str]
    connections: Counter[str] = field(default_factory=Counter, compare=False)

    def choose_backend(self) -> str:
        """Return the Service with the fewest connections relative to its weight, and add 1 to its
        connection count."""
        shares = {
            name: (self.connections[name] + 1) / weight
            for name, weight in self.weights.items()
            if weight
        }
        name = min(shares, key=lambda name: shares[name], default=next(iter(self.weights)))
        self.connections[name] += 1
        return name


@dataclass(eq=False)
class Client:
    """A client's connection to a Service."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    unread_bytes: bytes = b""  # bytes from the client that no server has read yet yet
    # True if a server has read bytes from the client that it has not answered yet
    awaits_answer: bool = False
    # time of the last bytes in either direction
    last_activity: float = field(default_factory=time.monotonic)

    @property
    def has_unread_bytes(self) -> bool:
        """True if bytes from the client have arrived that no server has read yet."""
        return not self.reader.at_eof() and (
            bool(self.unread_bytes) or _has_event(self.writer, select.POLLIN)
        )

    @property
    def idle(self) -> bool:
        """True if no response is pending."""
        return not self.awaits_answer and time.monotonic() - self.last_activity > IDLE_AFTER_S


class Supervisor:
    """Reconciles all Deployments of a home, and forwards the connections to its Services."""

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
        stopped = asyncio.Event()
        loop = asyncio.get_running_loop()

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stopped.set)

        while not stopped.is_set() and (objects := self.deployments.objects()):
            await self._listen(objects)
            for name, obj in objects.items():
                self._reconcile(name, obj)

            busy = any(rollout.busy for rollout in self.rollouts.values())
            with suppress(TimeoutError):
                await asyncio.wait_for(
                    stopped.wait(), POLL_INTERVAL_S if busy else 4 * POLL_INTERVAL_S
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

        for name, obj in self.deployments.objects().items():
            if name in self.rollouts:
                self.rollouts[name].update_status(obj)

    def _reconcile(self, name: str, obj: Object) -> None:
        if name not in self.rollouts:
            self.rollouts[name] = Rollout(self.cluster, self.deployments, name)

        rollout = self.rollouts[name]
        if obj["metadata"].get("deletionTimestamp"):
            if rollout.end():
                self.deployments.remove(name)
                del self.rollouts[name]

            return

        try:
            rollout.reconcile(obj)
        except Exception as error:
            # an error, such as a missing Secret, must not affect the other Deployments
            rollout.fail(describe(error))

        rollout.update_status(obj)

    async def _listen(self, objects: dict[str, Object]) -> None:
        """Open and close ports so that exactly the ports of Services with a matching Deployment are
        open."""
        self._read_routes()
        desired: dict[Address, tuple[str, dict[str, str], Any]] = {}

        for name, service in self.services.objects().items():
            if any(selects(service, obj["spec"]["template"]) for obj in objects.values()):
                if is_headless(service):
                    host = self.cluster.address(f"service/{name}")
                else:
                    host = "127.0.0.1"

                for port in service["spec"]["ports"]:
                    target = port.get("targetPort", port["port"])
                    desired[host, port["port"]] = name, service["spec"]["selector"], target

        for address in [address for address in self.listening_ports if address not in desired]:
            self.listening_ports.pop(address).server.close()

        for address, (name, selector, target) in desired.items():
            listening_port = self.listening_ports.get(address)
            if listening_port:
                listening_port.selector = selector
                listening_port.target = target
                continue

            try:
                server = await asyncio.start_server(
                    lambda r, w, address=address: self._connect(
                        self.listening_ports[address], r, w
                    ),
                    *address,
                )
                self.listening_ports[address] = ListeningPort(server, name, selector, target)
            except OSError as error:
                # another program may use the port: the next call of `_listen` tries again
                print(f"port {address[1]}: {error}", file=sys.stderr, flush=True)

    def _read_routes(self) -> None:
        """Read the HTTPRoutes. An unchanged route keeps its connection counts."""
        routes: dict[str, Route] = {}

        for obj in Controller(self.cluster, "HTTPRoute").objects().values():
            for rule in obj["spec"].get("rules", ()):
                weights = {
                    backend["name"]: backend.get("weight", 1)
                    for backend in rule.get("backendRefs", ())
                }
                filters = [
                    item["requestMirror"]
                    for item in rule.get("filters", ())
                    if "requestMirror" in item
                ]

                route = Route(weights, [item["backendRef"]["name"] for item in filters])

                name = next(iter(weights), "")
                if name:
                    routes[name] = self.routes[name] if self.routes.get(name) == route else route

        self.routes = routes

    def _choose_replica(self, selector: dict[str, str]) -> Replica | None:
        """Return the ready pod with the fewest open connections, or None if no pod is ready. Ties
        are broken at random."""
        replicas = [replica for rollout in self.rollouts.values() for replica in rollout.replicas]
        ready = [
            replica
            for replica in replicas
            if replica.ready and selector.items() <= replica.labels.items()
        ]
        return min(ready, key=lambda replica: (replica.connections, random()), default=None)

    def _find_selector(self, service: str) -> dict[str, str] | None:
        obj = self.services.get(service)
        return obj and obj["spec"]["selector"]

    async def _connect(
        self,
        listening_port: ListeningPort,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
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
        mirrors = [
            self._choose_replica(mirror_selector)
            for name in (route.mirrors if route else ())
            if (mirror_selector := self._find_selector(name))
        ]

        mirror_writers = [
            writer
            for mirror in mirrors
            if mirror and (writer := await self._mirror(listening_port, mirror))
        ]

        downstream = None

        try:
            upstream, downstream = await asyncio.open_connection(
                replica.pod.ip, _port(replica, listening_port)
            )
            request_task = asyncio.create_task(_copy_requests(client, downstream, mirror_writers))
            await _copy_answers(upstream, client)
            # let `request_task` run, so that it sees bytes that have just arrived
            await asyncio.sleep(0)

            if (
                replica.pod.ending
                and not client.awaits_answer
                and not client.writer.is_closing()
                # otherwise, the server may have closed the connection on purpose after its response
                and (client.has_unread_bytes or client.idle)
            ):
                request_task.cancel()
                await asyncio.wait([request_task])  # only one task may read from the client
                return True

            client.writer.close()
            await request_task
            return False
        finally:
            replica.connections -= 1
            if downstream:
                downstream.close()

    async def _mirror(
        self, listening_port: ListeningPort, replica: Replica
    ) -> asyncio.StreamWriter | None:
        """Open a connection to a pod that gets copies of requests, and discard the pod's responses.
        Return None if the pod cannot be reached."""
        try:
            responses, writer = await asyncio.open_connection(
                replica.pod.ip, _port(replica, listening_port)
            )
        except OSError:
            return None
        task = asyncio.create_task(_discard_input(responses))
        self.mirror_tasks.add(task)
        task.add_done_callback(self.mirror_tasks.discard)
        return writer


def _port(replica: Replica, listening_port: ListeningPort) -> int:
    return port_number(replica.pod.spec["containers"][0], listening_port.target)


async def _discard_input(source: asyncio.StreamReader) -> None:
    with suppress(OSError):
        while await source.read(CHUNK_BYTES):
            pass


async def _copy_requests(
    client: Client, server: asyncio.StreamWriter, mirror_writers: Sequence[asyncio.StreamWriter]
) -> None:
    """Copy bytes from a client to a server until one of them disconnects. Disconnect slow
    `mirror_writers`."""
    try:
        while data := client.unread_bytes or await client.reader.read(CHUNK_BYTES):
            client.unread_bytes = data
            if not client.awaits_answer and _has_event(server, select.POLLRDHUP):
                return  # the server no longer reads requests

            client.unread_bytes = b""
            client.awaits_answer = True
            client.last_activity = time.monotonic()
            server.write(data)

            for writer in mirror_writers:
                if writer.transport.get_write_buffer_size() < MAX_MIRROR_BACKLOG_BYTES:
                    writer.write(data)
                else:
                    writer.transport.abort()

            await server.drain()

        # close only this direction, because the client may still wait for a response
        server.write_eof()
    except OSError:
        server.transport.abort()
    finally:
        for writer in mirror_writers:
            writer.close()


async def _copy_answers(server: asyncio.StreamReader, client: Client) -> None:
    """Copy bytes from a server to a client until the server disconnects."""
    while data := await server.read(CHUNK_BYTES):
        client.awaits_answer = False
        client.last_activity = time.monotonic()
        client.writer.write(data)
        await client.writer.drain()


def _has_event(writer: asyncio.StreamWriter, event: int) -> bool:
    """Return True if the connection has the poll event `event` or is closed. asyncio would report
    this later."""
    if writer.is_closing():
        return True
    poll = select.poll()
    poll.register(writer.get_extra_info("socket").fileno(), event)
    return bool(poll.poll(0))
