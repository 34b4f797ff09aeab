"""The supervisor of all Deployments and Services here: it brings their pods to what the objects on disk say, and is
where the Services' ports are listened on. A server that is told to end loses no request: what it has not taken yet of a
client that keeps its connection goes to the next one.

It runs until SIGTERM; the pods die with it. A change of a Service's selector counts from the next connection on: the
port is never closed for it. There is no Gateway here: the Service that an HTTPRoute names first is shared out, and
mirrored, as the route says, by connection.
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

from argolocal.controllers.base import Controller, Object
from argolocal.controllers.deployment import Deployments, headless, selects
from argolocal.controllers.rollout import Replica, Rollout
from argolocal.interfaces import Cluster
from argolocal.pods.containers import port_number

INTERVAL = 0.05
CHUNK = 1 << 16
BEHIND = 1 << 24  # bytes that a mirror may have to send yet
QUIET_S = 1.0  # without bytes an answer is taken to be complete
Address = tuple[str, int]


@dataclass
class Forward:
    """A listening port of a Service."""

    server: asyncio.Server
    service: str
    selector: dict[str, str]
    target: Any  # targetPort: a number or a name


@dataclass
class Route:
    """What an HTTPRoute says of the connections to a Service."""

    weights: dict[str, int]  # by Service
    mirrors: list[str]
    given: Counter[str] = field(default_factory=Counter, compare=False)

    def next(self) -> str:
        """The Service that is furthest behind its share."""
        shares = {name: (self.given[name] + 1) / weight for name, weight in self.weights.items() if weight}
        name = min(shares, key=lambda name: shares[name], default=next(iter(self.weights)))
        self.given[name] += 1
        return name


@dataclass(eq=False)
class Client:
    """A client's connection to a Service."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    rest: bytes = b""  # read, but taken by no server yet
    asked: bool = False  # a server took bytes that it has not answered
    last: float = field(default_factory=time.monotonic)  # when bytes came or went

    @property
    def sends(self) -> bool:
        """True if bytes have arrived that no server has taken."""
        return not self.reader.at_eof() and (bool(self.rest) or _polled(self.writer, select.POLLIN))

    @property
    def idle(self) -> bool:
        """True if no answer is on its way."""
        return not self.asked and time.monotonic() - self.last > QUIET_S


class Supervisor:
    """Reconciles all Deployments of a home, and forwards the connections to its Services."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.deployments, self.services = Deployments(cluster), Controller(cluster, "Service")
        self.rollouts: dict[str, Rollout] = {}
        self.forwards: dict[Address, Forward] = {}
        self.routes: dict[str, Route] = {}  # by the Service that clients ask
        self.mirroring: set[asyncio.Task] = set()
        self.clients: set[Client] = set()

    async def run(self) -> None:
        """Runs until SIGTERM, or until there is no Deployment any more."""
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
                await asyncio.wait_for(stopped.wait(), INTERVAL if busy else 4 * INTERVAL)
        for forward in self.forwards.values():
            forward.server.close()
        while not all([rollout.end() for rollout in self.rollouts.values()]):
            for client in self.clients:
                if client.idle:  # else the servers would wait for its next request
                    client.writer.close()
            await asyncio.sleep(INTERVAL)
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
        rollout.reconcile(obj)
        rollout.update_status(obj)

    async def _listen(self, objects: dict[str, Object]) -> None:
        """Listen exactly on the ports of the Services that select pods of a Deployment."""
        self._read_routes()
        desired: dict[Address, tuple[str, dict[str, str], Any]] = {}
        for name, service in self.services.objects().items():
            if any(selects(service, obj["spec"]["template"]) for obj in objects.values()):
                host = self.cluster.address(f"service/{name}") if headless(service) else "127.0.0.1"
                for port in service["spec"]["ports"]:
                    target = port.get("targetPort", port["port"])
                    desired[host, port["port"]] = name, service["spec"]["selector"], target
        for address in [address for address in self.forwards if address not in desired]:
            self.forwards.pop(address).server.close()
        for address, (name, selector, target) in desired.items():
            if forward := self.forwards.get(address):
                forward.selector, forward.target = selector, target
                continue
            try:
                server = await asyncio.start_server(
                    lambda r, w, address=address: self._connect(self.forwards[address], r, w), *address
                )
                self.forwards[address] = Forward(server, name, selector, target)
            except OSError as error:  # in use; retried
                print(f"port {address[1]}: {error}", file=sys.stderr, flush=True)

    def _read_routes(self) -> None:
        """The HTTPRoutes as they are now; what a backend has had stays counted."""
        routes: dict[str, Route] = {}
        for obj in Controller(self.cluster, "HTTPRoute").objects().values():
            for rule in obj["spec"].get("rules", ()):
                weights = {backend["name"]: backend.get("weight", 1) for backend in rule.get("backendRefs", ())}
                filters = [item["requestMirror"] for item in rule.get("filters", ()) if "requestMirror" in item]
                route = Route(weights, [item["backendRef"]["name"] for item in filters])
                if name := next(iter(weights), ""):
                    routes[name] = self.routes[name] if self.routes.get(name) == route else route
        self.routes = routes

    def _replica(self, selector: dict[str, str]) -> Replica | None:
        """The ready pod with the fewest connections; of several one by chance, so that each gets its share."""
        replicas = [replica for rollout in self.rollouts.values() for replica in rollout.replicas]
        ready = [replica for replica in replicas if replica.ready and selector.items() <= replica.labels.items()]
        return min(ready, key=lambda replica: (replica.connections, random()), default=None)

    def _selector(self, service: str) -> dict[str, str] | None:
        obj = self.services.get(service)
        return obj and obj["spec"]["selector"]

    async def _connect(self, forward: Forward, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        client = Client(reader, writer)
        self.clients.add(client)
        try:
            while await self._serve(forward, client):
                pass
        except OSError:
            writer.transport.abort()
        finally:
            self.clients.discard(client)

    async def _serve(self, forward: Forward, client: Client) -> bool:
        """Connect a client to a server until one of them ends; True if the next server has to answer the client."""
        route, selector = self.routes.get(forward.service), forward.selector
        if route:
            selector = self._selector(route.next()) or selector
        if not (replica := self._replica(selector)):
            client.writer.transport.abort()
            return False
        replica.connections += 1
        mirrors = [self._replica(found) for name in (route.mirrors if route else ()) if (found := self._selector(name))]
        copies = [copy for mirror in mirrors if mirror and (copy := await self._mirror(forward, mirror))]
        asking = None
        try:
            upstream, downstream = await asyncio.open_connection(replica.pod.ip, _port(replica, forward))
            asking = asyncio.create_task(_ask(client, downstream, copies))
            await _answer(upstream, client)
            await asyncio.sleep(0)  # so that `asking` looks at bytes that have just come
            if replica.pod.ending and not client.asked and not client.writer.is_closing() and client.sends:
                asking.cancel()
                downstream.close()
                return True
            client.writer.close()
            await asking
            return False
        finally:
            replica.connections -= 1

    async def _mirror(self, forward: Forward, replica: Replica) -> asyncio.StreamWriter | None:
        """A connection whose answers nobody reads; None if there cannot be one."""
        try:
            answers, copy = await asyncio.open_connection(replica.pod.ip, _port(replica, forward))
        except OSError:
            return None
        task = asyncio.create_task(_discard(answers))
        self.mirroring.add(task)
        task.add_done_callback(self.mirroring.discard)
        return copy


def _port(replica: Replica, forward: Forward) -> int:
    return port_number(replica.pod.spec["containers"][0], forward.target)


async def _discard(source: asyncio.StreamReader) -> None:
    with suppress(OSError):
        while await source.read(CHUNK):
            pass


async def _ask(client: Client, server: asyncio.StreamWriter, copies: Sequence[asyncio.StreamWriter]) -> None:
    """Give a server what its client sends, until one of them ends. `copies` get what they take in time."""
    try:
        while data := client.rest or await client.reader.read(CHUNK):
            client.rest = data
            if not client.asked and _polled(server, select.POLLRDHUP):
                return  # it does not read them any more
            client.rest, client.asked, client.last = b"", True, time.monotonic()
            server.write(data)
            for copy in copies:
                if copy.transport.get_write_buffer_size() < BEHIND:
                    copy.write(data)
                else:
                    copy.transport.abort()
            await server.drain()
        server.close()
    except OSError:
        server.transport.abort()
    finally:
        for copy in copies:
            copy.close()


async def _answer(server: asyncio.StreamReader, client: Client) -> None:
    """Give a client what its server sends, until the server ends."""
    while data := await server.read(CHUNK):
        client.asked, client.last = False, time.monotonic()
        client.writer.write(data)
        await client.writer.drain()


def _polled(writer: asyncio.StreamWriter, event: int) -> bool:
    """True if a connection has this event, or is closed: now, while asyncio tells it only later."""
    if writer.is_closing():
        return True
    poll = select.poll()
    poll.register(writer.get_extra_info("socket").fileno(), event)
    return bool(poll.poll(0))
