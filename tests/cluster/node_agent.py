"""A pod that is root on its node: it kills the processes of other pods, and cuts off their network.

The pod of the node agent runs in a namespace of its own, which must allow privileged pods
(REKINDLE_TEST_RESTARTS=yes).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from tests.cluster.kube import Kube, Object
from tests.cluster.run import Namespace

POD = "agent"
FIND_PIDS = """
import fcntl, os, pathlib, signal, socket, struct, sys, time
def pids(container):
    for path in pathlib.Path("/proc").iterdir():
        try:
            if path.name.isdigit() and container in (path / "cgroup").read_text():
                yield int(path.name)
        except (FileNotFoundError, ProcessLookupError):
            pass  # it has ended
"""
KILL = f"""{FIND_PIDS}
victims = [pid for container in sys.argv[1:] for pid in pids(container)]
for pid in victims:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass  # it has ended
print(len(victims))
"""
# the other end of the pod's eth0 is an interface of the node, which is set down, and up again
CUT_NETWORK = f"""{FIND_PIDS}
pid = next(pids(sys.argv[1]))
index = int(pathlib.Path(f"/proc/{{pid}}/root/sys/class/net/eth0/iflink").read_text())
name = socket.if_indextoname(index).encode()
IFF_UP, GET_FLAGS, SET_FLAGS = 1, 0x8913, 0x8914
with socket.socket() as any_socket:
    def set_up(is_up):
        request = fcntl.ioctl(any_socket, GET_FLAGS, struct.pack("16sh14x", name, 0))
        flags = struct.unpack("16sh14x", request)[1]
        flags = flags | IFF_UP if is_up else flags & ~IFF_UP
        fcntl.ioctl(any_socket, SET_FLAGS, struct.pack("16sh14x", name, flags))
    set_up(False)
    time.sleep(float(sys.argv[2]))
    set_up(True)
"""


class NodeAgent:
    """The pod on the only node that runs pods of the tests."""

    def __init__(self, namespace: Namespace, kube: Kube) -> None:
        self.namespace = namespace
        self.kube = kube

    def kill(self, pods: Sequence[str]) -> None:
        """Send SIGKILL to all processes of these pods at once."""
        containers = [self._container_id(pod) for pod in pods]
        killed_count = self._run(KILL, *containers)
        assert int(killed_count) >= len(pods)

    def cut_network(self, pod: str, seconds: float) -> None:
        """Cut off a pod from its network for some seconds."""
        self._run(CUT_NETWORK, self._container_id(pod), str(seconds), timeout=seconds + 60)

    def _container_id(self, pod: str) -> str:
        pod_object = self.namespace.kube.get("pod", pod)
        assert pod_object
        return pod_object["status"]["containerStatuses"][0]["containerID"].rpartition("/")[2]

    def _run(self, program: str, *arguments: str, timeout: float = 60) -> str:
        return self.kube(
            "exec", POD, "--", "python", "-c", program, *arguments, timeout=timeout
        ).strip()


@contextmanager
def start_node_agent(namespace: Namespace) -> Iterator[NodeAgent]:
    """Start the agent; delete it and its namespace at the end."""
    kube = Kube(f"{namespace.kube.namespace}-node")
    kube("create", "namespace", kube.namespace)
    try:
        kube.apply(_make_pod(namespace.image))
        kube("wait", f"pod/{POD}", "--for=condition=Ready", "--timeout=240s", timeout=250)
        yield NodeAgent(namespace, kube)
    finally:
        kube("delete", "namespace", kube.namespace, "--timeout=60s", timeout=90)


def _make_pod(image: str) -> Object:
    container = {
        "name": POD,
        "image": image,
        "command": ["python", "-c", "import time; time.sleep(1e6)"],
        "securityContext": {"runAsUser": 0, "privileged": True},
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": POD},
        "spec": {
            "hostPID": True,
            "hostNetwork": True,
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 0,
            "containers": [container],
        },
    }
