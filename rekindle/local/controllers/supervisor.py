"""The supervisor of all Deployments and Services here: it brings their pods to what the objects on disk say, and is
where the Services' ports are listened on.

It runs until SIGTERM; the pods die with it. A change of a Service's selector counts from the next connection on: the
port is never closed for it.
"""

import asyncio
import signal
import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from rekindle.local.controllers.base import Controller, Object
from rekindle.local.controllers.deployment import Deployments, headless, selects
from rekindle.local.controllers.rollout import Rollout
from rekindle.local.pods.containers import port_number
from rekindle.local.pods.interfaces import Cluster

INTERVAL = 0.05
CHUNK = 1 << 16
Address = tuple[str, int]


@dataclass
class Forward:
    """A listening port of a Service."""

    server: asyncio.Server
    selector: dict[str, str]
    target: Any  # targetPort: a number or a name


class Supervisor:
    """Reconciles all Deployments of a home, and forwards the connections to its Services."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.deployments, self.services = Deployments(cluster), Controller(cluster, "Service")
        self.rollouts: dict[str, Rollout] = {}
        self.forwards: dict[Address, Forward] = {}

    async def run(self) -> None:
        """Runs until SIGTERM, or until there is no Deployment any more."""
        stopped = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stopped.set)
        while not stopped.is_set() and (objects := self._objects()):
            await self._listen(objects)
            for name, obj in objects.items():
                self._reconcile(name, obj)
            busy = any(rollout.busy for rollout in self.rollouts.values())
            with suppress(TimeoutError):
                await asyncio.wait_for(stopped.wait(), INTERVAL if busy else 4 * INTERVAL)
        for forward in self.forwards.values():
            forward.server.close()
        while not all([rollout.end() for rollout in self.rollouts.values()]):
            await asyncio.sleep(INTERVAL)
        for name, obj in self._objects().items():
            if name in self.rollouts:
                self.rollouts[name].update_status(obj)

    def _objects(self) -> dict[str, Object]:
        objects = {name: self.deployments.read(name) for name in self.deployments.names()}
        return {name: obj for name, obj in objects.items() if obj}

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
        desired: dict[Address, tuple[dict[str, str], Any]] = {}
        for name in self.services.names():
            service = self.services.get(name)
            if service and any(selects(service, obj["spec"]["template"]) for obj in objects.values()):
                host = self.cluster.address(f"service/{name}") if headless(service) else "127.0.0.1"
                for port in service["spec"]["ports"]:
                    target = port.get("targetPort", port["port"])
                    desired[host, port["port"]] = service["spec"]["selector"], target
        for address in [address for address in self.forwards if address not in desired]:
            self.forwards.pop(address).server.close()
        for address, (selector, target) in desired.items():
            if forward := self.forwards.get(address):
                forward.selector, forward.target = selector, target
                continue
            try:
                server = await asyncio.start_server(
                    lambda r, w, address=address: self._connect(self.forwards[address], r, w), *address
                )
                self.forwards[address] = Forward(server, selector, target)
            except OSError as error:  # in use; retried
                print(f"port {address[1]}: {error}", file=sys.stderr, flush=True)

    async def _connect(self, forward: Forward, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        replicas = [replica for rollout in self.rollouts.values() for replica in rollout.replicas]
        ready = [
            replica for replica in replicas if replica.ready and forward.selector.items() <= replica.labels.items()
        ]
        if not ready:
            writer.transport.abort()
            return
        replica = min(ready, key=lambda replica: replica.connections)
        replica.connections += 1
        try:
            there = port_number(replica.pod.spec["containers"][0], forward.target)
            upstream, downstream = await asyncio.open_connection(replica.pod.ip, there)
            await asyncio.gather(_pipe(reader, downstream), _pipe(upstream, writer))
        except OSError:
            writer.transport.abort()
        finally:
            replica.connections -= 1


async def _pipe(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    """Copy until the end of `source`, then close `sink`."""
    try:
        while data := await source.read(CHUNK):
            sink.write(data)
            await sink.drain()
        sink.close()
    except OSError:
        sink.transport.abort()
