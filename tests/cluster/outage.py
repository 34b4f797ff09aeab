"""Simulate outages of a service of the namespace without loss of its data, by a TCP proxy to which
its Service leads.

While the proxy is scaled to zero, all connections are closed and new connections are refused, as if
the server had died.
"""

import time

from tests.cluster.kube import Kube, Object
from tests.waiting import until

PROXY = """
import asyncio, sys
host, port, listen = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
async def pump(reader, writer):
    try:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    except ConnectionError:
        pass
    finally:
        writer.close()
async def serve(reader, writer):
    try:
        there, back = await asyncio.open_connection(host, port)
    except OSError:
        return writer.close()
    await asyncio.gather(pump(reader, back), pump(there, writer))
async def main():
    await (await asyncio.start_server(serve, "", listen)).serve_forever()
asyncio.run(main())
"""
POD_SECURITY = {
    "runAsNonRoot": True,
    "runAsUser": 65532,
    "seccompProfile": {"type": "RuntimeDefault"},
}
CONTAINER_SECURITY = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}


def make_proxy(name: str, image: str, host: str, port: int, listen: int) -> list[Object]:
    """Return a Deployment NAME-proxy that forwards connections to HOST:PORT, and its Service
    NAME:LISTEN."""
    labels = {
        "app.kubernetes.io/name": f"{name}-proxy",
        "app.kubernetes.io/part-of": "rekindle-platform",
    }

    container = {
        "name": "proxy",
        "image": image,
        "imagePullPolicy": "IfNotPresent",
        "command": ["python", "-c", PROXY, host, str(port), str(listen)],
        "readinessProbe": {"tcpSocket": {"port": listen}, "periodSeconds": 1},
        "resources": {"requests": {"cpu": "10m", "memory": "64Mi"}, "limits": {"memory": "256Mi"}},
        "securityContext": CONTAINER_SECURITY,
    }

    pod = {
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": 0,
        "securityContext": POD_SECURITY,
        "containers": [container],
    }

    deployment = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": f"{name}-proxy"},
        "spec": {
            "replicas": 1,
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": pod},
        },
    }

    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name},
        "spec": {
            "selector": labels,
            "ports": [{"name": "http", "port": listen, "targetPort": listen}],
        },
    }

    return [deployment, service]


def interrupt_service(kube: Kube, name: str, seconds: float) -> tuple[float, float]:
    """Make a service unavailable for some seconds, and return the times at which the outage began
    and ended."""
    labels = f"app.kubernetes.io/name={name}-proxy"
    kube.scale(f"{name}-proxy", 0)
    until(f"{name} is unavailable", lambda: not kube.items("pods", labels))
    stopped = time.time()
    time.sleep(seconds)
    kube.scale(f"{name}-proxy", 1)
    return stopped, time.time()
