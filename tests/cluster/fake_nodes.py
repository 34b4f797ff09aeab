"""200 fake nodes of kwok, with real pods, the real scheduler and the real controllers.

    with start_nodes("test-1a2b", work_folder) as nodes: ...

A fake node runs no container: kwok reports each of its pods as running. The nodes have a taint, so
that only pods with a toleration for it come to them. Source: kwok 0.7, `kwok --help`.
"""

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import yaml

from tests.cluster.kube import Kube, Object
from tests.waiting import until

ZONE_LABEL = "topology.kubernetes.io/zone"
RACK_LABEL = "example.com/rack"
SPOT_LABEL = "example.com/spot"
HOST_LABEL = "kubernetes.io/hostname"
FAKE_LABEL = "example.com/fake"
TAINT = {"key": "kwok.x-k8s.io/node", "value": "fake", "effect": "NoSchedule"}
TOLERATION = {"key": TAINT["key"], "operator": "Exists"}
ZONES = 4
RACKS_PER_ZONE = 5
NODES_PER_RACK = 10
CPUS_PER_NODE = 8

# kwok's own stages of pods would complete the pods of a Job at once
POD_STAGES = """
apiVersion: kwok.x-k8s.io/v1alpha1
kind: Stage
metadata: {name: pod-ready}
spec:
  resourceRef: {apiGroup: v1, kind: Pod}
  selector:
    matchExpressions:
      - {key: .metadata.deletionTimestamp, operator: DoesNotExist}
      - {key: .status.podIP, operator: DoesNotExist}
  next:
    statusTemplate: |
      phase: Running
      startTime: {{ Now | Quote }}
      hostIP: {{ NodeIPWith .spec.nodeName | Quote }}
      podIP: {{ PodIPWith .spec.nodeName false .metadata.uid .metadata.name .metadata.namespace | Quote }}
      conditions:
        - {type: Initialized, status: "True", lastTransitionTime: {{ Now | Quote }}}
        - {type: ContainersReady, status: "True", lastTransitionTime: {{ Now | Quote }}}
        - {type: Ready, status: "True", lastTransitionTime: {{ Now | Quote }}}
      containerStatuses:
      {{ range .spec.containers }}
        - name: {{ .name | Quote }}
          image: {{ .image | Quote }}
          ready: true
          restartCount: 0
          state: {running: {startedAt: {{ Now | Quote }}}}
      {{ end }}
---
apiVersion: kwok.x-k8s.io/v1alpha1
kind: Stage
metadata: {name: pod-delete}
spec:
  resourceRef: {apiGroup: v1, kind: Pod}
  selector:
    matchExpressions:
      - {key: .metadata.deletionTimestamp, operator: Exists}
  next:
    finalizers: {empty: true}
    delete: true
"""


@dataclass(frozen=True)
class FakeNode:
    name: str
    zone: str
    rack: str
    is_spot: bool


def find_kwok() -> str | None:
    """Return the path of the program `kwok`, or None if it is not on the PATH."""
    return shutil.which("kwok")


@contextmanager
def start_nodes(mark: str, folder: Path) -> Iterator[dict[str, FakeNode]]:
    """Add fake nodes with the label FAKE_LABEL=`mark` to the cluster; yield them by name. Delete
    them at the end."""
    kube = Kube("default")
    nodes = make_nodes(mark)
    config = folder / "kwok.yaml"
    config.write_text(POD_STAGES)
    command = [str(find_kwok()), "--config", str(config), "--cidr=10.251.0.1/16"]
    command += [f"--manage-nodes-with-label-selector={FAKE_LABEL}={mark}"]
    command += ["--manage-all-nodes=false", "--node-lease-duration-seconds=40"]
    with open(folder / "kwok.log", "w") as log_file:
        process = subprocess.Popen(command, stdout=log_file, stderr=log_file)

    try:
        kube(
            "create",
            "-f",
            "-",
            stdin=yaml.safe_dump_all(make_node_object(mark, node) for node in nodes.values()),
        )
        until(
            "all fake nodes are ready",
            lambda: count_ready_nodes(kube, mark) == len(nodes),
            120,
            evidence=(folder / "kwok.log").read_text,
        )
        yield nodes
    finally:
        kube("delete", "nodes", "--selector", f"{FAKE_LABEL}={mark}", timeout=300)
        process.terminate()
        process.wait()


def make_nodes(mark: str) -> dict[str, FakeNode]:
    """Return ZONES * RACKS_PER_ZONE * NODES_PER_RACK nodes. The last two racks of each zone have
    spot nodes."""
    nodes = [
        FakeNode(
            f"{mark}-{zone}-{rack}-{number}",
            f"zone-{zone}",
            f"rack-{zone}-{rack}",
            rack >= RACKS_PER_ZONE - 2,
        )
        for zone in range(ZONES)
        for rack in range(RACKS_PER_ZONE)
        for number in range(NODES_PER_RACK)
    ]
    return {node.name: node for node in nodes}


def make_node_object(mark: str, node: FakeNode) -> Object:
    resources = {"cpu": CPUS_PER_NODE, "memory": "64Gi", "ephemeral-storage": "100Gi", "pods": 110}
    labels = {
        FAKE_LABEL: mark,
        ZONE_LABEL: node.zone,
        RACK_LABEL: node.rack,
        HOST_LABEL: node.name,
        **({SPOT_LABEL: "true"} if node.is_spot else {}),
    }
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": node.name, "labels": labels},
        "spec": {"taints": [TAINT]},
        "status": {"capacity": resources, "allocatable": resources},
    }


def count_ready_nodes(kube: Kube, mark: str) -> int:
    return sum(
        condition["type"] == "Ready" and condition["status"] == "True"
        for node in kube.items("nodes", f"{FAKE_LABEL}={mark}")
        for condition in node["status"].get("conditions", [])
    )
