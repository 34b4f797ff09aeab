"""Pods of one run: inputs brought in, the process watched, outputs collected. No thread waits and nothing is polled.

    executor.start(action); events = executor.wait(timeout); executor.kill(id); executor.halt(grace)

A pod's files lie under its own root. Paths that the manifest takes from `{{inputs|outputs...path}}` are moved there
in its text; if it spells any of them out, the process sees that root as `/` (isolation.py). What is checked and said
is Argo's: a failed main container wins over outputs that are missing, and outputs are collected even then.
"""

import json
import os
import selectors
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipelines.local import artifacts, isolation, pod, volumes
from pipelines.local.artifacts import ArtifactError
from pipelines.local.companions import KINDS, Companions, exit_code
from pipelines.local.processes import HeldInterrupts, signal_group, started
from pipelines.local.resource import Resources
from pipelines.local.scope import MARK
from pipelines.local.state import RunFiles
from pipelines.local.table import Began, Ended, Start
from pipelines.local.volumes import Made, bound
from steps.errors import ConfigError, RekindleError

GRACE = 10.0  # seconds between SIGTERM and SIGKILL of a pod whose time is over
RESULT = 256 << 10  # bytes of stdout that become outputs.result: the last ones
LATE = "Pod was active on the node longer than the specified deadline"
Outputs = dict[str, Any]


@dataclass
class Running:
    """One pod on its way."""

    action: Start
    root: Path
    log: Path
    private: tuple[str, ...] | None
    process: subprocess.Popen[bytes] | None = None
    descriptor: int = -1
    work: Future[Any] | None = None
    companions: Companions | None = None
    volumes: dict[str, Made] = field(default_factory=dict)
    killed: str | None = None
    kill_at: float | None = None

    @property
    def template(self) -> dict[str, Any]:
        return self.action.template

    @property
    def shared(self) -> Path:
        """Where its volumes are."""
        return self.root.with_name(f"{self.root.name}.volumes")

    def host(self, path: str) -> Path:
        """Where the file is that the main container knows as `path`."""
        if self.private is not None:
            container = self.template.get("container") or self.template.get("script") or {}
            for place, at, _ in reversed(bound(self.volumes, container.get("volumeMounts") or [])):
                if Path(path).is_relative_to(at):
                    return place / Path(path).relative_to(at)
        return isolation.below(self.root, path)


class Executor:
    """All pods of one run. Processes are started from the thread that made it, and die with it."""

    def __init__(
        self, files: RunFiles, workflow: dict[str, Any], cluster: pod.Cluster, interrupts: HeldInterrupts
    ) -> None:
        self.files, self.workflow, self.cluster, self.interrupts = files, workflow, cluster, interrupts
        self.name: str = workflow["metadata"]["name"]
        self.running: dict[str, Running] = {}
        self.events: list[Began | Ended] = []
        self.selector = selectors.DefaultSelector()
        self.bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.selector.register(self.bell, selectors.EVENT_READ, None)
        self.one_at_a_time, self.transferring = threading.Lock(), False
        self.resources = Resources(cluster, workflow, files.root)

    def start(self, action: Start) -> None:
        """Runs the pod of a node."""
        if "resource" in action.template:
            self.events += self.resources.start(action)
            return
        root = self.files.pods / action.pod
        artifacts.clear(root)
        root.mkdir(parents=True)
        one = Running(action, root, self.files.logs / f"{action.pod}.log", _private(action.template))
        self.running[action.id] = one
        try:
            one.volumes = self._volumes(one)
        except (ConfigError, OSError) as error:
            self._end(one, "Error", str(error), None)
            return
        inputs = [each for each in action.template["inputs"]["artifacts"] if each.get("path")]
        if inputs:
            self._later(one, lambda: [artifacts.load(each, one.host(each["path"]), self._store) for each in inputs])
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
                self._exited(self.running[key.data])
        for one in list(self.running.values()):
            if one.work and one.work.done():
                self._worked(one)
        self._enforce()
        self.cluster.poll()  # a service that died mid-run
        self.events += self.resources.poll()
        events, self.events = self.events, []
        return events

    def kill(self, id: str, why: str = "", grace: float = GRACE) -> None:
        """Ends a pod: SIGTERM, and SIGKILL after `grace` seconds."""
        self.resources.forget(id)
        one = self.running.get(id)
        if not one or one.killed is not None:
            return
        one.killed, one.kill_at = why, time.time() + grace
        if one.process:
            signal_group(one.process.pid, signal.SIGTERM)

    def halt(self, grace: float) -> None:
        """Ends everything and waits for it; nothing of it is recorded. The run can go on later."""
        for id in list(self.running):
            self.kill(id, "", grace)
        self.resources.stop(grace)
        until = time.monotonic() + grace
        self.transferring = any(one.work and not one.work.done() for one in self.running.values())
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
                self._unwatch(one)
            artifacts.clear(one.shared)
        self.running.clear()

    def close(self) -> None:
        """Lets go of descriptors, but for the bell of a transfer that still runs."""
        self.selector.close()
        if not self.transferring:
            os.close(self.bell)

    @property
    def deadline(self) -> float | None:
        """When `wait` has something to enforce."""
        times = [when for one in self.running.values() for when in (one.kill_at or one.action.deadline,) if when]
        return min(times, default=None)

    def _enforce(self) -> None:
        now = time.time()
        for one in list(self.running.values()):
            if one.kill_at and now >= one.kill_at:
                one.kill_at = now + 1
                if one.process:
                    signal_group(one.process.pid, signal.SIGKILL)
            elif one.killed is None and one.action.deadline and now >= one.action.deadline:
                self.kill(one.action.id, LATE)
        for id in self.resources.late(now):
            self.events.append(Ended(id, "Failed", LATE))
            self.resources.forget(id)

    # ---- one pod -----------------------------------------------------------------------------------------------------

    def _later(self, one: Running, work: Callable[[], Any]) -> None:
        """Transfers run beside the loop, which alone may start processes; a daemon thread holds up no Ctrl-C."""
        one.work = done = Future()

        def transfer() -> None:
            try:
                done.set_result(work())
            except BaseException as error:  # the loop raises it
                done.set_exception(error)
            os.eventfd_write(self.bell, 1)

        threading.Thread(target=transfer, daemon=True).start()

    def _store(self, s3: dict[str, Any]) -> Any:
        with self.one_at_a_time:  # the first call imports boto3 and may start the service
            return self.cluster.store(s3)

    def _worked(self, one: Running) -> None:
        work, one.work = one.work, None
        assert work
        if one.process:  # outputs
            try:
                self._end(one, *work.result())
            except (RekindleError, OSError) as error:
                self._end(one, "Error", f"wait: Error (exit code 64): {error}", None)
            return
        try:
            work.result()
        except (ArtifactError, RekindleError, OSError) as error:
            self._end(one, "Error", f"init: Error (exit code 64): {error}", None)
            return
        self._spawn(one)

    def _spawn(self, one: Running) -> None:
        if one.killed is not None:
            self._end(one, "Failed", one.killed, None)
            return
        template = _placed(one.template, one.root if one.private is None else None)
        container = {"name": "main", **(template.get("container") or template["script"])}
        if source := container.pop("source", ""):
            script = one.root / "argo/staging/script"
            script.parent.mkdir(parents=True)
            script.write_text(source)
            script.chmod(0o755)
            path = str(script) if one.private is None else "/argo/staging/script"
            container["args"] = [*(container.get("args") or []), path]
        for path in _paths(template) if one.private is None else ():
            one.host(path).parent.mkdir(parents=True, exist_ok=True)
        run = pod.PodRun(
            one.action.pod,
            {"containers": [container]},
            one.root,
            one.log,
            namespace=self.workflow["metadata"]["namespace"],
            private=one.private,
            stdout=one.root / ".stdout" if one.action.capture else None,
            volumes=one.volumes,
        )
        if any(template.get(kind) for kind in KINDS) and not one.companions:
            one.companions = Companions(template, run, self.cluster)
        try:
            one.process = one.companions.next_init() if one.companions else None
            if not one.process:
                if one.companions:
                    one.companions.start_sidecars()
                one.process = pod.start(run, self.cluster)
        except (FileNotFoundError, PermissionError) as error:
            one.log.open("a").write(f"{error}\n")
            message = f'failed to find name in PATH: exec: "{error.filename}": {error.strerror}'
            self._end(one, "Failed", f"main: Error (exit code 64): {message}", {"exitCode": "64"})
            return
        except (ConfigError, OSError, subprocess.SubprocessError) as error:
            self._end(one, "Error", str(error), None)
            return
        one.descriptor = os.pidfd_open(one.process.pid)
        self.selector.register(one.descriptor, selectors.EVENT_READ, one.action.id)
        self.files.append({"pods": {one.action.id: [one.process.pid, started(one.process.pid) or 0]}})
        if not (one.companions and one.companions.name):
            self.events.append(Began(one.action.id, run.ip))

    def _volumes(self, one: Running) -> dict[str, Made]:
        run = pod.PodRun(one.action.pod, {}, one.root, one.log, namespace=self.workflow["metadata"]["namespace"])
        artifacts.clear(one.shared)
        own = [each["persistentVolumeClaim"]["claimName"] for each in volumes.claims(self.workflow)]
        wanted = one.template.get("volumes") or []
        return volumes.made(wanted, one.shared, self.cluster, lambda path, name: pod.fact(run, path, name), own)

    def _unwatch(self, one: Running) -> None:
        if one.descriptor >= 0:
            self.selector.unregister(one.descriptor)
            os.close(one.descriptor)
            one.descriptor = -1

    def _exited(self, one: Running) -> None:
        assert one.process
        one.process.wait()
        signal_group(one.process.pid, signal.SIGKILL)  # the container is gone when its first process is
        self._unwatch(one)
        one.kill_at = None
        if one.companions and (name := one.companions.name):
            code, one.process = exit_code(one.process), None
            if code and one.killed is None:
                one.companions.stop(0)
                self._end(one, "Failed", f"{name}: Error (exit code {code})", None)
            else:
                self._spawn(one)
        elif one.companions or (one.template.get("outputs") or {}).get("artifacts"):
            self._later(one, lambda: self._collect(one))
        else:
            self._end(one, *self._collect(one))

    def _end(self, one: Running, phase: str, message: str, outputs: Outputs | None) -> None:
        self.running.pop(one.action.id)
        self.files.append({"pods": {one.action.id: None}})
        artifacts.clear(one.shared)  # a Secret's files do not stay
        if phase == "Succeeded":
            artifacts.clear(one.root)
        self.events.append(Ended(one.action.id, phase, message, outputs))

    def _collect(self, one: Running) -> tuple[str, str, Outputs]:
        """Phase, message and outputs of a pod whose process is over."""
        assert one.process
        code, beside = exit_code(one.process), one.companions.stop(GRACE) if one.companions else ""
        declared = one.template.get("outputs") or {}
        outputs: Outputs = {"exitCode": str(code)}
        errors: list[str] = []
        if one.action.capture:
            outputs["result"] = _result(one.root / ".stdout", one.log)
        for each in declared.get("parameters") or []:
            value = _parameter(one, each)
            if value is None:
                missing = (each.get("valueFrom") or {}).get("path", "")
                errors.append(f"open /var/run/argo/outputs/parameters{missing}: no such file or directory")
            outputs.setdefault("parameters", []).append(each if value is None else {**each, "value": value})
        failed: list[str] = []
        for each in declared.get("artifacts") or []:
            try:
                if saved := artifacts.save(each, one.host(each["path"]), one.action.pod, self.name, self._store):
                    outputs.setdefault("artifacts", []).append(saved)
            except (ArtifactError, OSError) as error:
                failed.append(str(error))
        if failed:
            errors.append("".join(f"{each}; " for each in failed))
        if one.killed:
            return "Failed", one.killed, outputs
        if code:
            return "Failed", f"main: Error (exit code {code})", outputs
        if errors:
            return "Error", f"wait: Error (exit code 64): {errors[0]}", outputs
        if beside:
            return "Failed", beside, outputs
        return "Succeeded", "", outputs


def _private(template: dict[str, Any]) -> tuple[str, ...] | None:
    """The paths that must be the pod's own as the manifest spells them out; None if all come from placeholders."""
    text = json.dumps(template.get("container") or template.get("script"), ensure_ascii=False)
    paths, mounts = list(_paths(template)), _mounts(template)
    own = mounts or any(template.get(kind) for kind in KINDS) or any(MARK + path not in text for path in paths)
    return (*paths, *mounts) if own else None


def _mounts(template: dict[str, Any]) -> list[str]:
    """Where volumes are mounted; an empty /tmp and /dev/shm are the machine's."""
    mounts = (template.get("container") or template.get("script") or {}).get("volumeMounts") or []
    filled = {each["name"] for each in template.get("volumes") or [] if set(each) - {"name", "emptyDir"}}
    own = [
        each for each in mounts if each["name"] in filled or each["mountPath"].rstrip("/") not in ("/tmp", "/dev/shm")
    ]
    return [each["mountPath"] for each in own]


def _paths(template: dict[str, Any]) -> Iterator[str]:
    yield from (each["path"] for each in template["inputs"]["artifacts"] if each.get("path"))
    outputs = template.get("outputs") or {}
    yield from (each["path"] for each in outputs.get("artifacts") or [] if each.get("path"))
    for each in outputs.get("parameters") or []:
        if path := (each.get("valueFrom") or {}).get("path"):
            yield path


def _placed(template: dict[str, Any], root: Path | None) -> dict[str, Any]:
    """The template with its marked paths below `root`, or unmarked."""
    text = json.dumps(template, ensure_ascii=False)
    if MARK not in text:
        return template
    return json.loads(text.replace(MARK, json.dumps(str(root))[1:-1] if root else ""))


def _parameter(one: Running, parameter: dict[str, Any]) -> str | None:
    source = parameter.get("valueFrom") or {}
    if "path" not in source:
        return parameter.get("value", source.get("default"))
    try:
        text = one.host(source["path"]).read_text(errors="replace")
    except OSError:
        text = source.get("default")
    return text.removesuffix("\n") if text is not None else None


def _result(stdout: Path, log: Path) -> str:
    with open(stdout, "rb") as out, open(log, "ab") as whole:
        size = os.fstat(out.fileno()).st_size
        for block in iter(lambda: out.read(1 << 20), b""):
            whole.write(block)
        out.seek(max(0, size - RESULT - 1))
        text = out.read().removesuffix(b"\n")
    return text[-RESULT:].decode(errors="replace")


def check(template: dict[str, Any]) -> None:
    """Raises ConfigError if a template (as written) spells out paths that cannot be made its own here."""
    text = json.dumps(template.get("container") or template.get("script"))
    literal = _mounts(template)
    filled = {**template, "inputs": {"artifacts": [], **(template.get("inputs") or {})}}
    for way in ("inputs", "outputs"):
        for kind in ("artifacts", "parameters"):
            for each in (filled.get(way) or {}).get(kind) or []:
                path = each.get("path") or (each.get("valueFrom") or {}).get("path")
                if path and f"{way}.{kind}.{each['name']}.path" not in text:
                    literal.append(path)
    if not literal:
        return
    where = f'template "{template.get("name")}"'
    if bad := isolation.impossible(literal):
        raise ConfigError(f"{where}: the path {bad} lies in a directory of the system: use one below /tmp.")
    if not isolation.available():
        raise ConfigError(
            f"{where} spells out the path {literal[0]}, and this system gives no private mount namespace, so pods "
            "would share it. Write {{outputs.parameters.NAME.path}} (or ...artifacts.NAME.path) instead of the path."
        )
