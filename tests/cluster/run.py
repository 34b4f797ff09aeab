"""Submit one workflow of a config to the cluster, and observe it through the ledger of its
training.

run = Run.submit(namespace, *SMALL); run.wait_for_step(20); ...; assert run.wait_for_end() ==
"Succeeded"
"""

import json
import os
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from argolocal.manifest.object_labels import JOB_NAME_LABEL, REPLICA_TYPE_LABEL
from rekindle.operations import results
from rekindle.storage import Store
from rekindle.training.ledger.accounting import summarize_events
from rekindle.training.ledger.events import Event, read_events
from rekindle.training.ledger.ledger_summary import LedgerSummary
from tests.cluster.kube import Kube, Object, PodRecord, Watch
from tests.commands import BIN, ROOT
from tests.waiting import until

DEMO = ROOT / "configs/demo.yaml"
END_PHASES = ("Succeeded", "Failed", "Error")
PODS = ("prepare", "train", "evaluate", "release", "serve", "verify", "coordinator", "report")
SMALL_SETTINGS = [
    "data.source=simulate://7?cards=150&terminals=300&days=70",
    "families=[transformer]",
    "train.steps=20",
    "gate.minimum={auc: 0.01}",
]


@dataclass(frozen=True)
class Namespace:
    """The namespace of a test session, with the object store and the image of the session."""

    kube: Kube
    store: Store
    watch: Watch
    image: str
    # port of the model server, which is also free on this machine
    port: int

    def sets(self, settings: Iterable[str] = ()) -> list[str]:
        """Return --set flags for the image and the port of the tests, and for requests that fit on
        a small node."""
        small = [f"cluster.pods.{pod}={{cpu: 50m, memory: {_memory(pod)}}}" for pod in PODS]
        settings = [f"cluster.image={self.image}", f"serve.port={self.port}", *small, *settings]
        return [flag for setting in settings for flag in ("--set", setting)]

    @property
    def variables(self) -> dict[str, str]:
        """The variables by which a command on this machine reads the object store of the pods."""
        keys = {name: os.environ[name] for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")}
        return {
            "S3_BUCKET": self.store.bucket,
            "S3_ENDPOINT_URL": os.environ["REKINDLE_TEST_S3"],
            **keys,
        }


def _memory(pod: str) -> str:
    if pod in ("coordinator", "report"):
        return "512Mi"
    return "2Gi"


def rekindle(
    *args: str,
    cwd: Path = ROOT,
    timeout: float = 900,
    code: int = 0,
    variables: Mapping[str, str] = {},
) -> str:
    """Run the command `rekindle`, and return its stdout. The test fails with the output of the
    command if the exit code is not `code`."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("S3_", "AWS_", "MLFLOW_", "REKINDLE_"))
    }

    completed = subprocess.run(
        [str(BIN / "rekindle"), *args],
        cwd=cwd,
        env=inherited | dict(variables),
        capture_output=True,
        text=True,
        timeout=timeout,
    )

    assert completed.returncode == code, (
        f"rekindle {' '.join(args)}\n{completed.stdout}{completed.stderr}"
    )

    return completed.stdout


@dataclass
class Run:
    """A workflow on the cluster."""

    namespace: Namespace
    name: str

    @classmethod
    def submit(
        cls, namespace: Namespace, *sets: str, config: Path = DEMO, use_cache: bool = False
    ) -> "Run":
        flags = [
            "--namespace",
            namespace.kube.namespace,
            *namespace.sets(sets),
            "--yes",
            "-o",
            "json",
        ]

        flags += [] if use_cache else ["--no-cache"]

        return cls(
            namespace,
            json.loads(rekindle("submit", str(config), *flags, variables=namespace.variables))[
                "workflow"
            ],
        )

    def workflow(self) -> Object:
        workflow = self.namespace.kube.get("workflow", self.name)
        assert workflow, f"workflow {self.name} does not exist"
        return workflow

    def wait_for_end(self, seconds: float = 900) -> str:
        """Wait for the final phase of the workflow, and return it, with a description if the phase
        is not Succeeded."""
        phase = until(
            f"{self.name} has ended", lambda: _final_phase(self.workflow()), seconds, pause=1
        )
        if phase == "Succeeded":
            return phase
        return f"{phase}: {self.describe()}"

    def outputs(self) -> dict[str, str]:
        """Return the outputs of the workflow, with the results of its evaluation."""
        return results.read_parameters(self.workflow()["status"])

    def nodes(self, template: str) -> list[Object]:
        """Return the attempts of a template, in the order of their start."""
        nodes = self.workflow().get("status", {}).get("nodes", {}).values()
        pods = [
            node for node in nodes if node.get("templateName") == template and node["type"] == "Pod"
        ]
        return sorted(pods, key=lambda node: node["startedAt"] or "")

    def pods(self, step: str = "") -> list[str]:
        """Return the names of all pods of a step, including the pods of its job and deleted
        pods."""
        return [record.name for record in self.namespace.watch.find(f"{self.name}-{step}")]

    def wait_for_pod(self, template: str, seconds: float = 300) -> str:
        """Wait until a pod of a step runs, and return the pod's name."""

        def look() -> str:
            label = f"workflows.argoproj.io/workflow={self.name}"
            for pod in self.namespace.kube.items("pods", label):
                node = (
                    pod["metadata"]
                    .get("annotations", {})
                    .get("workflows.argoproj.io/node-name", "")
                )

                alive = (
                    pod["status"]["phase"] == "Running"
                    and "deletionTimestamp" not in pod["metadata"]
                )
                if alive and f".{template}(" in node:
                    return pod["metadata"]["name"]

            return ""

        return until(f"a pod of {template} runs", look, seconds)

    def events(self) -> list[Event]:
        return read_events(self.namespace.store, f"{self.name}/train/checkpoints/ledger")

    def summary(self) -> LedgerSummary:
        return summarize_events(self.events())

    def step(self) -> int:
        """Return the newest training step in the ledger of the training."""
        steps = [event["step"] for event in self.events() if event["event"] in ("step", "complete")]
        return max(steps, default=0)

    def wait_for_step(self, step: int, seconds: float = 300) -> int:
        """Wait until the training has done `step` steps."""
        return until(
            f"{self.name} has done step {step}",
            lambda: (s := self.step()) >= step and s,
            seconds,
            0.5,
        )

    def wait_for_progress(self, steps: int = 5, seconds: float = 120) -> int:
        """Wait until the training has made some more steps."""
        return self.wait_for_step(self.step() + steps, seconds)

    def wait_for_workers(self, workers: int, seconds: float = 120) -> None:
        """Wait until `workers` workers train together and have made another step, so that the
        consequences of two faults do not overlap."""

        def look() -> bool:
            groups = [event["members"] for event in self.events() if event["event"] == "generation"]
            return bool(groups) and len(groups[-1]) == workers

        until(f"{workers} workers train together", look, seconds, 0.5)
        self.wait_for_progress(1)

    def training_pod(self, replica: str) -> str:
        return f"{self.name}-train-{replica}"

    def running_pods(self, role: str) -> list[str]:
        """Return the names of the training's running pods with the given role, sorted."""
        selector = f"{JOB_NAME_LABEL}={self.name}-train,{REPLICA_TYPE_LABEL}={role}"
        return sorted(
            pod["metadata"]["name"]
            for pod in self.namespace.kube.items("pods", selector)
            if pod["status"]["phase"] == "Running" and "deletionTimestamp" not in pod["metadata"]
        )

    def pod_records(self, replica: str) -> list[PodRecord]:
        """Return the records of all pods with the given replica type and index, in the order of
        their creation."""
        return self.namespace.watch.find(self.training_pod(replica))

    def sha256(self) -> str:
        """Return the sha256 of the weights in the object store; if several models were trained, of
        the chosen model."""
        task = "choose" if self.nodes("choose") else "train"
        return json.loads(self.namespace.store.get(f"{self.name}/{task}/model/model.json"))[
            "sha256"
        ]

    def describe(self) -> str:
        """Return the state and logs of the workflow, for the message of a failed test."""
        status = self.workflow().get("status", {})
        nodes = [
            f"{node['displayName']}: {node['phase']} {node.get('message', '')}"
            for node in status.get("nodes", {}).values()
        ]

        logs = [
            f"--- {pod['metadata']['name']}\n"
            + self.namespace.kube(
                "logs", pod["metadata"]["name"], "--all-containers", "--tail=20", check=False
            )
            for pod in self.namespace.kube.items(
                "pods", f"workflows.argoproj.io/workflow={self.name}"
            )
        ]

        return "\n".join([status.get("message", ""), *nodes, *logs])


def _final_phase(workflow: Object) -> str:
    phase = workflow.get("status", {}).get("phase", "")
    if phase in END_PHASES:
        return phase
    return ""


def is_served(api: str) -> bool:
    """Return True if the cluster serves these objects, such as jobsets.jobset.x-k8s.io."""
    return subprocess.run(["kubectl", "get", api], capture_output=True).returncode == 0


def run_locally(home: Path, *sets: str, config: Path = DEMO) -> dict[str, Any]:
    """Run the same config with the same settings on this machine, and return the JSON output of
    `rekindle run`."""
    try:
        return json.loads(
            rekindle(
                "run", str(config), *sets, "-o", "json", variables={"REKINDLE_HOME": str(home)}
            )
        )
    finally:
        rekindle("down", variables={"REKINDLE_HOME": str(home)})


def local_sha256s(
    namespace: Namespace, home: Path, config: Path, settings: list[str], tasks: tuple[str, ...]
) -> list[str]:
    """Run the pipeline on this machine; return the sha256 of the models that the given tasks have
    trained."""
    try:
        flags = [*namespace.sets(settings), "-o", "json"]
        name = json.loads(
            rekindle("run", str(config), *flags, variables={"REKINDLE_HOME": str(home)})
        )["workflow"]
        shas = []

        for task in tasks:
            target = home / f"{task}.json"
            rekindle(
                "get",
                name,
                f"{task}/model/model.json",
                "--to",
                str(target),
                variables={"REKINDLE_HOME": str(home)},
            )

            shas.append(json.loads(target.read_text())["sha256"])

        return shas
    finally:
        rekindle("down", variables={"REKINDLE_HOME": str(home)})


def cluster_sha256s(run: Run, tasks: tuple[str, ...]) -> list[str]:
    """Return the sha256 of the models of the given tasks on the cluster."""
    store = run.namespace.store
    return [
        json.loads(store.get(f"{run.name}/{task}/model/model.json"))["sha256"] for task in tasks
    ]
