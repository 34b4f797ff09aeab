"""A canary that does worse than the champion is rolled back, and the MLflow run shows the reason; a
good canary is released."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from math import ceil
from typing import Any
from uuid import uuid4

import pytest

from rekindle import tracking
from rekindle.release.serve_config import CanaryConfig
from rekindle.release.watch.scrape import ServerWatch
from rekindle.storage import Store
from steps import canary
from tests.rekindle.serving.running import RunningServer, prefix_of, write_release

pytestmark = pytest.mark.usefixtures("mlflow_server")
# only errors and crashes count: the predictions of the workload `echo` contain its process id, and
# a busy machine may be slow
RULE = CanaryConfig(minutes=0.03, requests=60, wait_minutes=1, score_shift=0.99, slower=1000)


@pytest.fixture(scope="module")
def servers(s3_environment: dict[str, str]) -> Iterator[dict[str, RunningServer]]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in s3_environment.items():
            patch.setenv(name, value)
        for version in ("7", "8"):
            write_release(Store.from_env(), prefix_of(f"canary-{version}"), version=version)
        with (
            RunningServer(f"--model={prefix_of('canary-7')}", "--deployment=old") as old_server,
            RunningServer(f"--model={prefix_of('canary-8')}", "--deployment=new") as new_server,
        ):
            for name, server in (("OLD", old_server), ("NEW", new_server)):
                set_address(patch, name, server)
            yield {"old": old_server, "new": new_server}


def set_address(patch: pytest.MonkeyPatch, name: str, server: RunningServer) -> None:
    """Let the Service `name` send requests to the given server once the server is ready."""
    server.until_ready()
    patch.setenv(f"{name}_SERVICE_HOST", "127.0.0.1")
    patch.setenv(f"{name}_SERVICE_PORT", server.url.rpartition(":")[2])


@contextmanager
def send_load(servers: dict[str, RunningServer], **other_requests: Any) -> Iterator[None]:
    """Send requests to both servers until the `with` block ends; `other_requests` changes every
    third request to the new server."""
    over = threading.Event()

    def ask(name: str) -> None:
        request_number = 0
        while not over.is_set():
            request_number += 1
            servers[name].predict(
                {"id": request_number, "sleep": 0.004}
                | (other_requests if name == "new" and request_number % 3 == 0 else {})
            )

    threads = [threading.Thread(target=ask, args=(name,)) for name in servers]
    for thread in threads:
        thread.start()

    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


def run_step(**changes: Any) -> tuple[canary.Outputs, dict[str, str]]:
    """Run the step `canary`, and return its outputs and the tags of its MLflow run."""
    run_id = tracking.start_run("canary", f"canary-{uuid4().hex[:6]}")

    inputs: dict[str, Any] = {
        "name": "echo",
        "version": "8",
        "champion": "7",
        "server": "new",
        "former": "old",
    }

    outputs = canary.run(
        canary.Inputs(**({"percent": 5, "rule": RULE, "run_id": run_id} | inputs | changes))
    )

    return outputs, tracking.read_tags(run_id)


def run_canary(**changes: Any) -> tuple[str, dict[str, str]]:
    """Return the result of the canary, and the tags of its MLflow run."""
    outputs, tags = run_step(**changes)
    assert outputs.percent == 0 or outputs.canary == "passed", (
        "a canary that is rolled back gets no further share"
    )
    return outputs.canary, tags


def test_a_canary_that_fails_every_third_request_is_rolled_back(
    servers: dict[str, RunningServer],
) -> None:
    with send_load(servers, bad=1):
        result, tags = run_canary()
    assert result.startswith("taken back: version 8 with 5 % of the requests, versus 7: ")
    assert "requests failed" in result
    assert tags["verdict"] == "taken back"
    assert f"taken back: {tags['reason']}" == result


# a server of an earlier release does not know its Deployment
@pytest.mark.slow
@pytest.mark.parametrize("deployment", ["old", ""])
def test_new_servers_of_the_same_version_are_compared_with_its_former_servers(
    s3: Store, monkeypatch: pytest.MonkeyPatch, deployment: str
) -> None:
    write_release(s3, prefix_of("canary-7"), version="7")
    with (
        RunningServer(
            f"--model={prefix_of('canary-7')}", f"--deployment={deployment}"
        ) as old_server,
        RunningServer(f"--model={prefix_of('canary-7')}", "--deployment=new") as new_server,
    ):
        pods = {"old": old_server, "new": new_server}
        for name, server in pods.items():
            set_address(monkeypatch, name.upper(), server)

        with send_load(pods, bad=1):
            result, _ = run_canary(version="7")

        assert "requests failed, of the champion's 0 of" in result
        with send_load(pods):
            result, _ = run_canary(version="7")

        assert result == "passed"


@pytest.mark.slow
def test_a_canary_ends_when_its_champion_is_rolled_back(servers: dict[str, RunningServer]) -> None:
    name = f"echo-{uuid4().hex[:6]}"
    run_id = tracking.start_run("canary", name)
    earlier_version, champion = (
        tracking.register_version(name, f"r/{n}/", f"s3://b/{n}", n * 32, run_id, {})
        for n in ("aa", "bb")
    )
    tracking.record_champion(
        name, earlier_version.version, "older"
    )  # the Service is changed as a rollback during the canary does
    result, _ = run_canary(
        name=name, champion=champion.version, rule=RULE.model_copy(update={"wait_minutes": 30})
    )
    assert result.endswith("by now the champion is version 1")
    result, tags = run_canary(name=name, champion=champion.version, can_repeat=True)
    assert result == "champion changed" == tags["rekindle.canary"]
    assert "verdict" not in tags


@pytest.mark.slow
def test_a_canary_without_traffic_is_not_promoted(servers: dict[str, RunningServer]) -> None:
    result, _ = run_canary(rule=RULE.model_copy(update={"wait_minutes": 0.02}))
    assert "answered 0 requests, the champion 0: too few for a comparison" in result


def test_the_first_release_skips_the_canary() -> None:
    outputs, _ = run_step(former="", champion="", percent=0)
    assert outputs.canary == "passed"
    assert outputs.percent == 0


def test_a_good_canary_gets_the_next_share(servers: dict[str, RunningServer]) -> None:
    with send_load(servers):
        outputs, tags = run_step(servers=4)
    assert outputs.canary == "passed"
    assert tags["rekindle.canary"] == "passed with 5 % of the requests"
    assert outputs.percent == 25
    assert outputs.replicas == 1


@pytest.mark.parametrize(("servers", "pods"), [(1, [1, 1]), (2, [1, 1]), (6, [1, 2]), (19, [1, 6])])
def test_shares_grow_step_by_step_with_a_matching_number_of_pods(
    servers: int, pods: list[int]
) -> None:
    first_result, _ = run_step(percent=0, servers=servers)
    assert first_result.canary == "passed"
    assert first_result.percent == 5
    assert [canary.count_pods(percent, servers) for percent in (5, 25)] == pods
    assert [RULE.next_share(percent) for percent in (0, 5, 25)] == [5, 25, 0]
    assert [canary.count_split_pods(percent, servers) for percent in (5, 25, 100)] == [
        1,
        ceil(servers / 4),
        servers,
    ]
    shadow = CanaryConfig(gateway="edge", shadow=True)
    assert [shadow.next_share(percent) for percent in (0, 100)] == [100, 0], (
        "a shadow is watched once"
    )


@pytest.mark.slow
def test_the_first_request_to_a_server_is_not_counted_as_a_crash(s3: Store) -> None:
    write_release(s3, prefix_of("canary-9"), version="9")
    with RunningServer(f"--model={prefix_of('canary-9')}") as server:
        server.until_ready()
        watch = ServerWatch(server.url)
        server.predict({"id": 1})
        side = watch.scrape()["", "9"]
    assert side.requests == 1
    assert side.crashes == 0


@pytest.mark.slow
def test_a_server_that_crashes_during_its_canary_is_detected(
    servers: dict[str, RunningServer], s3: Store
) -> None:
    address = f"http://127.0.0.1:{servers['new'].url.rpartition(':')[2]}"
    watch = ServerWatch(address)
    servers["new"].predict({"id": 1})
    assert watch.scrape()["new", "8"].requests == 1
    assert watch.scrape()["new", "8"].crashes == 0
    servers["new"].process.kill()
    servers["new"].process.wait()
    watch.scrape()

    with RunningServer(
        f"--model={prefix_of('canary-8')}",
        f"--port={address.rpartition(':')[2]}",
        "--deployment=new",
    ) as restarted_server:
        restarted_server.until_ready()
        restarted_server.predict({"id": 2})
        side = watch.scrape()["new", "8"]

    assert side.requests == 2
    assert side.crashes == 1
