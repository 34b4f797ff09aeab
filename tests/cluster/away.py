"""A service of the namespace that can be away and come back with its data: its Service leads through a TCP proxy.

Scaled to nothing, the proxy takes every open connection with it, and new ones are refused, as if the server had died.
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
NONE = {"runAsNonRoot": True, "runAsUser": 65532, "seccompProfile": {"type": "RuntimeDefault"}}
HARD = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}


def proxy(name: str, image: str, host: str, port: int, listen: int) -> list[Object]:
    """A Deployment NAME-proxy that passes connections on to HOST:PORT, and the Service NAME:LISTEN that leads to it."""
    labels = {"app.kubernetes.io/name": f"{name}-proxy", "app.kubernetes.io/part-of": "rekindle-platform"}
    container = {
        "name": "proxy",
        "image": image,
        "imagePullPolicy": "IfNotPresent",
        "command": ["python", "-c", PROXY, host, str(port), str(listen)],
        "readinessProbe": {"tcpSocket": {"port": listen}, "periodSeconds": 1},
        "resources": {"requests": {"cpu": "10m", "memory": "64Mi"}, "limits": {"memory": "256Mi"}},
        "securityContext": HARD,
    }
    pod = {
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": 0,
        "securityContext": NONE,
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
        "spec": {"selector": labels, "ports": [{"name": "http", "port": listen, "targetPort": listen}]},
    }
    return [deployment, service]


def away(kube: Kube, name: str, seconds: float) -> tuple[float, float]:
    """Take a service away for so long; gives when it was gone and when it was back."""
    labels = f"app.kubernetes.io/name={name}-proxy"
    kube.scale(f"{name}-proxy", 0)
    until(f"{name} is away", lambda: not kube.items("pods", labels))
    gone = time.time()
    time.sleep(seconds)
    kube.scale(f"{name}-proxy", 1)
    return gone, time.time()
