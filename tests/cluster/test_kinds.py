"""Test every kind of object of the blocks on a real API server, with its webhooks and its
controller.

    pytest -m cluster tests/cluster/test_kinds.py

The tests need kubectl and an image with Python that the nodes have or can pull
(REKINDLE_TEST_PYTHON, python:3.11-slim). Kinds that the cluster does not serve are skipped. With
REKINDLE_RECORD=1, the observed statuses are written to tests/rekindle/blocks/statuses, and other
tests evaluate the conditions of the blocks on these statuses.
"""

import json
import os
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml

from argolocal.language.selector import evaluate_conditions
from tests.cluster.kube import Kube
from tests.kinds import FAIL, PASS, Kind, kinds
from tests.waiting import until

STATUSES = Path(__file__).parents[1] / "rekindle/blocks/statuses"
WAIT = "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(143)); time.sleep({})"
JOBS = ("PyTorchJob", "TFJob", "TFJob/dynamic", "XGBoostJob", "PaddleJob", "JAXJob", "MPIJob")
# in a TFJob without dynamic workers, the operator regards each deleted worker as failed
FATAL = {"TFJob"}


@pytest.fixture(scope="module")
def namespace() -> Iterator[Kube]:
    """A namespace with the ConfigMap that the pods of the tests use; the namespace is deleted at
    the end."""
    kube = Kube(f"rekindle-kinds-{uuid.uuid4().hex[:6]}")
    kube.apply(
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": kube.namespace}},
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "rekindle"}},
    )
    try:
        yield kube
    finally:
        kube("delete", "namespace", kube.namespace, "--timeout=120s", timeout=150)


@pytest.mark.parametrize("kind", kinds())
def test_the_api_server_accepts_jobs_of_every_kind(namespace: Kube, kind: str):
    _create(namespace, kinds("accepted")[kind].manifest, "--dry-run=server", "--validate=strict")


@pytest.mark.parametrize("kind", JOBS)
def test_the_conditions_recognize_jobs_that_succeeded(namespace: Kube, kind: str):
    assert _run_scenario(namespace, kind, "succeeded", lead=WAIT.format(3), worker=PASS) is True


@pytest.mark.parametrize("kind", JOBS)
def test_the_conditions_recognize_jobs_that_failed(namespace: Kube, kind: str):
    assert _run_scenario(namespace, kind, "failed", lead=FAIL, worker=FAIL) is False


@pytest.mark.parametrize("kind", JOBS)
def test_a_job_survives_the_eviction_of_a_pod(namespace: Kube, kind: str):
    def evict(name: str) -> None:
        prefix = f"{name}-worker-1"

        def running() -> dict[str, str]:
            pods = [
                pod for pod in namespace.items("pods") if pod["metadata"]["name"].startswith(prefix)
            ]
            return {
                pod["metadata"]["uid"]: pod["metadata"]["name"]
                for pod in pods
                if pod["status"]["phase"] == "Running"
                and "deletionTimestamp" not in pod["metadata"]
            }

        first = until(f"{prefix} runs", running, 120)
        namespace.evict(next(iter(first.values())))
        if kind not in FATAL:
            until(f"{prefix} runs again", lambda: running().keys() - first.keys(), 120)

    scenario, expected = ("evicted", False) if kind in FATAL else ("lost", True)
    assert (
        _run_scenario(namespace, kind, scenario, WAIT.format(20), WAIT.format(20), action=evict)
        is expected
    )


def _run_scenario(
    namespace: Kube,
    kind: str,
    scenario: str,
    lead: str,
    worker: str,
    action: Callable[[str], None] | None = None,
) -> bool:
    """Create a job, run `action`, and return True if the job succeeded by the conditions of its
    step."""
    name = f"{kind.lower().replace('/', '-')}-{scenario}"
    job_kind = kinds(name, lead, worker)[kind]

    policy = job_kind.manifest["spec"].get("runPolicy", {})
    if "backoffLimit" in policy:
        # the test needs more time, because the delay between restarts grows
        policy["backoffLimit"] = 1

    _create(namespace, job_kind.manifest)
    with ThreadPoolExecutor(1) as pool:
        running_action = pool.submit(action or (lambda name: None), name)
        statuses, has_succeeded = _watch_job(namespace, job_kind, name)
        running_action.result()

    namespace(
        "delete", job_kind.manifest["kind"].lower(), name, "--cascade=foreground", "--wait=false"
    )
    if os.environ.get("REKINDLE_RECORD"):
        _record(kind, scenario, statuses)

    return has_succeeded


def _watch_job(namespace: Kube, job_kind: Kind, name: str) -> tuple[list[Any], bool]:
    """Watch a job to its end; return its statuses that differ in more than times, and True if the
    last status is a success."""
    statuses: list[Any] = []
    found: list[bool] = []

    def look() -> bool:
        job = namespace.get(job_kind.manifest["kind"].lower(), name)
        assert job, f"{name} does not exist"
        status = _without_times(job.get("status", {}))
        if status not in statuses[-1:]:
            statuses.append(status)
        has_succeeded, _ = evaluate_conditions(
            {"status": job.get("status", {})}, job_kind.success, ",".join(job_kind.failure)
        )
        found.extend([] if has_succeeded is None else [has_succeeded])
        return bool(found)

    until("the verdict", look, 300, pause=0.3, evidence=lambda: json.dumps(statuses[-1:], indent=1))
    return statuses, found[0]


def _create(namespace: Kube, manifest: Any, *flags: str) -> None:
    served = [line.split() for line in namespace("api-resources", "--no-headers").splitlines()]
    if (manifest["apiVersion"], manifest["kind"]) not in [
        (words[-3], words[-1]) for words in served
    ]:
        pytest.skip(f"this cluster does not serve {manifest['apiVersion']} {manifest['kind']}")
    namespace("create", *flags, "-f", "-", stdin=json.dumps(manifest))


def _without_times(status: Any) -> Any:
    """Return a status without fields that differ in each run, and with a constant in place of each
    time."""
    if isinstance(status, list):
        return [_without_times(item) for item in status]
    if not isinstance(status, dict):
        return status

    noise = (
        "lastReconcileTime",
        "lastUpdateTime",
        "lastTransitionTime",
        "lastProbeTime",
        "message",
        "selector",
    )

    kept_fields = {
        key: _without_times(value)
        for key, value in status.items()
        if key not in (*noise, "uncountedTerminatedPods")
    }
    return kept_fields | {
        key: "2026-11-21T21:00:00Z" for key in ("startTime", "completionTime") if key in kept_fields
    }


def _record(kind: str, scenario: str, seen: list[Any]) -> None:
    file = STATUSES / f"{kind.replace('/', '-')}.yaml"
    recorded = yaml.safe_load(file.read_text()) if file.exists() else {}
    file.write_text(yaml.safe_dump(recorded | {scenario: seen}, default_flow_style=None, width=120))
