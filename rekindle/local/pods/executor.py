"""Pods of one run: inputs brought in, processes watched, outputs collected. No thread waits and nothing is polled.

    executor.start(action); events = executor.wait(timeout); executor.kill(id); executor.halt(grace)

What a template makes without a process of ours (http, data) is done beside the loop, as are transfers.
"""

import os
import selectors
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from rekindle.argo.manifest.volumes import claims
from rekindle.errors import ConfigError, RekindleError
from rekindle.local.engine.nodes import Began, Ended, Start
from rekindle.local.interrupts import Interrupts
from rekindle.local.journal import RunFiles
from rekindle.local.pods import artifacts, containers, filesystem, volumes
from rekindle.local.pods import process as pod
from rekindle.local.pods.artifacts import ArtifactError
from rekindle.local.pods.kinds import daemon, data
from rekindle.local.pods.kinds import http as web
from rekindle.local.pods.kinds.container_set import EMISSARY, UNSTARTED, ContainerSet, main_of
from rekindle.local.pods.kinds.sidecars import KILLED, KINDS, Companions
from rekindle.local.pods.pod_run import GRACE, SCRIPT, Outputs, Running, paths, placed
from rekindle.local.pods.volumes import Made
from rekindle.local.processes import signal_group, started

CANNOT_START = (FileNotFoundError, PermissionError, pod.StartError)
UNBEGUN = "Pod failed before main container starts due to PodInitializing: "
LATE = "Pod was active on the node longer than the specified deadline"


class Resources(Protocol):
    """Runs resource templates."""

    @property
    def busy(self) -> bool: ...

    def start(self, action: Start) -> list[Began | Ended]: ...

    def poll(self) -> list[Began | Ended]: ...

    def late(self, now: float) -> list[str]: ...

    def forget(self, id: str) -> None: ...

    def stop(self, grace: float) -> None: ...


class Executor:
    """All pods of one run. Processes are started from the thread that made it, and die with it."""

    def __init__(
        self,
        files: RunFiles,
        workflow: dict[str, Any],
        cluster: pod.Cluster,
        interrupts: Interrupts,
        resources: Resources,
    ) -> None:
        self.files, self.workflow, self.cluster, self.interrupts = files, workflow, cluster, interrupts
        self.resources = resources
        self.name: str = workflow["metadata"]["name"]
        self.running: dict[str, Running] = {}
        self.events: list[Began | Ended] = []
        self.selector = selectors.DefaultSelector()
        self.bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.selector.register(self.bell, selectors.EVENT_READ, None)
        self.one_at_a_time, self.threads = threading.Lock(), list[threading.Thread]()

    def start(self, action: Start) -> None:
        """Runs the pod of a node."""
        if "resource" in action.template:
            self.events += self.resources.start(action)
            return
        root = self.files.pods / action.pod
        self.running[action.id] = one = Running(action, root, self.files.logs / f"{action.pod}.log")
        if http := action.template.get("http"):
            self._later(one, lambda: web.answer(http, self.cluster.secret), self._answered)
            return
        if asked := action.template.get("data"):
            self.events.append(Began(action.id))
            self._later(one, lambda: data.listed(asked, self._store), self._answered)
            return
        one.forget()
        root.mkdir(parents=True)
        inputs = [each for each in action.template["inputs"]["artifacts"] if each.get("path")]
        main, run = {"name": "main", **main_of(action.template)}, self._run(one)
        try:
            one.volumes = self._volumes(one)
            if "image" in main:
                one.directory = main.get("workingDir") or self.cluster.image(main["image"]).directory or "/"
                one.expand = lambda text: pod.expand(text, pod.environ(run, main, self.cluster))
            load = [partial(artifacts.load, each, one.host(each["path"]), self._store) for each in inputs]
        except (ConfigError, OSError) as error:
            self._end(one, "Error", str(error), None)
            return
        if load:
            self._later(one, lambda: [each() for each in load], self._loaded)
        else:
            self._spawn(one)

    def wait(self, timeout: float | None) -> list[Began | Ended]:
        """What happened; at the latest after `timeout` seconds nothing."""
        limits = [self.deadline - time.time()] if self.deadline is not None else []
        limits += [timeout] if timeout is not None else []
        limits.append(0.1 if self.resources.busy else 1.0)
        with self.interrupts.allowed():
            ready = self.selector.select(0 if self.events else max(0.0, min(limits)))
        for key, _ in ready:
            if key.data is None:
                os.eventfd_read(self.bell)
            else:
                self._exited(self.running[key.data[0]], key.data[1])
        for one in list(self.running.values()):
            if one.work and one.work[0].done():
                (work, then), one.work = one.work, None
                then(one, work)
        self._enforce()
        self.cluster.poll()  # a service that died mid-run
        self.events += self.resources.poll()
        events, self.events = self.events, []
        return events

    def kill(self, id: str, why: str = "", grace: float | None = None) -> None:
        """Ends a pod: SIGTERM, and SIGKILL after `grace` seconds, or after its own."""
        self.resources.forget(id)
        one = self.running.get(id)
        if not one or one.killed is not None:
            return
        own = one.template.get("terminationGracePeriodSeconds")
        one.killed, one.kill_at = why, time.time() + (grace if grace is not None else GRACE if own is None else own)
        for process in one.processes:
            signal_group(process.pid, signal.SIGTERM)
        if one.template.keys() & {"http", "data"}:
            self._end(one, "Failed", why, None)
        elif one.group and not one.group.over:
            one.group.kill()
            self._advance(one)

    def halt(self, grace: float) -> None:
        """Ends everything and waits for it; nothing of it is recorded. The run can go on later."""
        for id in list(self.running):
            self.kill(id, "", grace)
        self.resources.stop(grace)
        until = time.monotonic() + grace
        for one in self.running.values():
            if one.companions:
                one.companions.stop(grace)
            if one.process:
                try:
                    one.process.wait(max(0.0, until - time.monotonic()))
                except subprocess.TimeoutExpired:
                    signal_group(one.process.pid, signal.SIGKILL)
                    one.process.wait()
                signal_group(one.process.pid, signal.SIGKILL)  # what it left behind in its group
            for name in list(one.descriptors):
                self._unwatch(one, name)
            artifacts.clear(one.shared)
        self.running.clear()

    def close(self) -> None:
        """Lets go of descriptors, but for the bell that a thread may still ring."""
        self.selector.close()
        if not any(each.is_alive() for each in self.threads):
            os.close(self.bell)

    @property
    def deadline(self) -> float | None:
        """When `wait` has something to enforce."""
        times = [when for one in self.running.values() for when in (one.kill_at or one.action.deadline,) if when]
        times += [one.group.wake for one in self.running.values() if one.group and one.group.wake]
        return min(times, default=None)

    def _enforce(self) -> None:
        now = time.time()
        for one in list(self.running.values()):
            if one.kill_at and now >= one.kill_at:
                one.kill_at = now + 1
                for process in one.processes:
                    signal_group(process.pid, signal.SIGKILL)
            elif one.killed is None and one.action.deadline and now >= one.action.deadline:
                self.kill(one.action.id, LATE)
            elif one.group and one.group.wake and now >= one.group.wake:
                self._advance(one)
        for id in self.resources.late(now):
            self.events.append(Ended(id, "Failed", LATE))
            self.resources.forget(id)

    # ---- one pod -----------------------------------------------------------------------------------------------------

    def _later(self, one: Running, work: Callable[[], Any], then: Callable[[Running, Future[Any]], None]) -> None:
        """What takes time runs beside the loop, which alone may start processes; a daemon thread holds up no Ctrl-C."""
        done = Future[Any]()
        one.work = done, then

        def worked() -> None:
            _settled(done, work)
            os.eventfd_write(self.bell, 1)

        self.threads = [each for each in self.threads if each.is_alive()]
        self.threads.append(threading.Thread(target=worked, daemon=True))
        self.threads[-1].start()

    def _store(self, s3: dict[str, Any]) -> Any:
        with self.one_at_a_time:  # the first call imports boto3 and may start the service
            return self.cluster.store(s3)

    def _loaded(self, one: Running, work: Future[Any]) -> None:
        try:
            work.result()
        except (ArtifactError, RekindleError, OSError, ValueError) as error:
            self._end(one, "Error", f"init: Error (exit code 64): {error}", None)
            return
        self._spawn(one)

    def _collected(self, one: Running, work: Future[Any]) -> None:
        try:
            self._end(one, *work.result())
        except (RekindleError, OSError, ValueError) as error:
            self._end(one, "Error", f"wait: Error (exit code 64): {error}", None)

    def _answered(self, one: Running, work: Future[Any]) -> None:
        try:
            self._end(one, *work.result())
        except (RekindleError, OSError, ValueError) as error:
            self._end(one, "Error", str(error), None)

    def _probed(self, one: Running, work: Future[Any]) -> None:
        if work.result():
            self.events.append(Began(one.action.id, pod.PodRun.ip))

    def _spawn(self, one: Running) -> None:
        if one.killed is not None:
            self._end(one, "Failed", one.killed, None)
            return
        try:
            run = self._placed(one)
        except (ConfigError, OSError, ValueError) as error:
            self._end(one, "Error", str(error), None)
            return
        if one.group:
            self.events += [Began(id, run.ip) for id in (one.action.id, *one.action.containers.values())]
            self._advance(one)
            return
        try:
            one.process = one.companions.next_init() if one.companions else None
            if not one.process:
                if one.companions:
                    one.companions.start_sidecars()
                one.process = pod.start(run, self.cluster)
        except (*CANNOT_START, ConfigError, OSError, ValueError, subprocess.SubprocessError) as error:
            self._unstarted(one, error)
            return
        self._watch(one, one.process)
        if one.companions and one.companions.name:
            return
        container = run.spec["containers"][0]
        if one.template.get("daemon") and container.get("readinessProbe"):
            runs, run = lambda: bool(one.descriptors), replace(run, inside=one.process.pid)
            self._later(one, lambda: daemon.ready(container, run, self.cluster, runs), self._probed)
        else:
            self.events.append(Began(one.action.id, run.ip))

    def _placed(self, one: Running) -> pod.PodRun:
        """Puts in place what the pod needs at its start. Raises ConfigError, OSError, ValueError."""
        containers.known(one.template, one.action.pod, self.cluster)  # by a tag it may be any
        template = placed(one.template, one.root if one.private is None else None)
        container = {"name": "main", **main_of(template)}
        if source := container.pop("source", ""):
            script = filesystem.below(one.root, SCRIPT)
            script.parent.mkdir(parents=True, exist_ok=True)
            script.write_text(source)
            script.chmod(0o755)
            path = str(script) if one.private is None else SCRIPT
            container["args"] = [*(container.get("args") or []), path]
        for path in paths(template) if one.private is None else ():
            one.host(path).parent.mkdir(parents=True, exist_ok=True)
        run = replace(
            self._run(one),
            spec={"containers": [container]},
            private=one.private,
            stdout=one.root / ".stdout" if one.action.capture else None,
            volumes=one.volumes,
        )
        if "containerSet" in template:
            one.companions = ContainerSet(template, run, self.cluster)
        elif any(template.get(kind) for kind in KINDS) and not one.companions:
            one.companions = Companions(template, run, self.cluster)
        return run

    def _unstarted(self, one: Running, error: Exception) -> None:
        """Ends a pod one of whose containers cannot start; Argo's executor tells it of all but init containers."""
        init = one.companions.name if one.companions else ""
        if one.companions:
            one.companions.stop(0)
        if not isinstance(error, CANNOT_START):
            self._end(one, "Error", str(error), None)
            return
        why = str(error) if isinstance(error, pod.StartError) else pod.unknown_program(error)
        with one.log.open("a") as log:
            log.write(f"{why}\n")
        code = UNSTARTED if init or isinstance(error, pod.StartError) else EMISSARY
        reason = "StartError" if code == UNSTARTED else "Error"
        outputs = None if init else {"exitCode": str(code)}
        self._end(one, "Failed", f"{init or 'main'}: {reason} (exit code {code}): {why}", outputs)

    def _advance(self, one: Running) -> None:
        """Brings the containers of a set as far as they can go now."""
        group = one.group
        assert group
        try:
            for name, process in group.begin(time.time()):
                self._watch(one, process, name)
        except (ConfigError, OSError, ValueError, subprocess.SubprocessError) as error:
            group.stop(0)
            for name in list(one.descriptors):
                self._unwatch(one, name)
            self._end(one, "Error", str(error), None)
            return
        for name, phase, message in group.news:
            self.events.append(Ended(one.action.containers[name], phase, message))
        group.news.clear()
        if group.over:
            one.kill_at = None
            self._later(one, lambda: one.collected(self.name, self._store), self._collected)

    def _run(self, one: Running) -> pod.PodRun:
        return pod.PodRun(one.action.pod, {}, one.root, one.log, namespace=self.workflow["metadata"]["namespace"])

    def _volumes(self, one: Running) -> dict[str, Made]:
        run = self._run(one)
        artifacts.clear(one.shared)
        own = [each["persistentVolumeClaim"]["claimName"] for each in claims(self.workflow)]
        wanted = one.template.get("volumes") or []
        return volumes.made(wanted, one.shared, self.cluster, lambda path, name: pod.fact(run, path, name), own)

    def _watch(self, one: Running, process: pod.Process, name: str = "main") -> None:
        one.descriptors[name] = os.pidfd_open(process.pid)
        self.selector.register(one.descriptors[name], selectors.EVENT_READ, (one.action.id, name))
        self.files.append({"pods": {self._key(one, name): [process.pid, started(process.pid) or 0]}})

    def _unwatch(self, one: Running, name: str) -> None:
        self.selector.unregister(descriptor := one.descriptors.pop(name))
        os.close(descriptor)

    def _key(self, one: Running, name: str) -> str:
        return one.action.id if name == "main" else f"{one.action.id} {name}"

    def _exited(self, one: Running, name: str) -> None:
        process = one.group.running[name] if one.group else one.process
        assert process
        process.wait()
        signal_group(process.pid, signal.SIGKILL)  # the container is gone when its first process is
        self._unwatch(one, name)
        if process.said.error:
            raise process.said.error
        if one.group:
            one.group.exited(name, time.time())
            self._advance(one)
            return
        one.kill_at = None
        if one.companions and (name := one.companions.name):
            one.process = None
            if process.code and one.killed is None:
                one.companions.stop(0)
                ignored = process.code in KILLED  # Argo takes it for one that was told to end
                ends = ("Error", UNBEGUN) if ignored else ("Failed", f"{name}: {process.failure}")
                self._end(one, *ends, None)
            else:
                self._spawn(one)
            return
        collect = lambda: one.collected(self.name, self._store)  # noqa: E731
        if one.companions or one.logs or (one.template.get("outputs") or {}).get("artifacts"):
            self._later(one, collect, self._collected)
        else:
            self._collected(one, _settled(Future[Any](), collect))

    def _end(self, one: Running, phase: str, message: str, outputs: Outputs | None) -> None:
        self.running.pop(one.action.id)
        keys = [self._key(one, name) for name in one.action.containers or ("main",)]
        self.files.append({"pods": dict.fromkeys(keys)})
        artifacts.clear(one.shared)  # a Secret's files do not stay
        if phase == "Succeeded":
            artifacts.clear(one.root)
        self.events.append(Ended(one.action.id, phase, message, outputs))


def _settled(done: Future[Any], work: Callable[[], Any]) -> Future[Any]:
    try:
        done.set_result(work())
    except BaseException as error:  # the loop raises it
        done.set_exception(error)
    return done
