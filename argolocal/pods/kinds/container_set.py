"""Run containerSet templates: start the containers of one pod as processes, in the order of their
dependencies.

    group = ContainerSet(template, container_run, cluster)
    while not group.completed:
        for container_name, process in group.start_ready(now): ...
        group.on_exit(container_name, now)    # after the exit of a process

Each container of a containerSet has a separate root directory, and all its containers share the
volumes. The outputs of the template are the outputs of the container `main`. `retries` is the total
number of attempts, as in Argo. The behaviour follows Argo's container_set_template.go, operator.go
(assessNodeStatus, inferFailedReason), cmd/argoexec/commands/emissary.go; v4.1.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from graphlib import CycleError, TopologicalSorter
from typing import Any

from argolocal.common import exit_codes
from argolocal.errors import ConfigError
from argolocal.interfaces import Cluster
from argolocal.language import gofmt
from argolocal.pods import filesystem
from argolocal.pods.kinds.sidecars import CONTAINER_LIST_FIELDS, Sidecars
from argolocal.pods.process import (
    ContainerRun,
    Process,
    StartError,
    describe_missing_command,
    start_container,
)

# exit code that the kubelet reports for a container that cannot be started
START_ERROR_CODE = 128
RESERVED_CONTAINER_NAMES = ("wait", "supervisor")


def list_containers(template: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the containers of a containerSet template, each with the shared volume mounts."""
    container_set = template["containerSet"]
    shared_mounts = container_set.get("volumeMounts") or []
    return [
        {**container, "volumeMounts": [*(container.get("volumeMounts") or []), *shared_mounts]}
        for container in container_set["containers"]
    ]


def main_container(template: dict[str, Any]) -> dict[str, Any]:
    """Return the container whose outputs are collected, or {}."""
    if "containerSet" in template:
        return next(
            (container for container in list_containers(template) if container["name"] == "main"),
            {},
        )
    return template.get("container") or template.get("script") or {}


class ContainerSet(Sidecars):
    """The containers of one containerSet template.

    The value True of `is_inline` for a template inside a step or task, which has no name.
    `attempts_left`: number of remaining attempts by container name. `errors` and `reasons`: causes
    of failures by container name.
    """

    def __init__(
        self, template: dict[str, Any], container_run: ContainerRun, cluster: Cluster
    ) -> None:
        super().__init__({}, container_run, cluster)
        self.main = main_container(template)
        self.is_inline = not template.get("name")
        self.containers = {container["name"]: container for container in list_containers(template)}
        self.sidecar_specs = [
            container for container in self.containers.values() if container["name"] != "main"
        ]
        retry_strategy = template["containerSet"].get("retryStrategy") or {}
        self.retry_delay = (
            gofmt.parse_seconds(retry_strategy["duration"])
            if retry_strategy.get("duration")
            else 0.0
        )
        self.attempts_left = dict.fromkeys(self.containers, int(retry_strategy.get("retries", 1)))
        # name of a container → time of its next attempt
        self.retry_at: dict[str, float] = {}
        # name of a completed container → its exit code
        self.codes: dict[str, int] = {}
        # name of a completed container → exit code that containers depending on it see
        self.visible_codes: dict[str, int] = {}
        self.errors: dict[str, str] = {}
        self.reasons: dict[str, str] = {}
        # file system of the container `main`
        self.view: filesystem.FileSystemView | None = None
        # (name, phase, message) of each container that has just completed
        self.events: list[tuple[str, str, str]] = []

    @property
    def completed(self) -> bool:
        """True if all containers have ended."""
        return len(self.codes) == len(self.containers)

    @property
    def next_retry(self) -> float | None:
        """The unix time of the next attempt, or None if no container waits for an attempt."""
        return min(self.retry_at.values(), default=None)

    def start_ready(self, now: float) -> Iterator[tuple[str, Process]]:
        """Start the containers whose dependencies have succeeded and whose retry is due. Yield the
        names and processes of the started containers. Raises ConfigError or OSError if a container
        cannot start."""
        has_changed = True
        while has_changed:
            has_changed = False
            for container_name in self._list_pending():
                if self.retry_at.get(container_name, 0) > now or not self._dependencies_succeeded(
                    container_name
                ):
                    has_changed |= container_name in self.codes
                    continue

                self.retry_at.pop(container_name, None)
                self.attempts_left[container_name] -= 1
                # with `retries: 0`, not even one attempt is allowed
                if self.attempts_left[container_name] < 0:
                    self._record_end(container_name, 0)
                else:
                    self._try_start(container_name)

                if container_name in self.running:
                    yield container_name, self.running[container_name]
                else:
                    has_changed = True

    def _try_start(self, container_name: str) -> None:
        """Start a container. If the command of the container cannot be started, complete the
        container."""
        try:
            self.running[container_name] = self._run(container_name)
        except StartError as error:
            self._record_end(container_name, START_ERROR_CODE, str(error))
        except (FileNotFoundError, PermissionError) as error:
            # Argo loses the exit code of a container with dependencies
            if self.containers[container_name].get("dependencies"):
                visible_exit_code = 0
            else:
                visible_exit_code = exit_codes.EXECUTOR_ERROR
            self._record_end(
                container_name,
                exit_codes.EXECUTOR_ERROR,
                describe_missing_command(error),
                visible_exit_code,
            )

    def on_exit(self, container_name: str, now: float) -> None:
        """Handle the exit of the process of container `container_name`: schedule a retry, or
        complete the container."""
        process = self.running.pop(container_name)
        if process.code and self.attempts_left[container_name] > 0:
            self.retry_at[container_name] = now + self.retry_delay
        else:
            self.reasons[container_name] = process.reason
            self._record_end(container_name, process.code)

    def kill(self) -> None:
        """Complete the containers that have not started, and cancel pending retries."""
        self.retry_at.clear()
        self.attempts_left = dict.fromkeys(self.attempts_left, 0)
        for container_name in self._list_pending():
            self._record_end(container_name, exit_codes.TERMINATED)

    def failure(self) -> str:
        """Return Argo's message about the first failed container in alphabetical order, or "". In
        an inline template, a failed container `main` takes precedence over other failed
        containers."""
        failed_names = sorted(
            (container_name for container_name, exit_code in self.codes.items() if exit_code),
            key=lambda container_name: (
                self.is_inline and container_name != "main",
                container_name,
            ),
        )
        if failed_names:
            return self._message(failed_names[0]).removesuffix(": ")
        return ""

    def _list_pending(self) -> list[str]:
        """Return the names of the containers that are neither running nor completed."""
        return [
            container_name
            for container_name in self.containers
            if container_name not in self.codes and container_name not in self.running
        ]

    def _dependencies_succeeded(self, container_name: str) -> bool:
        """Return True if all dependencies of a container have succeeded. If a dependency has
        failed, complete the container with Error."""
        for dependency in self.containers[container_name].get("dependencies") or []:
            if dependency not in self.visible_codes:
                return False

            exit_code = self.visible_codes[dependency]
            if exit_code:
                self._record_end(
                    container_name,
                    exit_codes.EXECUTOR_ERROR,
                    f'dependency "{dependency}" exited with non-zero code: {exit_code}',
                    exit_code,
                )
                return False

        return True

    def _run(self, container_name: str) -> Process:
        if container_name == "main":
            process = start_container(replace(self.run, container=self.main), self.cluster)
            self.view = process.view
            return process
        return self._start(self.containers[container_name])

    def _record_end(
        self,
        container_name: str,
        exit_code: int,
        error: str = "",
        visible_exit_code: int | None = None,
    ) -> None:
        """Complete a container. `visible_exit_code`: exit code that containers depending on it see,
        by default `exit_code`."""
        self.codes[container_name] = exit_code
        self.visible_codes[container_name] = (
            exit_code if visible_exit_code is None else visible_exit_code
        )
        self.errors[container_name] = error
        phase = {0: "Succeeded", exit_codes.EXECUTOR_ERROR: "Error"}.get(exit_code, "Failed")
        self.events.append(
            (container_name, phase, self._message(container_name) if exit_code else "")
        )

    def _message(self, container_name: str) -> str:
        return (
            f"{container_name}: {self.reasons.get(container_name, 'Error')} (exit code"
            f" {self.codes[container_name]}): {self.errors[container_name]}"
        )


def check_container_set(template: dict[str, Any], field_path: str) -> None:
    """Raise ConfigError for a containerSet that Argo rejects or that this system does not
    support."""
    container_set = template["containerSet"]
    field_path = f"{field_path}.containerSet"
    _check_containers(container_set["containers"], f"{field_path}.containers")

    artifact_lists = [
        (template.get("inputs") or {}).get("artifacts"),
        *(template.get("outputs") or {}).values(),
    ]
    has_main = any(container["name"] == "main" for container in container_set["containers"])
    if any(artifact_lists) and not has_main:
        raise ConfigError(
            f'{field_path}.containers must include one named "main" if there are input artifacts or'
            " outputs."
        )

    retry_count = (container_set.get("retryStrategy") or {}).get("retries")
    if retry_count is not None and str(retry_count) == "0":
        raise ConfigError(
            f"{field_path}.retryStrategy.retries is 0: Argo would not run any container. 1 means"
            " one attempt."
        )

    if template.get("daemon"):
        raise ConfigError(
            f"{field_path} as a daemon is not supported by the local runner: use a container."
        )

    other_kinds = [other_kind for other_kind in CONTAINER_LIST_FIELDS if template.get(other_kind)]
    if other_kinds:
        raise ConfigError(
            f"{field_path} with {other_kinds[0]} is not supported by the local runner: move their"
            " containers to the set."
        )

    if not filesystem.supports_namespaces():
        raise ConfigError(
            f"{field_path} needs private mount namespaces, which are not available on this system."
        )


def _check_containers(containers: list[dict[str, Any]], field_path: str) -> None:
    """Raise ConfigError for an invalid name, an unknown dependency or a cycle of dependencies."""
    dependencies = {
        container["name"]: container.get("dependencies") or [] for container in containers
    }
    if not dependencies or len(dependencies) != len(containers):
        raise ConfigError(
            f"{field_path} must have at least one container, each with a different name."
        )

    for index, container in enumerate(containers):
        name = container["name"]
        if name in RESERVED_CONTAINER_NAMES or name.startswith("artifact-plugin-"):
            raise ConfigError(
                f"{field_path}[{index}].name is {name!r}, which is a name of Argo's own"
                " containers. Choose another name."
            )

        for dependency in dependencies[name]:
            if dependency not in dependencies:
                raise ConfigError(
                    f"{field_path}[{index}].dependencies names {dependency!r}, which is not a"
                    " container of the set."
                )

    try:
        TopologicalSorter(dependencies).prepare()
    except CycleError as error:
        raise ConfigError(
            f"{field_path} depend on each other: {' → '.join(error.args[1])}."
        ) from None
