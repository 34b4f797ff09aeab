"""Start a container as a process of this machine, in a new session and with the environment of the
manifest.

    process = start_container(ContainerRun(name, container, root=..., log=...), cluster)

The kernel kills the process when its parent dies. This module runs container and script templates,
and the pods of jobs and Deployments.
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
from argolocal.pods.container_images import Image
from argolocal.pods.log_pipe import LogPipe
from argolocal.pods.volumes import VolumeDirectory, make_bind_mounts

VARIABLE_REFERENCE = re.compile(r"\$\$|\$\(([^()]+)\)")
PYTHON_PROGRAM = re.compile(r"python[0-9.]*")
# printable ASCII except =, as in Kubernetes since 1.32
ENVIRONMENT_NAME = re.compile(r"[ -<>-~]+")


class StartError(OSError):
    """A container that no runtime could start. The kubelet reports exit code 128 for a container
    that no runtime could start."""


@dataclass(frozen=True)
class Origin:
    """The Python interpreter and import path of the command that created a pod. The processes of
    the pod use this interpreter and import path, too (see Cluster.path). `prefix`: the
    interpreter's sys.prefix."""

    python: str = sys.executable
    prefix: str = sys.prefix
    path: str = ""


@dataclass(frozen=True)
class ContainerRun:
    """One container to run.

    `name`: name of the pod. `root`: root directory of the pod. `extra_env`: variables that override
    the container's variables. `private_paths`: paths that are private to the pod, in addition to
    its volumes (see filesystem.py); with None, the container sees the machine's files. `stdout`:
    file that receives a copy of stdout. `volumes`: directories to mount. `root_pid`: pid of a
    process whose file system tree the container shares.
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
    # the default is the interpreter and import path of this process
    origin: Origin | None = None


# maximum length of a host name; as in the kubelet, a longer name of a pod is truncated
MAX_HOSTNAME_LENGTH = 63
# the kubelet's limit for a termination message
MAX_MESSAGE_BYTES = 4096
FIELD_READERS: dict[str, Callable[[ContainerRun], str]] = {
    "metadata.name": lambda run: run.name,
    "metadata.namespace": lambda run: run.namespace,
    "status.podIP": lambda run: run.ip,
    "status.hostIP": lambda run: "127.0.0.1",
    "spec.nodeName": lambda run: os.uname().nodename,
}


class TerminationMessage:
    """The termination message of a container, which the container writes to a file in memory. The
    environment variable program.TERMINATION_LOG_VARIABLE contains the path of the file."""

    def __init__(self) -> None:
        self.text = ""
        self.file = os.memfd_create("termination-log")
        self.variable = {program.TERMINATION_LOG_VARIABLE: f"/proc/self/fd/{self.file}"}

    def read(self) -> None:
        """Return the termination message, and close its file."""
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
    view: filesystem.FileSystemView | None = None

    def wait(self, timeout: float | None = None) -> int:
        return_code = super().wait(timeout)
        self._clean_up()
        return return_code

    def poll(self) -> int | None:
        return_code = super().poll()
        if return_code is not None:
            self._clean_up()
        return return_code

    def _clean_up(self) -> None:
        self.log_pipe.finish()
        self.message.read()
        if self.memory:
            self.memory.close()

    @property
    def code(self) -> int:
        """The exit code of a container, which is 128 + N if signal N ended the container."""
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


def start_container(container_run: ContainerRun, cluster: Cluster) -> Process:
    """Start the process of a container.

    Raises ConfigError or StartError if the container cannot run, and OSError or ValueError if its
    memory limit cannot be set.
    """
    container = container_run.container
    origin = container_run.origin or Origin(path=cluster.path)
    environment = make_environment(container_run, cluster)
    image = cluster.image(container["image"])
    arguments = _make_arguments(container_run, image, environment)
    working_directory = container.get("workingDir") or image.directory

    _reject_nul_bytes(
        [
            ("workingDir", working_directory or ""),
            *(("an argument", argument) for argument in arguments),
            *environment.items(),
        ]
    )

    if PYTHON_PROGRAM.fullmatch(arguments[0]):
        arguments[0] = origin.python if image.python == sys.executable else image.python

    container_run.root.mkdir(parents=True, exist_ok=True)
    container_run.log.parent.mkdir(parents=True, exist_ok=True)
    view, enter_view = _prepare_view(container_run, origin, environment, working_directory)

    with LogPipe(container_run.log, container_run.stdout) as log_pipe:
        memory_cgroup = limits.create_memory_cgroup(
            container, f"{container_run.name}.{container['name']}"
        )
        termination_message = TerminationMessage()

        try:
            environment.update(termination_message.variable)
            process = Process(
                arguments,
                env=environment,
                pass_fds=[termination_message.file],
                cwd=None if enter_view else working_directory or str(container_run.root),
                stdin=subprocess.DEVNULL,
                stdout=log_pipe.out,
                stderr=log_pipe.err,
                start_new_session=True,
                preexec_fn=_make_child_setup(
                    os.getpid(), memory_cgroup, enter_view, working_directory
                ),
            )
        except BaseException:
            termination_message.read()
            if memory_cgroup:
                memory_cgroup.close()

            raise
        finally:
            if view:
                view.child_started()

    process.environment = environment
    process.log_pipe = log_pipe
    process.message = termination_message
    process.memory = memory_cgroup
    process.view = view

    return process


def _make_arguments(
    container_run: ContainerRun, image: Image, environment: Mapping[str, str]
) -> list[str]:
    """Return the command line of a container, which consists of `command` and `args`; the image
    defines their default values. Raises ConfigError if neither the container nor the image defines
    a command."""
    container = container_run.container
    command = container.get("command") or image.command

    # as in Kubernetes, the arguments of the image only belong to the command of the image
    container_args = container.get("args") or ([] if container.get("command") else image.args)
    if not (command or container_args):
        raise ConfigError(
            f"{container_run.name}: the command of container {container['name']} is missing, and"
            " the default command of its image is not known. Set the command."
        )

    return [expand_variables(str(word), environment) for word in [*command, *container_args]]


def _prepare_view(
    container_run: ContainerRun,
    origin: Origin,
    environment: Mapping[str, str],
    working_directory: str | None,
) -> tuple[filesystem.FileSystemView | None, Callable[[], None] | None]:
    """Return a container's file system tree, and the function with which its process enters the
    tree. The returned tree is None if it belongs to another process. The returned tree and function
    are None if the container sees the machine's files.

    Raises ConfigError or OSError if the tree cannot be prepared.
    """
    if working_directory:
        private_paths = _paths_with_working_directory(container_run, working_directory)
    else:
        private_paths = container_run.private_paths

    if private_paths is None:
        return None, None
    if container_run.root_pid:
        return None, filesystem.enter_process_root(container_run.root_pid)

    bind_mounts = make_bind_mounts(
        container_run.volumes,
        container_run.container.get("volumeMounts") or [],
        lambda expression: expand_variables(expression, environment),
    )
    view = filesystem.FileSystemView(container_run.root, private_paths, bind_mounts)
    import_folders = [Path(folder) for folder in origin.path.split(os.pathsep) if folder]
    return view, view.prepare([*import_folders, Path(origin.prefix)])


def _reject_nul_bytes(named_texts: list[tuple[str, str]]) -> None:
    """Raise StartError for the first (name, text) with a NUL byte."""
    for name, text in named_texts:
        if "\0" in text:
            raise StartError(f"{name} contains a NUL byte: {text!r}")


def _paths_with_working_directory(
    container_run: ContainerRun, working_directory: str
) -> tuple[str, ...] | None:
    """Return the private paths of the container, and its working directory if this directory is
    missing on this machine, because container runtimes would create it.

    Raises StartError, or ConfigError if this system does not allow private directories.
    """
    if not working_directory.startswith("/"):
        raise StartError(f"the working directory {working_directory!r} is not an absolute path")
    if (
        max(map(len, os.fsencode(working_directory).split(b"/"))) > 255
        or len(working_directory) > 4000
    ):
        raise StartError(f"mkdir {working_directory}: file name too long")
    if os.path.exists(working_directory):
        return container_run.private_paths

    if (
        filesystem.find_unsupported_path([working_directory])
        or not filesystem.supports_namespaces()
    ):
        raise ConfigError(
            f"{container_run.name}: the working directory {working_directory} cannot be created"
            " here. Use a path below /tmp."
        )

    return (*(container_run.private_paths or ()), working_directory)


def describe_missing_command(error: OSError) -> str:
    """Return the message of Argo's executor (Go's exec.LookPath) about a command that does not
    exist or cannot be executed."""
    command_name = str(error.filename)
    reason = "permission denied"
    if isinstance(error, FileNotFoundError):
        if "/" in command_name:
            reason = f"stat {command_name}: no such file or directory"
        else:
            reason = "executable file not found in $PATH"
    return f'failed to find name in PATH: exec: "{command_name}": {reason}'


def _make_child_setup(
    parent_pid: int,
    memory_cgroup: limits.MemoryCgroup | None,
    enter_view: Callable[[], None] | None,
    working_directory: str | None,
) -> Callable[[], None]:
    """Return the function that the child process must call before exec."""

    def set_up_child() -> None:
        die_with_parent(parent_pid)
        signal.pthread_sigmask(signal.SIG_SETMASK, set())
        stop_ignoring_signals()
        if memory_cgroup:
            memory_cgroup.enter()
        if enter_view:
            enter_view()
            if working_directory:
                # the working directory is private to the pod: see _paths_with_working_directory
                os.makedirs(working_directory, exist_ok=True)
                os.chdir(working_directory)

    return set_up_child


def make_environment(container_run: ContainerRun, cluster: Cluster) -> dict[str, str]:
    """Return the environment of a container, which consists of PATH, HOME, LANG and HOSTNAME,
    followed by the variables of envFrom, env and `extra_env`. A later variable overrides an earlier
    variable with the same name."""
    container = container_run.container
    origin = container_run.origin or Origin(path=cluster.path)

    variables = {
        "PATH": (
            f"{Path(origin.python).parent}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        ),
        "HOME": os.environ.get("HOME", "/"),
        "LANG": "C.UTF-8",
        "PYTHONUNBUFFERED": "1",
        "HOSTNAME": container_run.name[:MAX_HOSTNAME_LENGTH].rstrip("-."),
    } | dict(cluster.service_variables())

    if origin.path:
        variables[program.environment_variable("PATH")] = origin.path

    variables.update(cluster.image(container["image"]).env)
    _check_names(container_run)

    for env_source in container.get("envFrom") or []:
        prefix = env_source.get("prefix", "")
        for reference_field, read_object in (
            ("configMapRef", cluster.configmap),
            ("secretRef", cluster.secret),
        ):
            if reference_field in env_source:
                object_data = _read_object(container_run, read_object, env_source[reference_field])
                variables.update({prefix + key: value for key, value in object_data.items()})

    for env_variable in container.get("env") or []:
        value = _resolve_variable(container_run, env_variable, cluster)
        if value is not None:
            variables[env_variable["name"]] = expand_variables(value, variables)

    return (
        variables | dict(container_run.extra_env) | {program.POD_VARIABLE: str(container_run.root)}
    )


def _check_names(container_run: ContainerRun) -> None:
    """Raise ConfigError if the API server would reject the name of an environment variable or a
    prefix of `envFrom`."""
    container = container_run.container
    prefix_names = [
        env_source.get("prefix") or "x" for env_source in container.get("envFrom") or []
    ]

    names_by_field = {
        "env": [env_variable["name"] for env_variable in container.get("env") or []],
        "envFrom": prefix_names,
    }
    for env_field, variable_names in names_by_field.items():
        for index, variable_name in enumerate(variable_names):
            if not ENVIRONMENT_NAME.fullmatch(variable_name):
                raise ConfigError(
                    f'Pod "{container_run.name}" is invalid:'
                    f" {container['name']}.{env_field}[{index}] is {variable_name!r}: it must"
                    " consist of printable ASCII characters except '='."
                )


def _read_object(
    container_run: ContainerRun,
    read_object: Callable[[str], Mapping[str, str]],
    object_reference: Mapping[str, Any],
) -> Mapping[str, str]:
    """Return the data of a ConfigMap or Secret, or {} if the object is optional and missing. Raises
    ConfigError."""
    try:
        return read_object(object_reference["name"])
    except KeyError:
        if object_reference.get("optional"):
            return {}
        raise ConfigError(
            f"{container_run.name} needs the ConfigMap or Secret {object_reference['name']!r},"
            " which does not exist here. Create this object."
        ) from None


def _resolve_variable(
    container_run: ContainerRun, env_variable: Mapping[str, Any], cluster: Cluster
) -> str | None:
    """Return the value of an environment variable. Return None if the key of the ConfigMap or
    Secret is optional and missing. Raises ConfigError."""
    value_source = env_variable.get("valueFrom")
    if not value_source:
        return str(env_variable.get("value") or "")

    for reference_field, read_object in (
        ("configMapKeyRef", cluster.configmap),
        ("secretKeyRef", cluster.secret),
    ):
        object_reference = value_source.get(reference_field)
        if object_reference:
            object_data = _read_object(container_run, read_object, object_reference)
            if object_reference["key"] in object_data:
                return object_data[object_reference["key"]]
            if object_reference.get("optional"):
                return None

            raise ConfigError(
                f"{container_run.name}: {object_reference['name']} does not contain"
                f" {object_reference['key']!r} (for the variable {env_variable['name']})."
            )

    return read_field(
        container_run,
        (value_source.get("fieldRef") or {}).get("fieldPath", ""),
        env_variable["name"],
    )


def read_field(container_run: ContainerRun, field_path: str, variable_name: str) -> str:
    """Return the value of a field of the pod, such as `metadata.name`. `variable_name`: the
    variable or file that refers to the field. Raises ConfigError."""
    if field_path not in FIELD_READERS:
        raise ConfigError(
            f"{container_run.name}: the fieldPath {field_path!r} of {variable_name} must be one of"
            f" {', '.join(FIELD_READERS)}."
        )
    return FIELD_READERS[field_path](container_run)


def expand_variables(text: str, environment: Mapping[str, str]) -> str:
    """Replace `$(NAME)` by the value of an existing variable, and `$$` by `$`, as the kubelet
    does."""

    def substitute(match: re.Match[str]) -> str:
        if match[1] is None:
            return "$"
        return environment.get(match[1], match[0])

    return VARIABLE_REFERENCE.sub(substitute, text)
