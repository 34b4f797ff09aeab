"""A training on the cluster, and its faults."""

from collections.abc import Callable, Mapping, Sequence

from rekindle.training.ledger.events import Event
from tests.cluster.kube import Kube
from tests.cluster.node_agent import NodeAgent
from tests.cluster.outage import interrupt_service
from tests.cluster.run import Run
from tests.faults.catalog import Fault, parse_replica
from tests.waiting import until

# namespace and label of the controllers of workflows, and of each kind of job
ARGO = ("argo", "app=workflow-controller")
JOBSET = ("jobset-system", "control-plane=controller-manager")
CONTROLLERS = {
    "pytorchjob": (("kubeflow", "control-plane=kubeflow-training-operator"),),
    "jobset": (JOBSET,),
    "trainjob": (JOBSET, ("kubeflow-system", "app.kubernetes.io/name=trainer")),
}


class ClusterStage:
    """The training of a run in a job of this kind. Without `agent`, faults that need root on a node
    cannot be injected."""

    def __init__(self, run: Run, backend: str, agent: NodeAgent | None) -> None:
        self.run = run
        self.backend = backend
        self.agent = agent

    def read_events(self) -> list[Event]:
        return self.run.events()

    def list_pods(self) -> Mapping[str, str]:
        """Return the uid of each replica's running pod, with the number of its restarts."""
        identities = {}
        for pod in self.run.namespace.kube.items("pods"):
            replica = self._parse(pod["metadata"]["name"])
            statuses = pod["status"].get("containerStatuses") or []
            is_running = pod["status"]["phase"] == "Running" and statuses
            if replica and is_running and "deletionTimestamp" not in pod["metadata"]:
                identities[replica] = f"{pod['metadata']['uid']}/{statuses[0]['restartCount']}"
        return identities

    def check_running(self) -> None:
        phase = self.run.workflow().get("status", {}).get("phase", "Pending")
        assert phase in ("Pending", "Running"), self.run.describe()

    def find_victims(self, fault: Fault) -> tuple[str, ...]:
        return fault.victims

    def job_uid(self) -> str:
        """Return the uid of the job, which a recreated job would not have."""
        job = self.run.namespace.kube.get(self.backend, f"{self.run.name}-train")
        assert job
        return job["metadata"]["uid"]

    def terminate(self, *replicas: str) -> None:
        self.run.namespace.kube.delete_pods(*self._pod_names(replicas))

    def kill(self, *replicas: str) -> None:
        assert self.agent
        self.agent.kill(self._pod_names(replicas))

    def kill_executor(self) -> None:
        kube = self.run.namespace.kube
        kube.delete_pods(self.run.wait_for_pod("train"), force=True)
        self.run.wait_for_pod("train")

    def restart_controllers(self) -> None:
        _restart(ARGO, *CONTROLLERS[self.backend])

    def interrupt_store(self, seconds: float) -> None:
        interrupt_service(self.run.namespace.kube, "s3", seconds)

    def cut_network(self, replica: str, seconds: float) -> None:
        assert self.agent
        (pod,) = self._pod_names([replica])
        self.agent.cut_network(pod, seconds)

    def _parse(self, pod_name: str) -> str:
        return parse_replica(pod_name.removeprefix(f"{self.run.name}-"))

    def _pod_names(self, replicas: Sequence[str]) -> list[str]:
        """Return the names of the running pods of these replicas."""
        names = {
            self._parse(pod["metadata"]["name"]): pod["metadata"]["name"]
            for pod in self.run.namespace.kube.items("pods")
            if pod["status"]["phase"] == "Running" and "deletionTimestamp" not in pod["metadata"]
        }
        return [names[replica] for replica in replicas]


def _restart(*controllers: tuple[str, str]) -> None:
    """Delete the pods of the given controllers, and wait until their successors are ready."""
    waits = [_delete_controller(Kube(namespace), label) for namespace, label in controllers]
    for name, is_back in waits:
        until(f"{name} is back", is_back, 180, pause=0.5)


def _delete_controller(kube: Kube, label: str) -> tuple[str, Callable[[], bool]]:
    """Delete the pods of a controller; return its name, and a function that returns True once new
    pods are ready."""
    old_uids = {pod["metadata"]["uid"] for pod in kube.items("pods", label)}
    assert old_uids, f"no pod {label} in {kube.namespace}"
    kube("delete", "pod", "--selector", label, "--wait=false")

    def is_back() -> bool:
        return any(
            condition["type"] == "Ready" and condition["status"] == "True"
            for pod in kube.items("pods", label)
            if pod["metadata"]["uid"] not in old_uids
            for condition in pod["status"].get("conditions", [])
        )

    return f"{kube.namespace}/{label}", is_back
