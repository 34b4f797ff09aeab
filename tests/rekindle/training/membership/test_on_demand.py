"""While spot nodes are missing, on-demand workers replace them, and leave when they are back."""

import asyncio
import threading
from pathlib import Path

import pytest

from rekindle.kubernetes_names import ON_DEMAND_CAPACITY, REKINDLE_CAPACITY
from rekindle.storage import Store
from rekindle.training.ledger.events import read_events
from rekindle.training.membership.account.account_api import AccountApi
from rekindle.training.membership.account.on_demand import OnDemandPlan, OnDemandWorkers
from rekindle.training.membership.client import CoordinatorClient
from tests.rekindle.cluster.server import ApiServer, make_status
from tests.rekindle.training.membership.members import (
    make_join_message,
    publish_group,
    serve_coordinator,
)
from tests.waiting import until

SCALE = "/apis/apps/v1/namespaces/models/deployments/demo-train-on-demand/scale"


def make_workers(server: ApiServer, folder: Path, **settings: float) -> OnDemandWorkers:
    (folder / "token").write_text("secret\n")
    (folder / "namespace").write_text("models")
    plan = OnDemandPlan(2, 1, settings.get("delay_s", 0.0))
    api = AccountApi(f"http://127.0.0.1:{server.port}", folder)
    return OnDemandWorkers(api, "demo-train-on-demand", plan)


def list_patches(server: ApiServer) -> list[tuple[str, object]]:
    return [(path, body) for method, path, body in server.requests if method == "PATCH"]


def test_pods_are_requested_only_if_spot_workers_are_missing_without_interruption() -> None:
    plan = OnDemandPlan(min_workers=4, workers_per_pod=2, delay_s=600, pods=0)
    assert plan.decide(0, spot_workers=1) is None
    assert plan.decide(599, spot_workers=2) is None
    assert plan.decide(599.5, spot_workers=4) is None, "enough workers: the delay starts again"
    assert plan.decide(600, spot_workers=3) is None
    assert plan.decide(1200, spot_workers=1) == 2, "two pods of two workers for three workers"


def test_pods_are_given_back_only_if_spot_workers_have_stayed() -> None:
    plan = OnDemandPlan(min_workers=2, workers_per_pod=1, delay_s=600, pods=2)
    assert plan.decide(0, spot_workers=2) is None
    assert plan.decide(300, spot_workers=0) is None, "the number of pods is right again"
    assert plan.decide(301, spot_workers=1) is None
    assert plan.decide(901, spot_workers=1) == 1


def test_a_pause_of_the_coordinator_does_not_count() -> None:
    plan = OnDemandPlan(min_workers=1, workers_per_pod=1, delay_s=600, pods=0)
    assert plan.decide(0, spot_workers=0) is None
    plan.shift_times(3600)
    assert plan.decide(3700, spot_workers=0) is None
    assert plan.decide(4200, spot_workers=0) == 1


def test_nothing_is_decided_before_the_number_of_pods_is_known() -> None:
    plan = OnDemandPlan(min_workers=1, workers_per_pod=1, delay_s=0)
    assert plan.decide(0, spot_workers=0) is None


def test_on_demand_workers_do_not_count_as_workers_on_spot_nodes() -> None:
    membership = publish_group("a", "b")
    membership.join(1, make_join_message("c", capacity="on-demand"))
    membership.join(1, make_join_message("d", capacity="spot"))
    assert membership.count_spot_workers() == 3
    joins = [event for event in membership.events if event["event"] == "join"]
    assert [event["capacity"] for event in joins] == ["on-demand", "spot"]


@pytest.mark.usefixtures("secret")
def test_a_coordinator_without_spot_workers_scales_the_deployment(
    s3: Store, tmp_path: Path
) -> None:
    with ApiServer(tmp_path) as server:
        # the Deployment is created after the coordinator has started
        server.refuse("GET", SCALE, 404, make_status(404, "NotFound", "not found"))
        server.refuse("GET", SCALE, 200, {"spec": {}, "status": {"replicas": 0}})
        server.refuse("PATCH", SCALE, 200, {"spec": {"replicas": 2}, "status": {"replicas": 0}})
        on_demand_workers = make_workers(server, tmp_path)
        on_demand_workers.read()
        assert on_demand_workers.plan.pods is None

        async def wait_for_request() -> None:
            async with serve_coordinator("no-spot-nodes") as (coordinator, _), asyncio.timeout(60):
                coordinator.membership.config = coordinator.spec
                on_demand_workers.read()
                coordinator.on_demand = on_demand_workers
                await asyncio.to_thread(
                    until, "the request", lambda: on_demand_workers.plan.pods == 2
                )
                await asyncio.to_thread(until, "its end", lambda: not coordinator.is_scaling)

        asyncio.run(wait_for_request())
        assert list_patches(server) == [(SCALE, {"spec": {"replicas": 2}})]

    events = read_events(s3, "no-spot-nodes/ledger")
    (change,) = [event for event in events if event["event"] == "on_demand"]
    assert (change["workers"], change["previous"]) == (2, 0)


@pytest.mark.usefixtures("s3", "secret")
def test_a_worker_tells_the_coordinator_the_kind_of_its_node(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(REKINDLE_CAPACITY, ON_DEMAND_CAPACITY)

    async def join() -> None:
        async with serve_coordinator() as (coordinator, (host, port)), asyncio.timeout(60):
            client = CoordinatorClient(host, port, {}, lambda: False)
            has_left = threading.Event()
            waiting = asyncio.create_task(
                asyncio.to_thread(client.wait_for_group, 0, -1, has_left.is_set)
            )
            membership = coordinator.membership
            await asyncio.to_thread(
                until, "the worker to join", lambda: bool(membership.alive_workers)
            )
            assert membership.count_spot_workers() == 0
            has_left.set()
            await waiting
            client.leave()

    asyncio.run(join())


def test_a_refusal_is_told_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with ApiServer(tmp_path) as server:
        server.refuse("GET", SCALE, 403, make_status(403, "Forbidden", "no"), times=9)
        on_demand_workers = make_workers(server, tmp_path)
        on_demand_workers.read()
        on_demand_workers.read()
        assert on_demand_workers.api.is_refused
        output = capsys.readouterr().err
        assert output.count("the Kubernetes API refuses GET") == 1
        assert "--with signals" in output


def test_an_unreachable_api_is_tried_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with ApiServer(tmp_path) as server:
        on_demand_workers = make_workers(server, tmp_path)
        server.stop()
        on_demand_workers.read()
        assert on_demand_workers.scale(1) is None
        assert on_demand_workers.plan.pods is None
        assert capsys.readouterr().err.count("could not be scaled") == 1
        server.start()
        server.refuse("PATCH", SCALE, 200, {"spec": {"replicas": 1}})
        assert on_demand_workers.scale(1) == {"workers": 1, "previous": 0, "seconds": 0.0}
