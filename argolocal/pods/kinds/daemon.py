"""Run readiness probes of daemons. The steps that depend on a daemon start when its probe passes.

A failed probe is repeated after `periodSeconds`, but at most after one second, because the kubelet
also probes more often until a container is ready. The behaviour follows Argo's operator.go
(assessNodeStatus).
"""

import os
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from argolocal.common.processes import signal_group
from argolocal.errors import ConfigError
from argolocal.interfaces import Cluster
from argolocal.pods.containers import find_port_number
from argolocal.pods.probes import Probe
from argolocal.pods.process import ContainerRun, start_container

PROBE_TYPES = ("exec", "httpGet", "tcpSocket")


def wait_until_ready(
    container_run: ContainerRun, cluster: Cluster, is_running: Callable[[], bool]
) -> bool:
    """Wait until the probe has passed as often as its successThreshold demands. Return False if the
    container exits before its probe has passed."""
    probe = Probe(container_run.container, "readinessProbe")
    success_count = 0
    time.sleep(probe.delay)
    while is_running():
        success_count = success_count + 1 if _passes(probe, container_run, cluster) else 0
        if success_count >= probe.success_threshold:
            return is_running()
        time.sleep(min(probe.period, 1.0))
    return False


def _passes(probe: Probe, container_run: ContainerRun, cluster: Cluster) -> bool:
    """Run the readiness probe once, as a command in the container or over the network."""
    if not probe.command:
        return probe.answers(container_run.ip)
    probe_run = replace(
        container_run, container={**container_run.container, "command": probe.command, "args": []}
    )
    return _run_probe_command(probe_run, cluster, probe.timeout)


def _run_probe_command(
    container_run: ContainerRun, cluster: Cluster, timeout_seconds: float
) -> bool:
    try:
        process = start_container(
            replace(container_run, stdout=None, log=Path(os.devnull)), cluster
        )
    except (OSError, subprocess.SubprocessError):
        return False
    try:
        return process.wait(timeout_seconds) == 0
    except subprocess.TimeoutExpired:
        return False
    finally:
        signal_group(process.pid, signal.SIGKILL)
        process.wait()


def check_readiness_probe(template: dict[str, Any], field_path: str) -> None:
    """Raise ConfigError for a readiness probe that is not supported here."""
    container_field = "container" if "container" in template else "script"
    container = template.get(container_field) or {}

    if not template.get("daemon"):
        return

    probe = container.get("readinessProbe")
    if probe:
        field_path = f"{field_path}.{container_field}.readinessProbe"
        probe_types = [probe_type for probe_type in PROBE_TYPES if probe.get(probe_type)]
        if len(probe_types) != 1:
            raise ConfigError(
                f"{field_path} has {len(probe_types)} of {', '.join(PROBE_TYPES)}: it must have"
                " exactly one."
            )

        try:
            find_port_number(
                container, (probe.get("httpGet") or probe.get("tcpSocket") or {"port": 1})["port"]
            )
        except ValueError:
            raise ConfigError(
                f"{field_path}.{probe_types[0]}.port must be a number or the name of a container"
                " port."
            ) from None

    for index, sidecar in enumerate(template.get("sidecars") or []):
        if sidecar.get("readinessProbe"):
            raise ConfigError(
                f"{field_path}.sidecars[{index}].readinessProbe is not supported by the local"
                " runner in the pod of a daemon: move the probe to the daemon."
            )
