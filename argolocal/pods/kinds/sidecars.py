"""Run initContainers one after another before the main container, and sidecars in parallel with it.

    sidecars = Sidecars(template, run, cluster)
    process = sidecars.next_init()
    sidecars.start_sidecars()
    failure = sidecars.stop(grace)

Each container has a separate root directory, and all share the volumes.
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

# exit codes of a sidecar that has ended normally or by the requested SIGTERM or SIGKILL
TERMINATED_EXIT_CODES = (0, exit_codes.KILLED, exit_codes.TERMINATED)
KINDS = ("initContainers", "sidecars")


class Sidecars:
    """The init containers and sidecars of one pod."""

    def __init__(self, template: dict[str, Any], run: ContainerRun, cluster: Cluster) -> None:
        self.run = run
        self.cluster = cluster
        self.main = template.get("container") or template.get("script") or {}
        artifacts = (template.get("inputs") or {}).get("artifacts") or []
        self.input_paths = [artifact["path"] for artifact in artifacts if artifact.get("path")]
        self.init_specs = list(template.get("initContainers") or [])
        self.sidecar_specs = list(template.get("sidecars") or [])
        self.running: dict[str, Process] = {}
        self.init_name = ""  # name of the running init container
        # the error because of which the log of a sidecar is incomplete
        self.log_error: OSError | None = None

    def next_init(self) -> Process | None:
        """Start the next init container, if any. Raises ConfigError, OSError."""
        if not self.init_specs:
            self.init_name = ""
            return None
        container = self.init_specs.pop(0)
        self.init_name = container["name"]
        return self._start(container)

    def start_sidecars(self) -> None:
        """Start all sidecars. Raises ConfigError, OSError."""
        for container in self.sidecar_specs:
            self.running[container["name"]] = self._start(container)

    def stop(self, grace: float) -> str:
        """Terminate the sidecars and wait for their end. Return Argo's message about a failed
        sidecar, or "" if none has failed."""
        # two threads may call `stop` at the same time: one to collect outputs, the other to stop
        # the run
        processes = dict(self.running)
        for process in processes.values():
            signal_group(process.pid, signal.SIGTERM)

        kill_at = time.monotonic() + grace
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
            (name, process)
            for name, process in processes.items()
            if process.code not in TERMINATED_EXIT_CODES
        )
        return next((f"{name}: {process.failure}" for name, process in failed_sidecars), "")

    def _container_root(self, container: dict[str, Any]) -> Path:
        return self.run.root.with_name(f"{self.run.root.name}.{container['name']}")

    def _start(self, container: dict[str, Any]) -> Process:
        mirrored_mounts, input_volumes = (
            self._mirror_mounts() if container.get("mirrorVolumeMounts") else ([], {})
        )
        mounts = [*(container.get("volumeMounts") or []), *mirrored_mounts]
        log = self.run.log.with_name(f"{self.run.name}.{container['name']}.log")
        main = {**container, "name": "main", "volumeMounts": mounts}

        run = replace(
            self.run,
            container=main,
            root=self._container_root(container),
            log=log,
            private_paths=(),
            stdout=None,
        )

        return start_container(
            replace(run, volumes={**self.run.volumes, **input_volumes}), self.cluster
        )

    def _mirror_mounts(self) -> tuple[list[dict[str, Any]], dict[str, VolumeDirectory]]:
        """Return the mounts of the main container: its volumes, and its input artifacts, which Argo
        mounts."""
        mounts = [*(self.main.get("volumeMounts") or [])]

        unmounted_paths = [
            path
            for path in self.input_paths
            if not any(Path(path).is_relative_to(mount["mountPath"]) for mount in mounts)
        ]

        host_paths = {
            path: filesystem.path_in_root(self.run.root, path) for path in unmounted_paths
        }
        existing_paths = {path: host for path, host in host_paths.items() if host.exists()}
        mounts += [{"name": f"input-artifacts{path}", "mountPath": path} for path in existing_paths]

        return mounts, {
            f"input-artifacts{path}": VolumeDirectory(host) for path, host in existing_paths.items()
        }


def check(template: dict[str, Any], where: str) -> None:
    """Raise ConfigError for a pod with several containers if this system does not support such
    pods."""
    kinds = [kind for kind in KINDS if template.get(kind)]
    if kinds and not filesystem.available():
        raise ConfigError(
            f"{where}.{kinds[0]} needs a private mount namespace, which is not available on this"
            " system."
        )
