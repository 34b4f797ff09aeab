"""Run containerSet templates: start the containers of one pod as processes, in the order of their
dependencies.

    group = ContainerSet(template, run, cluster)
    while not group.completed:
        for name, process in group.start_ready(now): ...
        group.on_exit(name, now)    # after the exit of a process

Each container has a separate root directory, and all share the volumes. The outputs of the template
are those of the container `main`. `retries` is the total number of attempts, as in Argo. Source:
Argo's container_set_template.go, operator.go (assessNodeStatus, inferFailedReason),
cmd/argoexec/commands/emissary.go; v4.1.
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
from argolocal.pods.kinds.sidecars import KINDS, Sidecars
from argolocal.pods.process import (
    ContainerRun,
    Process,
    StartError,
    missing_command_message,
    start_container,
)

# exit code that the kubelet reports for a container that cannot be started
START_ERROR_CODE = 128
RESERVED_NAMES = ("wait", "supervisor")


def members(template: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the containers of a containerSet template, each with the shared volume mounts."""
    group = template["containerSet"]
    shared_mounts = group.get("volumeMounts") or []
    return [
        {**container, "volumeMounts": [*(container.get("volumeMounts") or []), *shared_mounts]}
        for container in group["containers"]
    ]


def main_container(template: dict[str, Any]) -> dict[str, Any]:
    """Return the container whose outputs are collected, or {}."""
    if "containerSet" in template:
        return next(
            (container for container in members(template) if container["name"] == "main"), {}
        )
    return template.get("container") or template.get("script") or {}


class ContainerSet(Sidecars):
    """The containers of one containerSet template."""

    def __init__(self, template: dict[str, Any], run: ContainerRun, cluster: Cluster) -> None:
        super().__init__({}, run, cluster)
        self.main = main_container(template)
        self.is_inline = not template.get("name")
        self.containers = {container["name"]: container for container in members(template)}
        self.sidecar_specs = [
            container for container in self.containers.values() if container["name"] != "main"
        ]
        strategy = template["containerSet"].get("retryStrategy") or {}
        self.retry_delay = (
            gofmt.parse_seconds(strategy["duration"]) if strategy.get("duration") else 0.0
        )
        self.attempts_left = dict.fromkeys(self.containers, int(strategy.get("retries", 1)))
        self.retry_at: dict[str, float] = {}  # name of a container → time of its next attempt
        self.codes: dict[str, int] = {}  # name of a completed container → its exit code
        # name of a completed container → exit code that containers depending on it see
        self.visible_codes: dict[str, int] = {}
        self.errors: dict[str, str] = {}
        self.reasons: dict[str, str] = {}
        self.view: filesystem.View | None = None  # file system of the container `main`
        # (name, phase, message) of each container that has just completed
        self.events: list[tuple[str, str, str]] = []

    @property
    def completed(self) -> bool:
        return len(self.codes) == len(self.containers)

    @property
    def next_retry(self) -> float | None:
        return min(self.retry_at.values(), default=None)

    def start_ready(self, now: float) -> Iterator[tuple[str, Process]]:
        """Start the containers that are ready, and yield their names and processes. Raises
        ConfigError, OSError."""
        has_changed = True
        while has_changed:
            has_changed = False
            for name in self._pending():
                if self.retry_at.get(name, 0) > now or not self._dependencies_succeeded(name):
                    has_changed |= name in self.codes
                    continue

                self.retry_at.pop(name, None)
                self.attempts_left[name] -= 1
                # with `retries: 0`, not even one attempt is allowed
                if self.attempts_left[name] < 0:
                    self._record_end(name, 0)
                else:
                    self._try_start(name)

                if name in self.running:
                    yield name, self.running[name]
                else:
                    has_changed = True

    def _try_start(self, name: str) -> None:
        try:
            self.running[name] = self._run(name)
        except StartError as error:
            self._record_end(name, START_ERROR_CODE, str(error))
        except (FileNotFoundError, PermissionError) as error:
            # in Argo, the exit code of a container with dependencies gets lost
            if self.containers[name].get("dependencies"):
                visible_code = 0
            else:
                visible_code = exit_codes.EXECUTOR_ERROR
            self._record_end(
                name, exit_codes.EXECUTOR_ERROR, missing_command_message(error), visible_code
            )

    def on_exit(self, name: str, now: float) -> None:
        """Handle the exit of the process of container `name`: schedule a retry, or complete the
        container."""
        process = self.running.pop(name)
        if process.code and self.attempts_left[name] > 0:
            self.retry_at[name] = now + self.retry_delay
        else:
            self.reasons[name] = process.reason
            self._record_end(name, process.code)

    def kill(self) -> None:
        """Complete the containers that have not started, and cancel pending retries."""
        self.retry_at.clear()
        self.attempts_left = dict.fromkeys(self.attempts_left, 0)
        for name in self._pending():
            self._record_end(name, exit_codes.TERMINATED)

    def failure(self) -> str:
        """Return Argo's message about the first failed container in alphabetical order, or "". In
        inline templates, a failed container `main` takes precedence."""
        failed_names = sorted(
            (name for name, code in self.codes.items() if code),
            key=lambda name: (self.is_inline and name != "main", name),
        )
        if failed_names:
            return self._message(failed_names[0]).removesuffix(": ")
        return ""

    def _pending(self) -> list[str]:
        return [
            name for name in self.containers if name not in self.codes and name not in self.running
        ]

    def _dependencies_succeeded(self, name: str) -> bool:
        for dependency in self.containers[name].get("dependencies") or []:
            if dependency not in self.visible_codes:
                return False

            code = self.visible_codes[dependency]
            if code:
                self._record_end(
                    name,
                    exit_codes.EXECUTOR_ERROR,
                    f'dependency "{dependency}" exited with non-zero code: {code}',
                    code,
                )
                return False

        return True

    def _run(self, name: str) -> Process:
        if name == "main":
            process = start_container(replace(self.run, container=self.main), self.cluster)
            self.view = process.view
            return process
        return self._start(self.containers[name])

    def _record_end(
        self, name: str, code: int, error: str = "", visible_code: int | None = None
    ) -> None:
        self.codes[name] = code
        self.visible_codes[name] = code if visible_code is None else visible_code
        self.errors[name] = error
        phase = {0: "Succeeded", exit_codes.EXECUTOR_ERROR: "Error"}.get(code, "Failed")
        self.events.append((name, phase, self._message(name) if code else ""))

    def _message(self, name: str) -> str:
        return (
            f"{name}: {self.reasons.get(name, 'Error')} (exit code {self.codes[name]}):"
            f" {self.errors[name]}"
        )


def check(template: dict[str, Any], where: str) -> None:
    """Raise ConfigError for a containerSet that Argo rejects or that this system does not
    support."""
    group = template["containerSet"]
    where = f"{where}.containerSet"

    dependencies = {
        container["name"]: container.get("dependencies") or [] for container in group["containers"]
    }
    if not dependencies or len(dependencies) != len(group["containers"]):
        raise ConfigError(
            f"{where}.containers must have at least one container, each with a different name."
        )

    for index, container in enumerate(group["containers"]):
        if container["name"] in RESERVED_NAMES or container["name"].startswith("artifact-plugin-"):
            name = f"{where}.containers[{index}].name is {container['name']!r}"
            raise ConfigError(
                f"{name}, which is a name of Argo's own containers. Choose another name."
            )

        unknown = next(
            (name for name in dependencies[container["name"]] if name not in dependencies), None
        )
        if unknown:
            raise ConfigError(
                f"{where}.containers[{index}].dependencies names {unknown!r}, which is not a"
                " container of the set."
            )

    try:
        TopologicalSorter(dependencies).prepare()
    except CycleError as error:
        raise ConfigError(
            f"{where}.containers depend on each other: {' → '.join(error.args[1])}."
        ) from None

    files = [
        (template.get("inputs") or {}).get("artifacts"),
        *(template.get("outputs") or {}).values(),
    ]
    if any(files) and "main" not in dependencies:
        raise ConfigError(
            f'{where}.containers must include one named "main" if there are input artifacts or'
            " outputs."
        )

    retries = (group.get("retryStrategy") or {}).get("retries")
    if retries is not None and str(retries) == "0":
        raise ConfigError(
            f"{where}.retryStrategy.retries is 0: Argo would not run any container. 1 means one"
            " attempt."
        )

    if template.get("daemon"):
        raise ConfigError(
            f"{where} as a daemon is not supported by the local runner: use a container."
        )

    other_kinds = [kind for kind in KINDS if template.get(kind)]
    if other_kinds:
        raise ConfigError(
            f"{where} with {other_kinds[0]} is not supported by the local runner: move their"
            " containers to the set."
        )

    if not filesystem.available():
        raise ConfigError(
            f"{where} needs private mount namespaces, which are not available on this system."
        )
