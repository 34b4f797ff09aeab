"""Pods and jobs get an annotation with the time of their newest durable checkpoint; if the API
server refuses it, the training continues."""

import asyncio
from pathlib import Path

import pytest

from rekindle.cluster.platform import Platform, render_platform
from rekindle.storage import Store
from rekindle.training.membership.account.account_api import AccountApi
from rekindle.training.membership.account.checkpoint_signal import (
    CHECKPOINT_ANNOTATION,
    VOLCANO_ANNOTATION,
    CheckpointSignal,
)
from tests.rekindle.cluster.server import ApiServer, make_status
from tests.rekindle.training.membership.members import serve_coordinator
from tests.waiting import until

PODS = "/api/v1/namespaces/models/pods"
JOBS = "/apis/kubeflow.org/v1/namespaces/models/pytorchjobs"
TIME_S = 1796052600.0  # 2026-11-30T15:30:00Z


def make_signal(server: ApiServer, folder: Path) -> CheckpointSignal:
    (folder / "token").write_text("secret\n")
    (folder / "namespace").write_text("models")
    api = AccountApi(f"http://127.0.0.1:{server.port}", folder)
    return CheckpointSignal(api, "kubeflow.org/v1/pytorchjobs/demo-train")


def put_objects(server: ApiServer) -> None:
    for name, job in (("demo-train-worker-0", "demo-train"), ("other-worker-0", "other")):
        labels = {"training.kubeflow.org/job-name": job}
        server.put(PODS, {"metadata": {"name": name, "labels": labels}, "spec": {"containers": []}})
    server.put(JOBS, {"metadata": {"name": "demo-train"}, "spec": {}})


def test_pods_and_job_carry_the_time_of_the_newest_checkpoint(tmp_path: Path) -> None:
    with ApiServer(tmp_path) as server:
        put_objects(server)
        checkpoint_signal = make_signal(server, tmp_path)
        assert checkpoint_signal.compute_delay() == 0
        checkpoint_signal.write(TIME_S)
        assert checkpoint_signal.compute_delay() > 0, "further checkpoints wait"

        pod = server.objects[PODS]["demo-train-worker-0"]
        assert pod["metadata"]["annotations"] == {
            CHECKPOINT_ANNOTATION: "20261130T153000Z",
            VOLCANO_ANNOTATION: "2026-11-30T15:30:00Z",
        }
        job = server.objects[JOBS]["demo-train"]
        assert job["metadata"]["annotations"] == {CHECKPOINT_ANNOTATION: "20261130T153000Z"}
        assert "annotations" not in server.objects[PODS]["other-worker-0"]["metadata"]


@pytest.mark.usefixtures("secret")
def test_a_refusal_is_told_once_and_the_training_continues(
    s3: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with ApiServer(tmp_path) as server:
        put_objects(server)
        server.refuse(
            "PATCH", PODS, 403, make_status(403, "Forbidden", "pods is forbidden"), times=9
        )
        checkpoint_signal = make_signal(server, tmp_path)

        async def record_checkpoints() -> None:
            async with serve_coordinator() as (coordinator, _), asyncio.timeout(60):
                coordinator.signal = checkpoint_signal
                coordinator.note("checkpoint", step=1)
                coordinator.note("checkpoint", step=2)
                await asyncio.to_thread(
                    until, "the refusal", lambda: checkpoint_signal.api.is_refused
                )
                assert not coordinator.exit_code.done()

        asyncio.run(record_checkpoints())
        checkpoint_signal.write(TIME_S)
        output = capsys.readouterr().err
        assert output.count("the Kubernetes API refuses PATCH") == 1
        assert "--with signals" in output
        assert sum(method == "PATCH" for method, _, _ in server.requests) == 1


def test_an_unreachable_api_is_told_once_and_tried_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with ApiServer(tmp_path) as server:
        put_objects(server)
        checkpoint_signal = make_signal(server, tmp_path)
        server.stop()
        checkpoint_signal.write(TIME_S)
        checkpoint_signal.write(TIME_S)
        assert capsys.readouterr().err.count("was not written to the pods") == 1
        server.start()
        checkpoint_signal.write(TIME_S)
        assert server.objects[JOBS]["demo-train"]["metadata"]["annotations"]


def test_the_account_of_coordinators_may_do_no_more_than_it_needs() -> None:
    objects = render_platform(Platform("models", components=("mlflow", "signals")))
    (role,) = (
        each
        for each in objects
        if (each["kind"], each["metadata"]["name"]) == ("Role", "rekindle-coordinator")
    )
    granted = {
        (resource, verb)
        for rule in role["rules"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    assert granted == {
        ("pods", "list"),
        ("pods", "patch"),
        ("pytorchjobs", "patch"),
        ("jobsets", "patch"),
        ("trainjobs", "patch"),
        ("deployments/scale", "get"),
        ("deployments/scale", "patch"),
    }
