"""Run readiness probes of daemons. The dependents of a daemon start when its probe passes.

A failed probe is repeated after `periodSeconds` or one second, whichever is shorter, because the
kubelet also probes more often until a container is ready. Source: Argo's operator.go
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
from argolocal.pods.containers import port_number
from argolocal.pods.probes import Probe
from argolocal.pods.process import ContainerRun, start_container

KINDS = ("exec", "httpGet", "tcpSocket")


def wait_until_ready(run: ContainerRun, cluster: Cluster, is_running: Callable[[], bool]) -> bool:
    """Wait until the probe passes. Return False if the container exits first."""
    probe = Probe(run.container, "readinessProbe")
    success_count = 0
    time.sleep(probe.delay)
    while is_running():
        success_count = success_count + 1 if _passes(probe, run, cluster) else 0
        if success_count >= probe.success_threshold:
            return is_running()
        time.sleep(min(probe.period, 1.0))
    return False


def _passes(probe: Probe, run: ContainerRun, cluster: Cluster) -> bool:
    if not probe.command:
        return probe.answers(run.ip)
    probe_run = replace(run, container={**run.container, "command": probe.command, "args": []})
    return _exec(probe_run, cluster, probe.timeout)


def _exec(run: ContainerRun, cluster: Cluster, timeout: float) -> bool:
    try:
        process = start_container(replace(run, stdout=None, log=Path(os.devnull)), cluster)
    except (OSError, subprocess.SubprocessError):
        return False
    try:
        return process.wait(timeout) == 0
    except subprocess.TimeoutExpired:
        return False
    finally:
        signal_group(process.pid, signal.SIGKILL)
        process.wait()


def check(template: dict[str, Any], where: str) -> None:
    """Raise ConfigError for a readiness probe that is not supported here."""
    kind = "container" if "container" in template else "script"
    container = template.get(kind) or {}

    if not template.get("daemon"):
        return

    probe = container.get("readinessProbe")
    if probe:
        where = f"{where}.{kind}.readinessProbe"
        kinds = [kind for kind in KINDS if probe.get(kind)]
        if len(kinds) != 1:
            raise ConfigError(
                f"{where} has {len(kinds)} of {', '.join(KINDS)}: it must have exactly one."
            )

        try:
            port_number(
                container, (probe.get("httpGet") or probe.get("tcpSocket") or {"port": 1})["port"]
            )
        except ValueError:
            raise ConfigError(
                f"{where}.{kinds[0]}.port must be a number or the name of a container port."
            ) from None

    for index, sidecar in enumerate(template.get("sidecars") or []):
        if sidecar.get("readinessProbe"):
            raise ConfigError(
                f"{where}.sidecars[{index}].readinessProbe is not supported by the local runner in"
                " the pod of a daemon: move the probe to the daemon."
            )
