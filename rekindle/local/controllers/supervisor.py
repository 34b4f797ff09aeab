"""The supervisor of one Deployment: its pods with their probes, rolling updates, and the forwards of its Services.

    python -m rekindle.local.controllers.supervisor --home .rekindle --name fraud

It reads the objects from disk and does what they say until SIGTERM. A new version's pod must be ready before it gets
connections; then the old one gets SIGTERM, while connections that it has go on. Its pods die with it.
"""

import argparse
import asyncio
import hashlib
import json
import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from shutil import rmtree
from typing import Any

from rekindle.argo.language.gofmt import timestamp
from rekindle.local.controllers.base import Object, Stored
from rekindle.local.controllers.deployment import Deployments, selects
from rekindle.local.controllers.pod import Pod
from rekindle.local.pods.containers import port_number
from rekindle.local.pods.process import Cluster
from rekindle.local.processes import wait_until_recorded

TICK = 0.05
GIVEN_UP = 4  # times that the container of a new version may end before the update counts as failed
CHUNK = 1 << 16
QUICK = 0.2  # a start-up probe is tried this often: the time it allows is the manifest's, the wait is shorter


@dataclass(eq=False)
class Server:
    """A pod of the Deployment and what its probes say."""

    pod: Pod
    version: str
    ready: bool = False
    probes: asyncio.Task | None = None
    open: int = 0  # connections that it has


@dataclass
class Probe:
    """One probe of a container. Source: Kubernetes v1 Probe."""

    path: str
    port: int
    period: float
    timeout: float
    failures: int
    delay: float

    async def passes(self, host: str) -> bool:
        """Whether the answer is 2xx or 3xx."""
        try:
            async with asyncio.timeout(self.timeout):
                reader, writer = await asyncio.open_connection(host, self.port)
                try:
                    writer.write(f"GET {self.path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
                    status = (await reader.readline()).split()
                finally:
                    writer.close()
        except (OSError, TimeoutError):
            return False
        return len(status) > 1 and 200 <= int(status[1]) < 400


@dataclass
class Forward:
    """A listening port of a Service."""

    server: asyncio.Server
    target: Any  # targetPort: a number or a name


@dataclass
class Progress:
    """How an update goes."""

    version: str = ""
    counts: tuple = ()
    since: float = field(default_factory=time.monotonic)
    failed: str = ""


class Supervisor:
    """Keeps one Deployment."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self.cluster, self.name = cluster, name
        self.deployments, self.services = Deployments(cluster), Stored(cluster, "Service")
        self.servers: list[Server] = []
        self.leaving: list[Server] = []
        self.forwards: dict[int, Forward] = {}
        self.progress = Progress()
        self.next = 0

    async def run(self) -> None:
        """Until SIGTERM, or until the object is deleted."""
        stopped = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stopped.set)
        while not stopped.is_set() and (obj := self.deployments.read(self.name)):
            await self._forward(obj)
            self._reconcile(obj)
            self._report(obj)
            with suppress(TimeoutError):
                await asyncio.wait_for(stopped.wait(), TICK if self._busy(obj) else 4 * TICK)
        for forward in self.forwards.values():
            forward.server.close()
        for server in self.servers:
            self._retire(server)
        while self.leaving:
            self._reap()
            await asyncio.sleep(TICK)
        if obj := self.deployments.read(self.name):
            self._report(obj)

    def _busy(self, obj: Object) -> bool:
        return bool(self.leaving) or not all(server.ready for server in self.servers) or not self.servers

    # -- pods ---------------------------------------------------------------------------------------------------------

    def _reconcile(self, obj: Object) -> None:
        template = obj["spec"]["template"]
        version = hashlib.sha256(json.dumps(template, sort_keys=True).encode()).hexdigest()[:10]
        if version != self.progress.version:
            self.progress = Progress(version)
        wanted = obj["spec"].get("replicas", 1)
        self._reap()
        new = [server for server in self.servers if server.version == version]
        old = [server for server in self.servers if server.version != version]
        if len(new) < wanted and len(self.servers) <= wanted:  # one more than wanted at a time, none less
            self._add(template["spec"], version)
        surplus = len(self.servers) - wanted
        ready = sum(server.ready for server in self.servers)
        for server in sorted(old, key=lambda server: server.ready) if old else new[wanted:]:
            # an old pod goes when it is not needed for `wanted` ready ones; one that is not ready never is
            if surplus > 0 and (ready - server.ready >= wanted or (not server.ready and len(new) >= wanted)):
                ready -= server.ready
                surplus -= 1
                self._retire(server)

    def _add(self, spec: Object, version: str) -> None:
        name = f"{self.name}-{version}-{self.next}"
        self.next += 1
        pod = Pod(self.cluster, name, spec, self.deployments.home / self.name, {})
        self.servers.append(Server(pod, version))

    def _retire(self, server: Server) -> None:
        """No new connection, SIGTERM; it may take its terminationGracePeriodSeconds."""
        self._stop_probes(server)
        self.servers = [other for other in self.servers if other is not server]
        server.pod.end()
        self.leaving.append(server)

    def _reap(self) -> None:
        for server in self.leaving:
            if server.pod.poll() is not None or not server.pod.running:
                rmtree(server.pod.root, ignore_errors=True)
        self.leaving = [server for server in self.leaving if server.pod.running]
        for server in self.servers:
            code = server.pod.poll()
            if code is not None:
                self._stop_probes(server)
                server.pod.restart(code)
                if server.version == self.progress.version and server.pod.recent >= GIVEN_UP:
                    why = f"{server.pod.name} ended with code {code} ({server.pod.log}): {server.pod.why()}"
                    self.progress.failed = self.progress.failed or why
            if server.pod.running and not server.probes:
                server.probes = asyncio.create_task(self._watch(server))

    def _stop_probes(self, server: Server) -> None:
        server.ready = False
        if server.probes:
            server.probes.cancel()
            server.probes = None

    async def _watch(self, server: Server) -> None:
        """The probes of one run of a container: start-up first, then readiness and liveness side by side."""
        container, ip = server.pod.spec["containers"][0], server.pod.ip
        startup, readiness, liveness = (
            probe_of(container, f"{kind}Probe") for kind in ("startup", "readiness", "liveness")
        )
        if startup:
            until = time.monotonic() + startup.delay + startup.period * startup.failures
            await asyncio.sleep(startup.delay)
            while not await startup.passes(ip):
                if time.monotonic() > until:
                    print(f"{server.pod.name}: the start-up probe failed", file=sys.stderr, flush=True)
                    server.pod.terminate()
                    return
                await asyncio.sleep(min(QUICK, startup.period))
        server.ready = not readiness

        def ready(passed: bool) -> None:
            server.ready = passed

        def alive(passed: bool) -> None:
            if not passed:
                print(f"{server.pod.name}: the liveness probe failed", file=sys.stderr, flush=True)
                server.pod.terminate()

        watched = [(readiness, ready), (liveness, alive)]
        await asyncio.gather(*(self._repeat(probe, ip, tell) for probe, tell in watched if probe))

    async def _repeat(self, probe: Probe, ip: str, tell: Any) -> None:
        await asyncio.sleep(probe.delay)
        failed, passed = 0, False
        while True:
            if await probe.passes(ip):
                failed, passed = 0, True
                tell(True)
            else:
                failed += 1
                if failed >= probe.failures:
                    tell(False)
            await asyncio.sleep(probe.period if passed else min(QUICK, probe.period))

    # -- connections --------------------------------------------------------------------------------------------------

    async def _forward(self, obj: Object) -> None:
        """Listen on the ports of the Services that select these pods, and on no other."""
        wanted: dict[int, Any] = {}
        for name in self.services.names():
            service = self.services.get(name)
            if service and selects(service, obj["spec"]["template"]):
                wanted |= {port["port"]: port.get("targetPort", port["port"]) for port in service["spec"]["ports"]}
        for port in [port for port in self.forwards if port not in wanted]:
            self.forwards.pop(port).server.close()
        for port, target in wanted.items():
            if port in self.forwards:
                self.forwards[port].target = target
                continue
            try:
                server = await asyncio.start_server(
                    lambda r, w, port=port: self._connect(port, r, w), "127.0.0.1", port
                )
                self.forwards[port] = Forward(server, target)
            except OSError as error:  # somebody was faster; it is tried again
                print(f"port {port}: {error}", file=sys.stderr, flush=True)

    async def _connect(self, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ready = [server for server in self.servers if server.ready]
        if not ready:
            writer.transport.abort()
            return
        server = min(ready, key=lambda server: server.open)
        server.open += 1
        try:
            there = port_number(server.pod.spec["containers"][0], self.forwards[port].target)
            upstream, downstream = await asyncio.open_connection(server.pod.ip, there)
            await asyncio.gather(_pipe(reader, downstream), _pipe(upstream, writer))
        except OSError:
            writer.transport.abort()
        finally:
            server.open -= 1

    # -- status -------------------------------------------------------------------------------------------------------

    def _report(self, obj: Object) -> None:
        """Write the status if it changed. Source: Kubernetes deployment controller (sync.go, progress.go)."""
        wanted = obj["spec"].get("replicas", 1)
        new = [server for server in self.servers if server.version == self.progress.version]
        ready = sum(server.ready for server in self.servers)
        counts = {
            "replicas": len(self.servers),
            "updatedReplicas": len(new),
            "readyReplicas": ready,
            "availableReplicas": ready,
            "unavailableReplicas": max(len(self.servers), wanted) - ready,
        }
        if self.progress.counts != tuple(counts.values()):
            self.progress.counts, self.progress.since = tuple(counts.values()), time.monotonic()
        complete = len(new) == wanted == len(self.servers) and ready >= wanted
        limit = obj["spec"].get("progressDeadlineSeconds", 600)
        if not complete and not self.progress.failed and time.monotonic() - self.progress.since > limit:
            last = next((server.pod.why() for server in new if not server.ready), "")
            self.progress.failed = f"no progress in {limit} s. The log ends: {last}"
        conditions = [available(ready >= wanted), progressing(complete, self.progress)]
        shown = {key: value for key, value in counts.items() if value}
        before = obj.get("status") or {}
        stamped = _stamped(conditions, before)
        status = {"observedGeneration": obj["metadata"]["generation"], **shown, "conditions": stamped}
        if status != before:
            self.deployments.change(self.name, lambda now: now and now | {"status": status})


def available(enough: bool) -> Object:
    """The condition Available."""
    has, which = ("has", "Available") if enough else ("does not have", "Unavailable")
    message = f"Deployment {has} minimum availability."
    return {"type": "Available", "status": str(enough), "reason": f"MinimumReplicas{which}", "message": message}


def progressing(complete: bool, progress: Progress) -> Object:
    """The condition Progressing."""
    version = progress.version
    if complete:
        reason, message = "NewReplicaSetAvailable", f'ReplicaSet "{version}" has successfully progressed.'
    elif progress.failed:
        reason, message = (
            "ProgressDeadlineExceeded",
            f'ReplicaSet "{version}" has timed out progressing: {progress.failed}',
        )
    else:
        reason, message = "ReplicaSetUpdated", f'ReplicaSet "{version}" is progressing.'
    failed = reason == "ProgressDeadlineExceeded"
    return {"type": "Progressing", "status": str(not failed), "reason": reason, "message": message}


def _stamped(conditions: list[Object], before: Object) -> list[Object]:
    """The conditions with the times of those before where nothing changed."""
    previous = {condition["type"]: condition for condition in before.get("conditions") or []}
    stamped = []
    for condition in conditions:
        old, now = previous.get(condition["type"], {}), timestamp()
        same, flipped = condition.items() <= old.items(), old.get("status") != condition["status"]
        times = {
            "lastUpdateTime": old["lastUpdateTime"] if same else now,
            "lastTransitionTime": now if flipped else old["lastTransitionTime"],
        }
        stamped.append(condition | times)
    return stamped


def probe_of(container: Object, kind: str) -> Probe | None:
    """A container's probe of that kind, with Kubernetes' defaults."""
    if not (probe := container.get(kind)):
        return None
    http = probe["httpGet"]
    return Probe(
        path=http.get("path", "/"),
        port=port_number(container, http["port"]),
        period=probe.get("periodSeconds", 10),
        timeout=probe.get("timeoutSeconds", 1),
        failures=probe.get("failureThreshold", 3),
        delay=probe.get("initialDelaySeconds", 0),
    )


async def _pipe(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    """Copy until the end of `source`, and pass the end on."""
    try:
        while data := await source.read(CHUNK):
            sink.write(data)
            await sink.drain()
        sink.close()
    except OSError:
        sink.transport.abort()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m rekindle.local.controllers.supervisor", description=__doc__)
    parser.add_argument("--home", type=Path, required=True)
    parser.add_argument("--name", required=True)
    args = parser.parse_args()
    wait_until_recorded()
    from rekindle.local.emulator import LocalCluster

    asyncio.run(Supervisor(LocalCluster(args.home), args.name).run())


if __name__ == "__main__":
    main()
