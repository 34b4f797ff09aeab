"""A training that is disturbed: each hit is struck while it goes on, and what was seen of it is kept.

story = Story(place); story.hit("one", lambda: kube.delete_pods(...)); story.ended_well(sha256)
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from rekindle.training.ledger.report import Incident
from tests.cluster.kube import Sight
from tests.cluster.run import Place, Run

WORKERS = 3
STEPS = int(os.environ.get("REKINDLE_TEST_STEPS", "4000"))  # minutes: long enough to be hit again and again
LONG = [
    "data.source=simulate://7?cards=300&terminals=600&days=91",
    f"train.workers={WORKERS}",
    f"train.steps={STEPS}",
    "train.virtual_workers=4",
    "train.batch_size=4",
    "gate.minimum={auc: 0.01}",
]


@dataclass
class Hit:
    """One fault, and what was seen of it."""

    began: float
    before: int  # the newest step then
    over: float = 0.0  # training goes on with everybody
    after: int = 0  # the newest step then
    struck: list[Sight] = field(default_factory=list)  # pods of the training that were there, and went
    incidents: list[Incident] = field(default_factory=list)

    @property
    def repeated(self) -> int:
        """Finished steps that were made again."""
        return sum(incident.repeated for incident in self.incidents)


class Story:
    """A run, its hits by name, and how it ended."""

    def __init__(self, place: Place, name: str = "faults") -> None:
        self.run = Run.submit(place, f"name={name}", *LONG)
        self.hits: dict[str, Hit] = {}
        self.run.whole(WORKERS, 400)
        self.uid = self.job()

    def job(self) -> str:
        """Which job it is: another one of the same name has another uid."""
        job = self.run.place.kube.get("pytorchjob", f"{self.run.name}-train")
        assert job
        return job["metadata"]["uid"]

    def hit(self, name: str, strike: Callable[[], object]) -> None:
        """Strike while training goes on, then wait until it goes on with everybody."""
        assert self.run.workflow()["status"]["phase"] == "Running"
        hit = self.hits[name] = Hit(time.time(), self.run.step())
        there = [pod for pod in self._pods() if pod.deleting is None]
        strike()
        self.run.goes_on()
        self.run.whole(WORKERS, 200)
        hit.after, hit.over = self.run.step(), time.time()
        hit.struck = [pod for pod in there if pod.deleting is not None]
        hit.incidents = [incident for incident in self.run.summary().incidents if incident.t >= hit.began - 0.5]

    def ended_well(self, sha256: str) -> bool:
        """Succeeded, with these weights, by one job."""
        assert self.run.ended() == "Succeeded"
        assert self.job() == self.uid
        assert self.run.outputs()["model_sha256"] == self.run.sha256() == sha256
        return True

    def _pods(self) -> list[Sight]:
        return self.run.sights("worker") + self.run.sights("master")
