"""Send requests to a model during all changes of its servers: each request gets an answer of the
champion or a verified candidate.

REKINDLE_TEST_RATE is the number of requests per second (default: 30). This machine must reach the
ClusterIP of a Service, as a node of the cluster does.
"""

import json
import os
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest

from benchmarks.bars import Bar, report
from benchmarks.release.traffic import (
    RequestAnswer,
    TrafficClients,
    count_failures,
    measure_rollback_times,
    send_traffic,
)
from rekindle.operations import results
from tests.cluster.kube import Object
from tests.cluster.run import Namespace, Run, rekindle
from tests.commands import ROOT
from tests.waiting import until

# the requests are sent to the model with this name
NAME = "digits"
LABEL = "app.kubernetes.io/name=digits"
RATE = float(os.environ.get("REKINDLE_TEST_RATE", "30"))
SERVERS = 2
# number of replicas, as an autoscaler might set it during the test; each release keeps this number
PEAK_SERVERS = 3
SETTINGS = [
    f"name={NAME}",
    "workload=benchmarks.workloads.faulty",
    "train.workers=1",
    "gate={minimum: {accuracy: 0.9}, tolerance: 0.5, confidence: 0.999}",
    f"serve.min_replicas={SERVERS}",
    # a large limit, because answers may be late while trainings use the same cores
    "serve.max_waiting=2000",
    "cluster.pods.serve={cpu: 50m, memory: 1Gi}",
]
# the canaries count only errors, because the predictions of good candidates may differ
CANARY = (
    "serve.canary={steps: [50, 100], minutes: 0.2, wait_minutes: 10, score_shift: 0.9, slower: 9}"
)


@dataclass
class Change:
    """A change of the servers: the limits of its duration, and the versions that may answer; only
    the version `faulty` may return errors."""

    versions: set[str]
    faulty: str = ""
    answers: list[RequestAnswer] = field(default_factory=list)
    bars: list[Bar] = field(default_factory=list)


def train(namespace: Namespace, seed: int, *sets: str) -> Run:
    """Run the pipeline to its end."""
    sets = (*SETTINGS, f"train.seed={seed}", *sets)
    run = Run.submit(namespace, *sets, config=ROOT / "configs/digits.yaml", use_cache=True)
    run.wait_for_end()
    return run


def version(run: Run) -> str:
    """Return the version of the model that a run has released."""
    return results.list_releases(run.workflow()["status"])[0].version


@dataclass
class Model:
    """A served model and its clients."""

    namespace: Namespace
    load: TrafficClients
    servers: int = SERVERS

    def pods(self) -> list[Object]:
        return self.namespace.kube.items("pods", LABEL)

    def is_settled(self) -> bool:
        """Return True if the champion's servers are ready, and all other servers have ended."""
        ready = [
            pod
            for pod in self.pods()
            if "deletionTimestamp" not in pod["metadata"]
            and any(
                c["type"] == "Ready" and c["status"] == "True"
                for c in pod["status"].get("conditions", [])
            )
        ]
        return len(ready) == len(self.pods()) == self.servers

    @contextmanager
    def change(self, name: str) -> Iterator[Change]:
        """Count the answers from the start of the block until the servers have settled, and check
        these answers."""
        with urllib.request.urlopen(
            "http://{}:{}/v1/models/digits".format(*self.load.address)
        ) as answer:
            change = Change({json.load(answer)["version"]})

        first_answer = len(self.load.answers)
        yield change
        until("the servers of other versions have ended", self.is_settled, 300, 1)
        change.answers = self.load.answers[first_answer:]
        change.bars += count_failures(name, change.answers, change.versions, change.faulty)
        assert report(change.bars, as_json=False) == 0
        assert {answer.version for answer in change.answers} >= change.versions


@pytest.fixture(scope="module")
def model(namespace: Namespace) -> Iterator[Model]:
    """A model whose first version is deployed and gets requests."""
    first_version = train(namespace, 1)
    service = namespace.kube.get("service", NAME)
    assert service, first_version.describe()
    assert first_version.outputs()["verdict"] == "release", first_version.describe()
    load = TrafficClients(service["spec"]["clusterIP"], namespace.port, RATE)

    try:
        urllib.request.urlopen(
            "http://{}:{}/health/ready".format(*load.address), timeout=10
        ).close()
    except OSError as error:
        pytest.skip(f"this machine does not reach {load.address}: {error}")

    print(f"{RATE:g} requests per second")
    with send_traffic(load):
        yield Model(namespace, load)


def test_a_release_loses_no_request_and_keeps_the_number_of_pods(model: Model):
    service = model.namespace.kube.get("service", NAME)
    assert service
    model.namespace.kube.scale(
        service["spec"]["selector"]["app.kubernetes.io/instance"], PEAK_SERVERS
    )
    model.servers = PEAK_SERVERS
    with model.change("release") as change:
        run = train(model.namespace, 2)
        assert run.outputs()["verdict"] == "release", run.describe()
        change.versions.add(version(run))


def test_a_release_that_fails_loses_no_request(model: Model):
    with model.change("failed release"):
        run = train(model.namespace, 3, "model.fault=unsteady")
        assert run.workflow()["status"]["phase"] == "Failed"
        assert version(run)


def test_a_rollback_loses_no_request(model: Model):
    namespace = model.namespace
    with namespace.kube.forward("mlflow", 5000) as address, model.change("rollback") as change:
        (previous,), start = change.versions, time.time()
        variables = {"MLFLOW_TRACKING_URI": address, **namespace.variables}
        answer = rekindle(
            "rollback", NAME, "-n", namespace.kube.namespace, "-o", "json", variables=variables
        )
        seconds = time.time() - start
        change.versions.add(json.loads(answer)["version"])
    report(measure_rollback_times(change.answers, previous, start, seconds), as_json=False)


def test_a_faulty_canary_loses_no_request_of_the_champion(model: Model):
    with model.change("canary") as change:
        run = train(model.namespace, 4, "model.fault=errors", CANARY)
        outputs = run.outputs()
        change.faulty = version(run)
        assert outputs["verdict"] == "taken back", run.describe()
        assert "requests failed" in outputs["reason"], run.describe()
        change.versions.add(change.faulty)


def test_a_drain_loses_no_request(model: Model):
    kube = model.namespace.kube
    with model.change("drain"):
        names = {pod["metadata"]["name"] for pod in model.pods()}
        for name in names:
            until(
                "the disruption budget permits an eviction",
                lambda: kube.evict(name, check=False),  # noqa: B023
                300,
                1,
            )
    assert names.isdisjoint(pod["metadata"]["name"] for pod in model.pods())


def test_a_good_canary_loses_no_request(model: Model):
    with model.change("canary passes") as change:
        run = train(model.namespace, 6, CANARY)
        assert run.outputs()["verdict"] == "release", run.describe()
        change.versions.add(version(run))
