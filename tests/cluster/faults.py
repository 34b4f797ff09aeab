"""Inject faults into a training while it trains, and record the consequences of each fault.

training = FaultyTraining(namespace); training.inject("one", lambda: kube.delete_pods(...))
assert training.succeeded_with(sha256)
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from rekindle.training.ledger.ledger_summary import Incident
from tests.cluster.kube import PodRecord
from tests.cluster.run import Namespace, Run

WORKERS = 3
# number of training steps, which is large enough for minutes of training and many faults
STEPS = int(os.environ.get("REKINDLE_TEST_STEPS", "4000"))
LONG_SETTINGS = [
    "data.source=simulate://7?cards=300&terminals=600&days=91",
    "families=[transformer]",
    f"train.workers={WORKERS}",
    f"train.steps={STEPS}",
    "train.virtual_workers=4",
    "train.batch_size=4",
    "gate.minimum={auc: 0.01}",
]


@dataclass
class Fault:
    """A fault and its consequences."""

    start: float
    start_step: int
    # time when all workers train again
    end: float = 0.0
    end_step: int = 0
    # pods of the training that ended because of the fault
    lost_pods: list[PodRecord] = field(default_factory=list)
    incidents: list[Incident] = field(default_factory=list)

    @property
    def repeated(self) -> int:
        """Number of finished steps that were repeated."""
        return sum(incident.repeated for incident in self.incidents)


class FaultyTraining:
    """A run of a training, and the faults that were injected, by name."""

    def __init__(self, namespace: Namespace, name: str = "faults") -> None:
        self.run = Run.submit(namespace, f"name={name}", *LONG_SETTINGS)
        self.faults: dict[str, Fault] = {}
        self.run.wait_for_workers(WORKERS, 400)
        self.uid = self.job_uid()

    def job_uid(self) -> str:
        """Return the uid of the training job; a recreated job would have another uid."""
        job = self.run.namespace.kube.get("pytorchjob", f"{self.run.name}-train")
        assert job
        return job["metadata"]["uid"]

    def inject(self, name: str, action: Callable[[], object]) -> None:
        """Inject a fault while the run trains, then wait until all workers train again."""
        assert self.run.workflow()["status"]["phase"] == "Running"
        fault = self.faults[name] = Fault(time.time(), self.run.step())
        pods = [pod for pod in self._pods() if pod.deleting is None]
        action()
        self.run.wait_for_progress()
        self.run.wait_for_workers(WORKERS, 200)
        fault.end_step = self.run.step()
        fault.end = time.time()
        fault.lost_pods = [pod for pod in pods if pod.deleting is not None]
        fault.incidents = [
            incident for incident in self.run.summary().incidents if incident.t >= fault.start - 0.5
        ]

    def succeeded_with(self, sha256: str) -> bool:
        """Wait for the end of the run; return True if it succeeded with the given weights, and
        created only one job."""
        assert self.run.wait_for_end() == "Succeeded"
        assert self.job_uid() == self.uid
        assert self.run.outputs()["model_sha256"] == self.run.sha256() == sha256
        return True

    def _pods(self) -> list[PodRecord]:
        return self.run.pod_records("worker") + self.run.pod_records("master")
