"""Every kind of object in pipelines/blocks, given to a real API server, its webhooks and its controller.

    pytest -m cluster tests/cluster/test_kinds.py

Needs kubectl and an image with Python that the nodes have or can pull (REKINDLE_TEST_PYTHON, python:3.11-slim). Kinds
that the cluster does not serve are skipped. With REKINDLE_RECORD=1 the statuses that were seen are written to
tests/rekindle/blocks/statuses, where every run of the tests judges the conditions by them.
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
JOBS = ("PyTorchJob", "TFJob", "TFJob/dynamic", "XGBoostJob", "PaddleJob", "JAXJob", "MPIJob", "Job", "Job/search")
# who is evicted, by what is in the pod's name
WORKER = {"Job": "", "Job/search": "-1-"}
# the operator takes any worker of a TFJob that goes for one that failed, unless they are dynamic
FATAL = {"TFJob"}


@pytest.fixture(scope="module")
def space() -> Iterator[Kube]:
    """A namespace with what our pods refer to; gone at the end."""
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
def test_the_api_server_takes_every_kind(space: Kube, kind: str):
    _create(space, kinds("accepted")[kind].manifest, "--dry-run=server", "--validate=strict")


@pytest.mark.parametrize("kind", JOBS)
def test_a_job_that_ends_well_is_seen_to(space: Kube, kind: str):
    assert _story(space, kind, "succeeded", lead=WAIT.format(3), worker=PASS) is True


@pytest.mark.parametrize("kind", JOBS)
def test_a_job_that_fails_is_seen_to(space: Kube, kind: str):
    assert _story(space, kind, "failed", lead=FAIL, worker=FAIL) is False


def test_a_search_ends_well_with_fewer_failed_trials_than_it_tolerates(space: Kube):
    odd = "import os; raise SystemExit(os.environ['JOB_COMPLETION_INDEX'] == '1')"
    assert _story(space, "Job/search", "tolerated", lead=odd, worker=PASS) is True


@pytest.mark.parametrize("kind", JOBS)
def test_a_job_goes_on_without_one_of_its_pods(space: Kube, kind: str):
    def evict(name: str) -> None:
        part = f"{name}{WORKER.get(kind, '-worker-1')}"

        def running() -> dict[str, str]:
            pods = [pod for pod in space.items("pods") if pod["metadata"]["name"].startswith(part)]
            return {
                pod["metadata"]["uid"]: pod["metadata"]["name"]
                for pod in pods
                if pod["status"]["phase"] == "Running" and "deletionTimestamp" not in pod["metadata"]
            }

        first = until(f"{part} runs", running, 120)
        space.evict(next(iter(first.values())))
        if kind not in FATAL:
            until(f"{part} runs again", lambda: running().keys() - first.keys(), 120)

    story = "evicted" if kind in FATAL else "lost"
    assert _story(space, kind, story, WAIT.format(20), WAIT.format(20), meanwhile=evict) is (kind not in FATAL)


def _story(
    space: Kube, kind: str, story: str, lead: str, worker: str, meanwhile: Callable[[str], None] | None = None
) -> bool:
    """What the conditions say in the end of a job that was created, and that something may happen to."""
    name = f"{kind.lower().replace('/', '-')}-{story}"
    job_kind = kinds(name, lead, worker)[kind]
    policy = job_kind.manifest["spec"].get("runPolicy", {})
    if "backoffLimit" in policy:
        policy["backoffLimit"] = 1  # restarts take longer and longer
    _create(space, job_kind.manifest)
    with ThreadPoolExecutor(1) as pool:
        happening = pool.submit(meanwhile or (lambda name: None), name)
        seen, good = _watched(space, job_kind, name)
        happening.result()
    space("delete", job_kind.manifest["kind"].lower(), name, "--cascade=foreground", "--wait=false")
    if os.environ.get("REKINDLE_RECORD"):
        _record(kind, story, seen)
    return good


def _watched(space: Kube, job_kind: Kind, name: str) -> tuple[list[Any], bool]:
    """The statuses that differ in more than time, and the verdict on the last."""
    seen: list[Any] = []
    found: list[bool] = []

    def look() -> bool:
        job = space.get(job_kind.manifest["kind"].lower(), name)
        assert job, f"{name} is gone"
        status = _timeless(job.get("status", {}))
        if status not in seen[-1:]:
            seen.append(status)
        good, _ = evaluate_conditions({"status": job.get("status", {})}, job_kind.success, ",".join(job_kind.failure))
        found.extend([] if good is None else [good])
        return bool(found)

    until("the verdict", look, 300, pause=0.3, evidence=lambda: json.dumps(seen[-1:], indent=1))
    return seen, found[0]


def _create(space: Kube, manifest: Any, *flags: str) -> None:
    served = [line.split() for line in space("api-resources", "--no-headers").splitlines()]
    if (manifest["apiVersion"], manifest["kind"]) not in [(words[-3], words[-1]) for words in served]:
        pytest.skip(f"this cluster serves no {manifest['apiVersion']} {manifest['kind']}")
    space("create", *flags, "-f", "-", stdin=json.dumps(manifest))


def _timeless(status: Any) -> Any:
    """Without what differs in every run; times only by their being there."""
    if isinstance(status, list):
        return [_timeless(item) for item in status]
    if not isinstance(status, dict):
        return status
    noise = ("lastReconcileTime", "lastUpdateTime", "lastTransitionTime", "lastProbeTime", "message", "selector")
    kept = {key: _timeless(value) for key, value in status.items() if key not in (*noise, "uncountedTerminatedPods")}
    return kept | {key: "2026-11-21T21:00:00Z" for key in ("startTime", "completionTime") if key in kept}


def _record(kind: str, story: str, seen: list[Any]) -> None:
    file = STATUSES / f"{kind.replace('/', '-')}.yaml"
    told = yaml.safe_load(file.read_text()) if file.exists() else {}
    file.write_text(yaml.safe_dump(told | {story: seen}, default_flow_style=None, width=120))
