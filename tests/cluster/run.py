"""One workflow of a config on the cluster: submitted, disturbed, and told from its ledger.

run = Run.submit(place, SMALL); run.trains(20); ...; assert run.ended() == "Succeeded"
"""

import json
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rekindle.storage import Store
from rekindle.training.ledger.accounting import summarize
from rekindle.training.ledger.events import Event, read
from rekindle.training.ledger.report import Summary
from tests.cluster.kube import Kube, Object, Sight, Watch
from tests.commands import BIN, ROOT
from tests.waiting import until

DEMO = ROOT / "configs/demo.yaml"
ENDS = ("Succeeded", "Failed", "Error")
PODS = ("prepare", "train", "evaluate", "release", "serve", "verify", "coordinator", "report")


@dataclass(frozen=True)
class Place:
    """Where runs of a test session happen."""

    kube: Kube
    store: Store
    watch: Watch
    image: str
    port: int  # of what serves: one that is free on this machine, too

    def sets(self, more: Iterable[str] = ()) -> list[str]:
        """--set flags: our image and port, and requests that fit on a small node."""
        small = [f"cluster.pods.{pod}={{cpu: 50m, memory: {_memory(pod)}}}" for pod in PODS]
        given = [f"cluster.image={self.image}", f"serve.port={self.port}", *small, *more]
        return [flag for setting in given for flag in ("--set", setting)]


def _memory(pod: str) -> str:
    return "512Mi" if pod in ("coordinator", "report") else "2Gi"


def rekindle(*args: str, cwd: Path = ROOT, timeout: float = 900, **environment: str) -> str:
    """What the command prints; fails with what it says if it does."""
    import os

    kept = {k: v for k, v in os.environ.items() if not k.startswith(("S3_", "AWS_", "MLFLOW_", "REKINDLE_"))}
    done = subprocess.run(
        [str(BIN / "rekindle"), *args], cwd=cwd, env=kept | environment, capture_output=True, text=True, timeout=timeout
    )
    assert done.returncode == 0, f"rekindle {' '.join(args)}\n{done.stdout}{done.stderr}"
    return done.stdout


@dataclass
class Run:
    """A workflow."""

    place: Place
    name: str

    @classmethod
    def submit(cls, place: Place, *sets: str, config: Path = DEMO) -> "Run":
        flags = ["--namespace", place.kube.namespace, *place.sets(sets), "--yes", "--no-cache", "-o", "json"]
        return cls(place, json.loads(rekindle("submit", str(config), *flags))["workflow"])

    def workflow(self) -> Object:
        workflow = self.place.kube.get("workflow", self.name)
        assert workflow, f"there is no workflow {self.name}"
        return workflow

    def ended(self, seconds: float = 900) -> str:
        """Its phase, when it has one that lasts."""
        phase = until(f"{self.name} has ended", lambda: _ended(self.workflow()), seconds, pause=1)
        return phase if phase == "Succeeded" else f"{phase}: {self.story()}"

    def outputs(self) -> dict[str, str]:
        """The outputs of the whole workflow."""
        parameters = self.workflow()["status"].get("outputs", {}).get("parameters", [])
        return {parameter["name"]: parameter.get("value", "") for parameter in parameters}

    def nodes(self, template: str) -> list[Object]:
        """The attempts at a template, in order."""
        nodes = self.workflow().get("status", {}).get("nodes", {}).values()
        own = [n for n in nodes if n.get("templateName") == template and n["type"] == "Pod"]
        return sorted(own, key=lambda node: node["startedAt"] or "")

    def pod_of(self, template: str, seconds: float = 300) -> str:
        """The pod that runs a step now."""

        def look() -> str:
            label = f"workflows.argoproj.io/workflow={self.name}"
            for pod in self.place.kube.items("pods", label):
                node = pod["metadata"].get("annotations", {}).get("workflows.argoproj.io/node-name", "")
                alive = pod["status"]["phase"] == "Running" and "deletionTimestamp" not in pod["metadata"]
                if alive and f".{template}(" in node:
                    return pod["metadata"]["name"]
            return ""

        return until(f"a pod of {template} runs", look, seconds)

    def events(self) -> list[Event]:
        return read(self.place.store, f"{self.name}/train/checkpoints/ledger")

    def summary(self) -> Summary:
        return summarize(self.events())

    def step(self) -> int:
        """The newest that the ledger knows."""
        made = [event["step"] for event in self.events() if event["event"] in ("step", "complete")]
        return max(made, default=0)

    def trains(self, step: int, seconds: float = 300) -> int:
        """Wait until the training has come so far."""
        return until(f"{self.name} has made step {step}", lambda: (s := self.step()) >= step and s, seconds, 0.5)

    def goes_on(self, steps: int = 5, seconds: float = 120) -> int:
        """Wait until it has made some steps more."""
        return self.trains(self.step() + steps, seconds)

    def whole(self, workers: int, seconds: float = 120) -> None:
        """Wait until so many train together, and some steps more, so that faults do not blur."""

        def look() -> bool:
            groups = [event["members"] for event in self.events() if event["event"] == "generation"]
            return bool(groups) and len(groups[-1]) == workers

        until(f"{workers} workers train together", look, seconds, 0.5)
        self.goes_on(1)

    def training_pod(self, replica: str) -> str:
        return f"{self.name}-train-{replica}"

    def sights(self, replica: str) -> list[Sight]:
        """Every pod that was this replica, in order."""
        return self.place.watch.of(self.training_pod(replica))

    def sha256(self) -> str:
        """Of the weights, as training left them in the object store."""
        return json.loads(self.place.store.get(f"{self.name}/train/model/model.json"))["sha256"]

    def story(self) -> str:
        """For who must find out why."""
        status = self.workflow().get("status", {})
        nodes = [f"{n['displayName']}: {n['phase']} {n.get('message', '')}" for n in status.get("nodes", {}).values()]
        logs = [
            f"--- {pod['metadata']['name']}\n"
            + self.place.kube("logs", pod["metadata"]["name"], "--all-containers", "--tail=20", check=False)
            for pod in self.place.kube.items("pods", f"workflows.argoproj.io/workflow={self.name}")
        ]
        return "\n".join([status.get("message", ""), *nodes, *logs])


def _ended(workflow: Object) -> str:
    phase = workflow.get("status", {}).get("phase", "")
    return phase if phase in ENDS else ""


def local(home: Path, *sets: str, config: Path = DEMO) -> dict[str, Any]:
    """What `rekindle run` makes of the same config with the same settings on this machine."""
    try:
        return json.loads(rekindle("run", str(config), *sets, "-o", "json", REKINDLE_HOME=str(home)))
    finally:
        rekindle("down", REKINDLE_HOME=str(home))
