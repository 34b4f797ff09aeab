"""Probe containers as the kubelet does. Source: Kubernetes v1 Probe, pkg/probe."""

import asyncio
import contextlib
import socket
import threading
from collections.abc import Mapping
from typing import Any

from argolocal.pods import web
from argolocal.pods.containers import port_number


class Probe:
    """One probe of a container, with Kubernetes' defaults. `kind` is the probe's key in
    `container`."""

    def __init__(self, container: Mapping[str, Any], kind: str) -> None:
        probe: Mapping[str, Any] = container[kind]
        self.container = container
        self.command = (probe.get("exec") or {}).get("command")
        self.http = probe.get("httpGet")
        self.tcp = probe.get("tcpSocket")

        self.delay = float(probe.get("initialDelaySeconds") or 0)
        self.period = float(probe.get("periodSeconds") or 10)
        self.timeout = float(probe.get("timeoutSeconds") or 1)
        self.failure_threshold = int(probe.get("failureThreshold") or 3)
        self.success_threshold = int(probe.get("successThreshold") or 1)

    def answers(self, ip: str) -> bool:
        """Probe the container, and block until it responds. Return True if the HTTP status is 2xx
        or 3xx, or if it has accepted the TCP connection."""
        target = self.http or self.tcp or {}
        host = target.get("host") or ip
        port = port_number(self.container, target["port"])

        if not self.http:
            with contextlib.suppress(OSError):
                socket.create_connection((host, port), self.timeout).close()
                return True

            return False

        scheme = (target.get("scheme") or "HTTP").lower()
        path = (target.get("path") or "/").removeprefix("/")
        headers = [(header["name"], header["value"]) for header in target.get("httpHeaders") or []]

        try:
            with web.request(
                f"{scheme}://{host}:{port}/{path}",
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
        """Call `answers` in a new thread, so that a blocked probe delays neither other probes nor
        the exit of the process."""
        loop = asyncio.get_running_loop()
        result: asyncio.Future[bool] = loop.create_future()

        def answer() -> None:
            passed = self.answers(ip)
            # the event loop may have ended before the probe
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(lambda: result.done() or result.set_result(passed))

        threading.Thread(target=answer, name="probe", daemon=True).start()
        return await result
