"""Run initContainers one after another before the main container, and sidecars in parallel with the
main container.

    sidecars = Sidecars(template, container_run, cluster)
    process = sidecars.start_next_init()
    sidecars.start_sidecars()
    failure_message = sidecars.stop(grace_seconds)

Each container of a pod has a separate root directory, and all its containers share the volumes.
"""

import contextlib
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from argolocal.common import exit_codes
from argolocal.common.processes import signal_group
from argolocal.errors import ConfigError
from argolocal.interfaces import Cluster
from argolocal.pods import artifacts, filesystem
from argolocal.pods.process import ContainerRun, Process, start_container
from argolocal.pods.volumes import VolumeDirectory

# exit codes of a sidecar that has ended by itself without an error, or by a SIGTERM or SIGKILL that
# this runner has sent
TERMINATED_EXIT_CODES = (0, exit_codes.KILLED, exit_codes.TERMINATED)
CONTAINER_LIST_FIELDS = ("initContainers", "sidecars")


class Sidecars:
    """The init containers and sidecars of one pod. `run`: the main container. `running`: processes
    of the sidecars by name."""

    def __init__(
        self, template: dict[str, Any], container_run: ContainerRun, cluster: Cluster
    ) -> None:
        self.run = container_run
        self.cluster = cluster
        self.main = template.get("container") or template.get("script") or {}
        input_artifacts = (template.get("inputs") or {}).get("artifacts") or []
        self.input_paths = [
            artifact["path"] for artifact in input_artifacts if artifact.get("path")
        ]
        self.init_specs = list(template.get("initContainers") or [])
        self.sidecar_specs = list(template.get("sidecars") or [])
        self.running: dict[str, Process] = {}
        # name of the running init container
        self.init_name = ""
        # the reason why the log of a sidecar is incomplete
        self.log_error: OSError | None = None

    def start_next_init(self) -> Process | None:
        """Start the next init container and return its process. Return None if all init containers
        have run. Raises ConfigError or OSError if the init container cannot start."""
        if not self.init_specs:
            self.init_name = ""
            return None
        container = self.init_specs.pop(0)
        self.init_name = container["name"]
        return self._start(container)

    def start_sidecars(self) -> None:
        """Start all sidecars. Raises ConfigError or OSError if a sidecar cannot start."""
        for container in self.sidecar_specs:
            self.running[container["name"]] = self._start(container)

    def stop(self, grace_seconds: float) -> str:
        """Send SIGTERM to the sidecars, send SIGKILL after `grace_seconds` seconds, and wait for
        their end. Return Argo's message about a failed sidecar, or "" if no sidecar has failed."""
        # two threads may call `stop` at the same time: one thread to collect outputs, another to
        # stop the run
        processes = dict(self.running)
        for process in processes.values():
            signal_group(process.pid, signal.SIGTERM)

        kill_at = time.monotonic() + grace_seconds
        for process in processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, kill_at - time.monotonic()))

            signal_group(process.pid, signal.SIGKILL)
            process.wait()

        self.running.clear()
        self.log_error = next(
            (process.log_pipe.error for process in processes.values() if process.log_pipe.error),
            self.log_error,
        )
        for container in (*self.sidecar_specs, *self.init_specs):
            artifacts.remove_directory(self._container_root(container))

        failed_sidecars = (
            (container_name, process)
            for container_name, process in processes.items()
            if process.code not in TERMINATED_EXIT_CODES
        )
        return next(
            (f"{container_name}: {process.failure}" for container_name, process in failed_sidecars),
            "",
        )

    def _container_root(self, container: dict[str, Any]) -> Path:
        return self.run.root.with_name(f"{self.run.root.name}.{container['name']}")

    def _start(self, container: dict[str, Any]) -> Process:
        mirrored_mounts, input_volumes = (
            self._mirror_mounts() if container.get("mirrorVolumeMounts") else ([], {})
        )
        volume_mounts = [*(container.get("volumeMounts") or []), *mirrored_mounts]
        log_path = self.run.log.with_name(f"{self.run.name}.{container['name']}.log")
        main_spec = {**container, "name": "main", "volumeMounts": volume_mounts}

        container_run = replace(
            self.run,
            container=main_spec,
            root=self._container_root(container),
            log=log_path,
            private_paths=(),
            # only the main container reports the progress of the step
            extra_env={},
            stdout=None,
        )

        return start_container(
            replace(container_run, volumes={**self.run.volumes, **input_volumes}), self.cluster
        )

    def _mirror_mounts(self) -> tuple[list[dict[str, Any]], dict[str, VolumeDirectory]]:
        """Return the volume mounts of the main container, for a container with the field
        `mirrorVolumeMounts`. The returned mounts include a volume for each input artifact, because
        Argo mounts the input artifacts, too."""
        volume_mounts = [*(self.main.get("volumeMounts") or [])]

        unmounted_paths = [
            input_path
            for input_path in self.input_paths
            if not any(
                Path(input_path).is_relative_to(volume_mount["mountPath"])
                for volume_mount in volume_mounts
            )
        ]

        host_paths = {
            input_path: filesystem.path_in_root(self.run.root, input_path)
            for input_path in unmounted_paths
        }
        existing_paths = {
            input_path: host_path
            for input_path, host_path in host_paths.items()
            if host_path.exists()
        }
        volume_mounts += [
            {"name": f"input-artifacts{input_path}", "mountPath": input_path}
            for input_path in existing_paths
        ]

        return volume_mounts, {
            f"input-artifacts{input_path}": VolumeDirectory(host_path)
            for input_path, host_path in existing_paths.items()
        }


def check_sidecars(template: dict[str, Any], field_path: str) -> None:
    """Raise ConfigError for a pod with init containers or sidecars if this system does not support
    such pods."""
    used_list_fields = [
        list_field for list_field in CONTAINER_LIST_FIELDS if template.get(list_field)
    ]
    if used_list_fields and not filesystem.supports_namespaces():
        raise ConfigError(
            f"{field_path}.{used_list_fields[0]} needs a private mount namespace, which is not"
            " available on this system."
        )
