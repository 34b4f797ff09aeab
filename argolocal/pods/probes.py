"""Probe containers as the kubelet does. The behaviour follows Kubernetes v1 Probe, pkg/probe."""

import asyncio
import contextlib
import socket
import threading
from collections.abc import Mapping
from typing import Any

from argolocal.pods import web
from argolocal.pods.containers import find_port_number


class Probe:
    """One probe of a container, with Kubernetes' defaults. `probe_field`: field of `container` with
    the probe, such as readinessProbe. `delay`, `period` and `timeout` are seconds."""

    def __init__(self, container: Mapping[str, Any], probe_field: str) -> None:
        probe_spec: Mapping[str, Any] = container[probe_field]
        self.container = container
        self.command = (probe_spec.get("exec") or {}).get("command")
        self.http = probe_spec.get("httpGet")
        self.tcp = probe_spec.get("tcpSocket")

        self.delay = float(probe_spec.get("initialDelaySeconds") or 0)
        self.period = float(probe_spec.get("periodSeconds") or 10)
        self.timeout = float(probe_spec.get("timeoutSeconds") or 1)
        self.failure_threshold = int(probe_spec.get("failureThreshold") or 3)
        self.success_threshold = int(probe_spec.get("successThreshold") or 1)

    def answers(self, ip: str) -> bool:
        """Send an HTTP request or open a TCP connection to the container, and block until it
        responds or the timeout is over. Return True if the HTTP status is 2xx or 3xx, or if the
        container has accepted the TCP connection."""
        probe_target = self.http or self.tcp or {}
        host = probe_target.get("host") or ip
        port = find_port_number(self.container, probe_target["port"])

        if not self.http:
            with contextlib.suppress(OSError):
                socket.create_connection((host, port), self.timeout).close()
                return True

            return False

        scheme = (probe_target.get("scheme") or "HTTP").lower()
        url_path = (probe_target.get("path") or "/").removeprefix("/")
        headers = [
            (header["name"], header["value"]) for header in probe_target.get("httpHeaders") or []
        ]

        try:
            with web.request(
                f"{scheme}://{host}:{port}/{url_path}",
                headers=headers,
                timeout=self.timeout,
                verify=False,
                proxies=False,
                leave_host=False,
            ) as response:
                return 200 <= response.status < 400
        except web.WebError:
            return False

    async def passes(self, ip: str) -> bool:
        """Probe the container, and return True if the probe has succeeded. The probe runs in a new
        thread, so that a blocked probe delays neither other probes nor the exit of this process."""
        event_loop = asyncio.get_running_loop()
        result_future: asyncio.Future[bool] = event_loop.create_future()

        def answer() -> None:
            is_answered = self.answers(ip)
            # the event loop may have ended before the probe
            with contextlib.suppress(RuntimeError):
                event_loop.call_soon_threadsafe(
                    lambda: result_future.done() or result_future.set_result(is_answered)
                )

        threading.Thread(target=answer, name="probe", daemon=True).start()
        return await result_future
