"""Readiness probes of daemons: dependents of a daemon start when its probe passes.

    ready(run, cluster, lives)      # blocks; False if the container exits first

A failed probe is repeated after `periodSeconds`, but at most one second: like the kubelet, which probes more often
while a container is not ready. Source: Kubernetes' pkg/probe, Argo's operator.go (assessNodeStatus).
"""

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from argolocal.common.processes import signal_group
from argolocal.errors import ConfigError
from argolocal.interfaces import Cluster
from argolocal.pods import web
from argolocal.pods.containers import port_number
from argolocal.pods.process import ContainerRun, start_container

KINDS = ("exec", "httpGet", "tcpSocket")


def ready(run: ContainerRun, cluster: Cluster, lives: Callable[[], bool]) -> bool:
    """Whether the probe passes while the container `lives`."""
    probe = run.container["readinessProbe"]
    time.sleep(float(probe.get("initialDelaySeconds") or 0))
    timeout = float(probe.get("timeoutSeconds") or 1)
    period, passed = min(float(probe.get("periodSeconds") or 10), 1.0), 0
    while lives():
        passed = passed + 1 if _passes(run, cluster, timeout) else 0
        if passed >= int(probe.get("successThreshold") or 1):
            return lives()
        time.sleep(period)
    return False


def _passes(run: ContainerRun, cluster: Cluster, timeout: float) -> bool:
    probe = run.container["readinessProbe"]
    if command := (probe.get("exec") or {}).get("command"):
        return _exec(replace(run, container={**run.container, "command": command, "args": []}), cluster, timeout)
    target = probe.get("httpGet") or probe["tcpSocket"]
    address = target.get("host") or run.ip, port_number(run.container, target["port"])
    if "httpGet" in probe:
        return _get(target, address, timeout)
    with contextlib.suppress(OSError):
        socket.create_connection(address, timeout).close()
        return True
    return False


def _get(target: Mapping[str, Any], address: tuple[str, int], timeout: float) -> bool:
    scheme = (target.get("scheme") or "HTTP").lower()
    url = f"{scheme}://{address[0]}:{address[1]}/{(target.get('path') or '/').removeprefix('/')}"
    headers = [(header["name"], header["value"]) for header in target.get("httpHeaders") or []]
    try:
        with web.request(
            url, headers=headers, timeout=timeout, verify=False, proxies=False, leave_host=False
        ) as answer:  # as the kubelet
            return 200 <= answer.status < 400
    except web.WebError:
        return False


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
    """Raises ConfigError for a readiness probe that is not supported here."""
    kind = "container" if "container" in template else "script"
    container = template.get(kind) or {}
    if not template.get("daemon"):
        return
    if probe := container.get("readinessProbe"):
        where = f"{where}.{kind}.readinessProbe"
        kinds = [kind for kind in KINDS if probe.get(kind)]
        if len(kinds) != 1:
            raise ConfigError(f"{where} has {len(kinds)} of {', '.join(KINDS)}: it must have exactly one.")
        try:
            port_number(container, (probe.get("httpGet") or probe.get("tcpSocket") or {"port": 1})["port"])
        except ValueError:
            raise ConfigError(f"{where}.{kinds[0]}.port must be a number or the name of one of its ports.") from None
    for index, sidecar in enumerate(template.get("sidecars") or []):
        if sidecar.get("readinessProbe"):
            raise ConfigError(
                f"{where}.sidecars[{index}].readinessProbe is not supported by the local runner beside a daemon: give "
                "the probe to the daemon."
            )
