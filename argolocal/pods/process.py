"""Start a container as a process of this machine, in a new session and with the environment of the
manifest.

    process = start_container(ContainerRun(name, container, root=..., log=...), cluster)

The kernel kills the process when its parent dies. This module runs container and script templates,
and the pods of jobs and Deployments. `root` is the root directory of the pod. `private_paths` are
private to the pod, in addition to its volumes (see filesystem.py).
"""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from argolocal.common import program
from argolocal.common.linux import die_with_parent, stop_ignoring_signals
from argolocal.errors import ConfigError
from argolocal.interfaces import Cluster
from argolocal.pods import filesystem, limits
from argolocal.pods.log_pipe import LogPipe
from argolocal.pods.volumes import VolumeDirectory, bind_mounts

VARIABLE = re.compile(r"\$\$|\$\(([^()]+)\)")
PYTHON = re.compile(r"python[0-9.]*")
ENVIRONMENT_NAME = re.compile(r"[ -<>-~]+")  # printable ASCII except =, as in Kubernetes since 1.32


class StartError(OSError):
    """The container cannot be started by any runtime. The kubelet reports exit code 128."""


@dataclass(frozen=True)
class Origin:
    """The Python interpreter and import path of the command that created a pod. The pod uses them,
    too (see Cluster.path)."""

    python: str = sys.executable
    prefix: str = sys.prefix
    path: str = ""


@dataclass(frozen=True)
class ContainerRun:
    """One container to run.

    `extra_env`: variables that override the container's variables. `stdout`: file that receives a
    copy of stdout. `volumes`: directories to mount. `root_pid`: pid of a process whose file system
    tree the container shares.
    """

    name: str
    container: Mapping[str, Any]
    root: Path
    log: Path
    ip: str = "127.0.0.1"
    namespace: str = "default"
    extra_env: Mapping[str, str] = field(default_factory=dict)
    private_paths: tuple[str, ...] | None = None
    stdout: Path | None = None
    volumes: Mapping[str, VolumeDirectory] = field(default_factory=dict)
    root_pid: int | None = None
    origin: Origin | None = None  # the default is the interpreter and import path of this process


# maximum number of characters of a host name; the kubelet truncates the pod's name to it
MAX_HOSTNAME = 63
MAX_MESSAGE_BYTES = 4096  # the kubelet's limit for a termination message
FIELDS: dict[str, Callable[[ContainerRun], str]] = {
    "metadata.name": lambda run: run.name,
    "metadata.namespace": lambda run: run.namespace,
    "status.podIP": lambda run: run.ip,
    "status.hostIP": lambda run: "127.0.0.1",
    "spec.nodeName": lambda run: os.uname().nodename,
}


class TerminationMessage:
    """The termination message of a container: a file in memory. The path of the file is in the
    container's environment variable program.TERMINATION_LOG."""

    def __init__(self) -> None:
        self.text = ""
        self.file = os.memfd_create("termination-log")
        self.variable = {program.TERMINATION_LOG: f"/proc/self/fd/{self.file}"}

    def read(self) -> None:
        """Read the text from the file and close the file."""
        if self.file >= 0:
            self.text = os.pread(self.file, MAX_MESSAGE_BYTES, 0).decode(errors="replace")
            os.close(self.file)
            self.file = -1


class Process(subprocess.Popen[bytes]):
    """The first process of a container, with its environment, log pipe, memory limit and file
    system tree."""

    environment: Mapping[str, str]
    log_pipe: LogPipe
    message: TerminationMessage
    memory: limits.MemoryCgroup | None = None
    view: filesystem.View | None = None

    def wait(self, timeout: float | None = None) -> int:
        code = super().wait(timeout)
        self._clean_up()
        return code

    def poll(self) -> int | None:
        code = super().poll()
        if code is not None:
            self._clean_up()
        return code

    def _clean_up(self) -> None:
        self.log_pipe.finish()
        self.message.read()
        if self.memory:
            self.memory.close()

    @property
    def code(self) -> int:
        """The exit code of a container: 128 + N for signal N."""
        if self.returncode >= 0:
            return self.returncode
        return 128 - self.returncode

    @property
    def reason(self) -> str:
        """The reason that Kubernetes would report for the failure of the container, such as
        OOMKilled."""
        if self.memory and self.memory.limit_exceeded:
            return "OOMKilled"
        return "Error"

    @property
    def failure(self) -> str:
        """Argo's message about the failure of the container, including the termination message."""
        return f"{self.reason} (exit code {self.code})" + (
            f": {self.message.text}" if self.message.text else ""
        )


def start_container(run: ContainerRun, cluster: Cluster) -> Process:
    """Start the process of a container.

    Raises ConfigError or StartError if the container cannot run, and OSError or ValueError if its
    memory limit cannot be set.
    """
    container = run.container
    origin = run.origin or Origin(path=cluster.path)
    environment = container_environment(run, cluster)
    image = cluster.image(container["image"])
    command = container.get("command") or image.command

    args = container.get("args") or ([] if container.get("command") else image.args)
    if not (command or args):
        raise ConfigError(
            f"{run.name}: the command of container {container['name']} is missing, and the default "
            "command of its image is not known. Set the command."
        )

    arguments = [expand_variables(str(word), environment) for word in [*command, *args]]
    directory = container.get("workingDir") or image.directory

    _check_nul(
        [
            ("workingDir", directory or ""),
            *(("an argument", word) for word in arguments),
            *environment.items(),
        ]
    )

    if PYTHON.fullmatch(arguments[0]):
        arguments[0] = origin.python if image.python == sys.executable else image.python

    run.root.mkdir(parents=True, exist_ok=True)
    run.log.parent.mkdir(parents=True, exist_ok=True)
    view = enter = None

    if directory:
        private_paths = _paths_with_working_directory(run, directory)
    else:
        private_paths = run.private_paths

    if private_paths is not None and run.root_pid:
        enter = filesystem.enter_process_root(run.root_pid)
    elif private_paths is not None:
        mounts = container.get("volumeMounts") or []
        binds = bind_mounts(run.volumes, mounts, lambda text: expand_variables(text, environment))
        workloads = [Path(folder) for folder in origin.path.split(os.pathsep) if folder]
        view = filesystem.View(run.root, private_paths, binds)
        enter = view.prepare([*workloads, Path(origin.prefix)])

    with LogPipe(run.log, run.stdout) as log_pipe:
        memory = limits.create_memory_cgroup(container, f"{run.name}.{container['name']}")
        message = TerminationMessage()

        try:
            environment.update(message.variable)
            process = Process(
                arguments,
                env=environment,
                pass_fds=[message.file],
                cwd=None if enter else directory or str(run.root),
                stdin=subprocess.DEVNULL,
                stdout=log_pipe.out,
                stderr=log_pipe.err,
                start_new_session=True,
                preexec_fn=_make_child_setup(os.getpid(), memory, enter, directory),
            )
        except BaseException:
            message.read()
            if memory:
                memory.close()

            raise
        finally:
            if view:
                view.child_started()

    process.environment = environment
    process.log_pipe = log_pipe
    process.message = message
    process.memory = memory
    process.view = view

    return process


def _check_nul(texts: list[tuple[str, str]]) -> None:
    """Raise StartError for the first (name, text) with a NUL byte."""
    for name, text in texts:
        if "\0" in text:
            raise StartError(f"{name} contains a NUL byte: {text!r}")


def _paths_with_working_directory(run: ContainerRun, directory: str) -> tuple[str, ...] | None:
    """Return the private paths. A missing working directory is included, because container runtimes
    would create it.

    Raises StartError, or ConfigError if this system does not allow private directories.
    """
    if not directory.startswith("/"):
        raise StartError(f"the working directory {directory!r} is not an absolute path")
    if max(map(len, os.fsencode(directory).split(b"/"))) > 255 or len(directory) > 4000:
        raise StartError(f"mkdir {directory}: file name too long")
    if os.path.exists(directory):
        return run.private_paths

    if filesystem.unsupported_path([directory]) or not filesystem.available():
        raise ConfigError(
            f"{run.name}: the working directory {directory} cannot be created here. Use a path"
            " below /tmp."
        )

    return (*(run.private_paths or ()), directory)


def missing_command_message(error: OSError) -> str:
    """Return the message of Argo's executor (Go's exec.LookPath) about a missing command."""
    name = str(error.filename)
    reason = "permission denied"
    if isinstance(error, FileNotFoundError):
        if "/" in name:
            reason = f"stat {name}: no such file or directory"
        else:
            reason = "executable file not found in $PATH"
    return f'failed to find name in PATH: exec: "{name}": {reason}'


def _make_child_setup(
    parent: int,
    memory: limits.MemoryCgroup | None,
    enter: Callable[[], None] | None,
    directory: str | None,
) -> Callable[[], None]:
    """Return the function that the child process must call before exec."""

    def set_up_child() -> None:
        die_with_parent(parent)
        signal.pthread_sigmask(signal.SIG_SETMASK, set())
        stop_ignoring_signals()
        if memory:
            memory.enter()
        if enter:
            enter()
            if directory:
                # the directory is private: see _paths_with_working_directory
                os.makedirs(directory, exist_ok=True)
                os.chdir(directory)

    return set_up_child


def container_environment(run: ContainerRun, cluster: Cluster) -> dict[str, str]:
    """Return the environment of a container: PATH, HOME, LANG and HOSTNAME, then the variables of
    envFrom, env and `extra_env`. Later variables override earlier ones."""
    container = run.container
    origin = run.origin or Origin(path=cluster.path)

    variables = {
        "PATH": (
            f"{Path(origin.python).parent}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        ),
        "HOME": os.environ.get("HOME", "/"),
        "LANG": "C.UTF-8",
        "PYTHONUNBUFFERED": "1",
        "HOSTNAME": run.name[:MAX_HOSTNAME].rstrip("-."),
    } | dict(cluster.service_variables())

    if origin.path:
        variables[program.variable("PATH")] = origin.path

    variables.update(cluster.image(container["image"]).env)
    _check_names(run)

    for source in container.get("envFrom") or []:
        for kind, read in (("configMapRef", cluster.configmap), ("secretRef", cluster.secret)):
            if kind in source:
                values = _read_object(run, read, source[kind])
                variables.update(
                    {source.get("prefix", "") + key: value for key, value in values.items()}
                )

    for variable in container.get("env") or []:
        value = _variable_value(run, variable, cluster)
        if value is not None:
            variables[variable["name"]] = expand_variables(value, variables)

    return variables | dict(run.extra_env) | {program.POD: str(run.root)}


def _check_names(run: ContainerRun) -> None:
    """Raise ConfigError for the name of an environment variable that the API server rejects."""
    container = run.container
    prefixes = [source.get("prefix") or "x" for source in container.get("envFrom") or []]

    names_by_field = {
        "env": [variable["name"] for variable in container.get("env") or []],
        "envFrom": prefixes,
    }
    for key, names in names_by_field.items():
        for index, name in enumerate(names):
            if not ENVIRONMENT_NAME.fullmatch(name):
                where = f'Pod "{run.name}" is invalid: {container["name"]}.{key}[{index}]'
                raise ConfigError(
                    f"{where} is {name!r}: it must consist of printable ASCII characters except"
                    " '='."
                )


def _read_object(
    run: ContainerRun, read: Callable[[str], Mapping[str, str]], reference: Mapping[str, Any]
) -> Mapping[str, str]:
    try:
        return read(reference["name"])
    except KeyError:
        if reference.get("optional"):
            return {}
        raise ConfigError(
            f"{run.name} needs the ConfigMap or Secret {reference['name']!r}, which does not exist "
            "here. Create this object."
        ) from None


def _variable_value(run: ContainerRun, variable: Mapping[str, Any], cluster: Cluster) -> str | None:
    source = variable.get("valueFrom")
    if not source:
        return str(variable.get("value") or "")

    for kind, read in (("configMapKeyRef", cluster.configmap), ("secretKeyRef", cluster.secret)):
        reference = source.get(kind)
        if reference:
            values = _read_object(run, read, reference)
            if reference["key"] in values:
                return values[reference["key"]]
            if reference.get("optional"):
                return None

            raise ConfigError(
                f"{run.name}: {reference['name']} does not contain {reference['key']!r} "
                f"(for the variable {variable['name']})."
            )

    return field_value(run, (source.get("fieldRef") or {}).get("fieldPath", ""), variable["name"])


def field_value(run: ContainerRun, path: str, name: str) -> str:
    """Return the value of the environment variable `name`, whose fieldRef has the fieldPath `path`.
    Raises ConfigError."""
    if path not in FIELDS:
        raise ConfigError(
            f"{run.name}: the fieldPath {path!r} of {name} must be one of {', '.join(FIELDS)}."
        )
    return FIELDS[path](run)


def expand_variables(text: str, environment: Mapping[str, str]) -> str:
    """Replace `$(NAME)` by the value of an existing variable, and `$$` by `$`, as the kubelet
    does."""

    def substitute(match: re.Match[str]) -> str:
        if match[1] is None:
            return "$"
        return environment.get(match[1], match[0])

    return VARIABLE.sub(substitute, text)
