"""A container as a process of this machine: the environment of its manifest, its own session, dead with its parent.

    process = start(PodRun(name, spec=pod_spec, root=..., log=...), cluster)

Used for container and script templates, and by the controllers for the pods of jobs and deployments. A pod's root is a
directory of its own; `private` are the files that are its own, beside its volumes (see isolation.py).
"""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from rekindle import project
from rekindle.common.linux import die_with_parent
from rekindle.errors import ConfigError
from rekindle.local.pods import filesystem, limits
from rekindle.local.pods.log_pipe import Said
from rekindle.local.pods.volumes import Made, bound

VARIABLE = re.compile(r"\$\$|\$\(([^()]+)\)")
PYTHON = re.compile(r"python[0-9.]*")
ENVIRONMENT_NAME = re.compile(r"[ -<>-~]+")  # printable ASCII but =, as Kubernetes has it since 1.32


class StartError(OSError):
    """A container that no runtime can start; the kubelet gives it the exit code 128."""


class Cluster(Protocol):
    """What a pod needs of its cluster."""

    @property
    def home(self) -> Path: ...

    def poll(self) -> None: ...

    def find(self, kind: str, name: str) -> Mapping[str, Any] | None: ...

    def configmap(self, name: str) -> Mapping[str, str]: ...

    def secret(self, name: str) -> Mapping[str, str]: ...

    def files(self, kind: str, name: str) -> Mapping[str, bytes] | None: ...

    def image(self, image: str) -> Any: ...

    @property
    def images(self) -> Mapping[str, Any]: ...

    def service_variables(self) -> Mapping[str, str]: ...

    def store(self, s3: Mapping[str, Any] | None = None) -> Any: ...

    def address(self, pod: str) -> str: ...


@dataclass(frozen=True)
class PodRun:
    """One container to run. `extra_env` comes last; `stdout`: a file for it alone, beside the log.

    `volumes`: the directories of those that it mounts. `inside`: a process whose files it sees instead of its own.
    """

    name: str
    spec: Mapping[str, Any]
    root: Path
    log: Path
    container: str = "main"
    ip: str = "127.0.0.1"
    namespace: str = "default"
    extra_env: Mapping[str, str] = field(default_factory=dict)
    private: tuple[str, ...] | None = None
    stdout: Path | None = None
    volumes: Mapping[str, Made] = field(default_factory=dict)
    inside: int | None = None


POD = "REKINDLE_POD"  # the variable by which what a pod leaves is known: its root
FACTS: dict[str, Callable[[PodRun], str]] = {
    "metadata.name": lambda pod: pod.name,
    "metadata.namespace": lambda pod: pod.namespace,
    "status.podIP": lambda pod: pod.ip,
    "status.hostIP": lambda pod: "127.0.0.1",
    "spec.nodeName": lambda pod: os.uname().nodename,
}


class Process(subprocess.Popen[bytes]):
    """A container's first process, what it sees and says. `memory`: its limit, of no more use once it is over."""

    said: Said
    memory: limits.Memory | None = None
    view: filesystem.View | None = None

    def wait(self, timeout: float | None = None) -> int:
        code = super().wait(timeout)
        self._over()
        return code

    def poll(self) -> int | None:
        code = super().poll()
        if code is not None:
            self._over()
        return code

    def _over(self) -> None:
        self.said.over()
        if self.memory:
            self.memory.close()

    @property
    def code(self) -> int:
        """As a container has it: 128 more than the signal that ended it."""
        return self.returncode if self.returncode >= 0 else 128 - self.returncode

    @property
    def reason(self) -> str:
        """What Kubernetes calls its failure."""
        return "OOMKilled" if self.memory and self.memory.exceeded else "Error"

    @property
    def failure(self) -> str:
        return f"{self.reason} (exit code {self.code})"


def start(pod: PodRun, cluster: Cluster) -> Process:
    """Starts the process and returns at once.

    Raises ConfigError for what this machine cannot run, StartError, and OSError, ValueError for its limits.
    """
    container = _container(pod)
    environment = environ(pod, container, cluster)
    image = cluster.image(container["image"])
    command = container.get("command") or image.command
    given = container.get("args") or ([] if container.get("command") else image.args)
    if not (command or given):
        raise ConfigError(
            f"{pod.name}: container {container['name']} has no command, and its image's own is not known. Set it."
        )
    arguments = [expand(str(word), environment) for word in [*command, *given]]
    wanted = container.get("workingDir") or image.directory
    for what, text in [
        ("workingDir", wanted or ""),
        *(("an argument", argument) for argument in arguments),
        *environment.items(),
    ]:
        if "\0" in text:
            raise StartError(f"{what} contains a NUL byte: {text!r}")
    if PYTHON.fullmatch(arguments[0]):
        arguments[0] = image.python
    pod.root.mkdir(parents=True, exist_ok=True)
    pod.log.parent.mkdir(parents=True, exist_ok=True)
    view = enter = None
    private = _private(pod, wanted) if wanted else pod.private
    if private is not None and pod.inside:
        enter = filesystem.inside(pod.inside)
    elif private is not None:
        mounts = container.get("volumeMounts") or []
        binds = bound(pod.volumes, mounts, lambda text: expand(text, environment))
        workloads = [Path(folder) for folder in environment[project.PATH].split(os.pathsep) if folder]
        view = filesystem.View(pod.root, private, binds)
        enter = view.entry(workloads)
    with Said(pod.log, pod.stdout) as said:
        memory = limits.limited(container, f"{pod.name}.{container['name']}")
        try:
            process = Process(
                arguments,
                env=environment,
                cwd=None if enter else wanted or str(pod.root),
                stdin=subprocess.DEVNULL,
                stdout=said.out,
                stderr=said.err,
                start_new_session=True,
                preexec_fn=_Child(os.getpid(), memory, enter, wanted),
            )
        except BaseException:
            if memory:
                memory.close()
            raise
        finally:
            if view:
                view.begun()
    process.said, process.memory, process.view = said, memory, view
    return process


def _private(pod: PodRun, directory: str) -> tuple[str, ...] | None:
    """The pod's own paths, with a working directory that this machine lacks: a container runtime makes it.

    Raises StartError, and ConfigError where a pod cannot have directories of its own.
    """
    if not directory.startswith("/"):
        raise StartError(f"the working directory {directory!r} is not an absolute path")
    if max(map(len, os.fsencode(directory).split(b"/"))) > 255 or len(directory) > 4000:
        raise StartError(f"mkdir {directory}: file name too long")
    if os.path.exists(directory):
        return pod.private
    if filesystem.impossible([directory]) or not filesystem.available():
        raise ConfigError(f"{pod.name}: the working directory {directory} is not on this machine, and cannot be made.")
    return (*(pod.private or ()), directory)


def unknown_program(error: OSError) -> str:
    """What Argo's executor says of a command that is not there, in the words of Go's exec.LookPath."""
    name, why = str(error.filename), "permission denied"
    if isinstance(error, FileNotFoundError):
        why = f"stat {name}: no such file or directory" if "/" in name else "executable file not found in $PATH"
    return f'failed to find name in PATH: exec: "{name}": {why}'


class _Child:
    """Runs in the new process, before the program."""

    def __init__(self, parent: int, memory: limits.Memory | None, enter: Any, directory: str | None) -> None:
        self.parent, self.memory, self.enter, self.directory = parent, memory, enter, directory

    def __call__(self) -> None:
        die_with_parent(self.parent)
        signal.pthread_sigmask(signal.SIG_SETMASK, set())
        if self.memory:
            self.memory.enter()
        if self.enter:
            self.enter()
            if self.directory:
                os.makedirs(self.directory, exist_ok=True)  # where nothing of the machine is: see _private
                os.chdir(self.directory)


def _container(pod: PodRun) -> Mapping[str, Any]:
    for container in pod.spec.get("containers") or []:
        if container.get("name") == pod.container:
            return container
    raise ConfigError(f'{pod.name} has no container "{pod.container}".')


def environ(pod: PodRun, container: Mapping[str, Any], cluster: Cluster) -> dict[str, str]:
    """PATH, HOME, LANG, then what the manifest says, in the kubelet's order: envFrom, env, and `extra_env` last."""
    variables = {
        "PATH": f"{Path(sys.executable).parent}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": os.environ.get("HOME", "/"),
        "LANG": "C.UTF-8",
        "PYTHONUNBUFFERED": "1",
        project.PATH: os.environ.get(project.PATH, str(project.REFERENCE)),
    } | dict(cluster.service_variables())
    variables |= cluster.image(container["image"]).env
    _names(pod, container)
    for source in container.get("envFrom") or []:
        for kind, read in (("configMapRef", cluster.configmap), ("secretRef", cluster.secret)):
            if kind in source:
                values = _read(pod, read, source[kind])
                variables |= {source.get("prefix", "") + key: value for key, value in values.items()}
    for variable in container.get("env") or []:
        value = _value(pod, variable, cluster)
        if value is not None:
            variables[variable["name"]] = expand(value, variables)
    return variables | dict(pod.extra_env) | {POD: str(pod.root)}


def _names(pod: PodRun, container: Mapping[str, Any]) -> None:
    """Raises ConfigError for a name that an API server refuses."""
    prefixes = [source.get("prefix") or "x" for source in container.get("envFrom") or []]
    names_by_field = {"env": [variable["name"] for variable in container.get("env") or []], "envFrom": prefixes}
    for key, names in names_by_field.items():
        for index, name in enumerate(names):
            if not ENVIRONMENT_NAME.fullmatch(name):
                where = f'Pod "{pod.name}" is invalid: {container["name"]}.{key}[{index}]'
                raise ConfigError(f"{where} names {name!r}: it must be of printable ASCII characters other than '='")


def _read(pod: PodRun, read: Any, reference: Mapping[str, Any]) -> Mapping[str, str]:
    try:
        return read(reference["name"])
    except KeyError:
        if reference.get("optional"):
            return {}
        raise ConfigError(
            f"{pod.name} needs the ConfigMap or Secret {reference['name']!r}, which is not here."
        ) from None


def _value(pod: PodRun, variable: Mapping[str, Any], cluster: Cluster) -> str | None:
    source = variable.get("valueFrom")
    if not source:
        return str(variable.get("value") or "")
    for kind, read in (("configMapKeyRef", cluster.configmap), ("secretKeyRef", cluster.secret)):
        if reference := source.get(kind):
            values = _read(pod, read, reference)
            if reference["key"] in values:
                return values[reference["key"]]
            if reference.get("optional"):
                return None
            raise ConfigError(
                f"{pod.name}: {reference['name']} has no key {reference['key']!r} (for {variable['name']})."
            )
    return fact(pod, (source.get("fieldRef") or {}).get("fieldPath", ""), variable["name"])


def fact(pod: PodRun, path: str, name: str) -> str:
    """What a fieldRef to `path` gives `name`. Raises ConfigError."""
    if path not in FACTS:
        raise ConfigError(f"{pod.name}: the value of {name} cannot be had here: only {', '.join(FACTS)} can.")
    return FACTS[path](pod)


def expand(text: str, environment: Mapping[str, str]) -> str:
    """`$(NAME)` replaced where NAME is known; `$$` is one `$` (kubelet's rule)."""

    def substitute(match: re.Match[str]) -> str:
        return "$" if match[1] is None else environment.get(match[1], match[0])

    return VARIABLE.sub(substitute, text)
