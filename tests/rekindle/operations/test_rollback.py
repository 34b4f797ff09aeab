"""`rekindle rollback` is a transaction, which completes, is undone, or is finished by the next
command."""

import json
import subprocess
import threading
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from argolocal.common import homes
from argolocal.controllers.controller import Controller
from rekindle import tracking
from rekindle.errors import ConfigError, RekindleError
from rekindle.local.cluster import LocalCluster
from rekindle.local.local_objects import LocalObjects
from rekindle.release import promotion
from rekindle.release.promotion import ChampionChangedError
from rekindle.release.rollback import roll_back
from rekindle.storage import Store
from tests.argolocal.controllers.releases import (
    is_answering,
    is_rolled_out,
    make_release,
    make_release_service,
    run_clients,
    wait,
)
from tests.ports import free_port
from tests.proxy import Proxy
from tests.rekindle.cli.processes import run_rekindle
from tests.rekindle.hook import Hook
from tests.waiting import until

INSTANCE = "app.kubernetes.io/instance"


@dataclass
class Model:
    """A model with releases on this machine, as pipelines create them; the newest release is
    deployed."""

    name: str
    store: Store
    cluster: LocalCluster
    kinds: dict[str, Controller]
    port: int

    def release(self, slow: float = 0) -> str:
        """Register, deploy and promote one more version."""
        number = len(tracking.promoted_releases(self.name)) + 1
        run_id = tracking.start_run(self.name, f"{self.name}-{number}")
        tracking.log_to_run(
            run_id,
            run_params={"notify": {"format": "json", "events": ["rollback"], "mlflow_url": ""}},
        )
        prefix = f"releases/{uuid.uuid4().hex}/"
        champion = tracking.champion(self.name)
        version = tracking.register_version(
            self.name, prefix, f"s3://b/{prefix}", "ab" * 32, run_id, {}
        ).version
        previous = champion.version if champion else ""
        promotion.promote(self.store, self.name, version, previous, f"{self.name}-{version}")
        self.kinds["Deployment"].apply(self.rename(make_release(version, slow)))
        self.kinds["Service"].apply(self.rename(make_release_service(version, self.port)))

        if not slow:
            wait(self.kinds, is_rolled_out, name=f"{self.name}-{version}")
        if previous:
            self.scale_to_zero(previous)

        return version

    def rename(self, obj: dict[str, Any]) -> dict[str, Any]:
        return json.loads(json.dumps(obj).replace("fraud", self.name))

    def run_rollback(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run `rekindle rollback` with the home (directory of runs) of this model."""
        return run_rekindle("rollback", *arguments, cwd=self.cluster.home.parent, **environment)

    def scale_to_zero(self, version: str) -> None:
        LocalObjects(self.cluster).patch(
            "Deployment", f"{self.name}-{version}", {"spec": {"replicas": 0}}
        )

    def roll_back(
        self,
        version: str = "",
        seconds: float = 30,
        report: Callable[[Any], None] = lambda _: None,
        objects: Any = None,
    ) -> dict[str, str]:
        return roll_back(
            objects or LocalObjects(self.cluster), self.store, self.name, version, seconds, report
        )

    @property
    def state(self) -> tuple[str, str, dict[str, int], bool]:
        """The champion, the version in the Service, the pods of each version, and whether a
        rollback is unfinished."""
        champion = tracking.champion(self.name)
        service = self.kinds["Service"].read(self.name)
        objects = [
            self.kinds["Deployment"].read(name) or {} for name in self.kinds["Deployment"].names()
        ]
        pods = {
            obj["metadata"]["name"].rpartition("-")[2]: obj["spec"]["replicas"] for obj in objects
        }

        if service:
            serves = service["spec"]["selector"][INSTANCE].rpartition("-")[2]
        else:
            serves = ""

        pending = promotion.read_pending_rollback(self.store, self.name) is not None
        return champion.version if champion else "", serves, pods, pending


@pytest.fixture
def model(
    tmp_path: Path, s3: Store, mlflow_server: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Model]:
    monkeypatch.setattr(promotion, "UNFINISHED_TIMEOUT_S", 0.2)
    name = f"cards-{uuid.uuid4().hex[:6]}"
    cluster = LocalCluster(tmp_path / ".rekindle")
    homes.create_home(cluster.home)
    yield Model(
        name, s3, cluster, cluster.kinds.controllers(cluster, cluster.home / "run"), free_port()
    )
    cluster.down()


@pytest.mark.slow
def test_a_rollback_sends_a_notification_with_both_versions(model: Model) -> None:
    name = model.name
    for _ in range(2):
        model.release()

    with Hook() as server:
        result = model.run_rollback(name, "-o", "json", NOTIFY_URL=server.url)
        assert result.returncode == 0, result.stderr
        assert json.loads(result.stdout)["version"] == "1", result.stderr
        (message,) = server.received
        assert message["event"] == "rollback"
        assert message["name"] == name
        assert (
            message["text"]
            == "version 1 is serving again (before: version 2), by `rekindle rollback`."
        )
        assert "/#/experiments/" in message["link"]
        assert (tracking.find_run(name, f"{name}-1") or "-") in message["link"]
        result = model.run_rollback(name, "2")

        assert result.returncode == 0
        assert "version 2 of" in result.stdout
        assert "NOTIFY_URL is not set" in result.stderr

    assert model.state == ("2", "2", {"1": 0, "2": 1}, False)


def test_a_rollback_loses_no_request_and_refuses_impossible_versions(model: Model) -> None:
    for _ in range(2):
        model.release()

    wait(model.kinds, lambda _: is_answering(model.port, "2"), name=f"{model.name}-2")
    scaled_down: list[str] = []

    with run_clients(model.port) as seen:

        class WaitingObjects(LocalObjects):
            def patch(
                self,
                object_kind: str,
                object_name: str,
                object_change: dict[str, Any],
                dry_run: bool = False,
            ) -> None:
                # this server does not drain requests before it ends
                if object_change["spec"] == {"replicas": 0} and not dry_run:
                    scaled_down.append(object_name)
                    wait(
                        model.kinds,
                        lambda _: set(seen.latest.values()) == {"1"},
                        name=f"{model.name}-2",
                    )
                super().patch(object_kind, object_name, object_change, dry_run)

        result = model.roll_back(objects=WaitingObjects(model.cluster))
        assert result == {
            "model": model.name,
            "version": "1",
            "deployment": f"{model.name}-1",
            "before": "2",
        }

        wait(model.kinds, lambda status: not status.get("replicas"), name=f"{model.name}-2")

    assert scaled_down == [f"{model.name}-2"]
    assert set(seen) == {"1", "2"}
    assert model.state == ("1", "1", {"1": 1, "2": 0}, False)
    for version, message in (("", "a release before version 1"), ("7", "available versions: 1, 2")):
        with pytest.raises(ConfigError, match=message):
            model.roll_back(version)

    with pytest.raises(ConfigError, match='the model "sales" is not served'):
        roll_back(LocalObjects(model.cluster), model.store, "sales", "", 1, lambda _: None)

    # version 1 is already serving
    assert model.roll_back("1")["before"] == ""
    assert model.state == ("1", "1", {"1": 1, "2": 0}, False)


@pytest.mark.slow
def test_a_rollback_without_ready_servers_keeps_the_current_version(model: Model) -> None:
    model.release(slow=60)
    model.release()
    wait(model.kinds, lambda _: is_answering(model.port, "2"), name=f"{model.name}-2")
    with pytest.raises(
        RekindleError,
        match=r"0 of 1 pods ready after 0.5 s: the current version keeps serving.* is cancelled",
    ):
        model.roll_back("1", 0.5)
    assert is_answering(model.port, "2")
    assert model.state == ("2", "2", {"1": 0, "2": 1}, False)


@pytest.mark.slow
def test_a_rollback_whose_pods_are_stopped_by_a_newer_release_ends_at_once(model: Model) -> None:
    for _ in range(2):
        model.release()

    class Switch(LocalObjects):
        """Let the switch of the traffic to a newer release stop the pods of all earlier
        releases."""

        def patch(
            self,
            object_kind: str,
            object_name: str,
            object_change: dict[str, Any],
            dry_run: bool = False,
        ) -> None:
            super().patch(object_kind, object_name, object_change, dry_run)
            if object_kind == "Deployment" and not dry_run:
                super().patch(object_kind, object_name, {"spec": {"replicas": 0}})

    with pytest.raises(
        RekindleError, match=r"newer release, .* has stopped the pods of .* is cancelled"
    ):
        model.roll_back("1", 30, objects=Switch(model.cluster))

    assert model.state == ("2", "2", {"1": 0, "2": 1}, False)


@pytest.mark.slow
@pytest.mark.parametrize("quota", [2, 1])
def test_a_rollback_starts_as_many_servers_as_the_current_version_has(
    model: Model, quota: int
) -> None:
    """If the cluster has no capacity for these servers, fewer servers suffice after the time
    limit."""
    for _ in range(2):
        model.release()

    LocalObjects(model.cluster).patch("Deployment", f"{model.name}-2", {"spec": {"replicas": 2}})

    class Quota(LocalObjects):
        def patch(
            self,
            object_kind: str,
            object_name: str,
            object_change: dict[str, Any],
            dry_run: bool = False,
        ) -> None:
            if object_kind == "Deployment" and not dry_run:
                object_change["spec"]["replicas"] = min(object_change["spec"]["replicas"], quota)
            super().patch(object_kind, object_name, object_change, dry_run)

    assert (
        model.roll_back(seconds=5 if quota == 1 else 60, objects=Quota(model.cluster))["version"]
        == "1"
    )
    assert model.state == ("1", "1", {"1": quota, "2": 0}, False)


def test_a_promotion_during_a_rollback_wins_and_is_reported(model: Model) -> None:
    model.release(slow=60)
    model.release()
    failed: list[BaseException] = []

    def attempt() -> None:
        try:
            model.roll_back("1", 60)
        except ChampionChangedError as error:
            failed.append(error)

    rollback = threading.Thread(target=attempt)
    rollback.start()
    deployments = model.kinds["Deployment"]

    wait(
        model.kinds,
        lambda _: (deployments.get(f"{model.name}-1") or {})["spec"]["replicas"] == 1,
        name=f"{model.name}-1",
    )

    third_version = tracking.register_version(
        model.name, "releases/c/", "s3://b/c", "cd" * 32, "", {}
    ).version
    promotion.promote(model.store, model.name, third_version, "2", f"{model.name}-3")
    model.kinds["Deployment"].apply(model.rename(make_release("3")))
    quick = {"spec": {"template": model.rename(make_release("1"))["spec"]["template"]}}
    # the Deployment becomes ready at this time
    LocalObjects(model.cluster).patch("Deployment", f"{model.name}-1", quick)
    rollback.join(60)
    assert [str(error) for error in failed] == [
        f"the rollback of {model.name} to version 1 is cancelled: by now the champion is version 3."
        " The rollback to version 1 is cancelled, and its Deployment has 0 pods, as before."
    ]
    assert model.state == ("3", "2", {"1": 0, "2": 1, "3": 1}, False)


@pytest.mark.slow
def test_a_rollback_that_a_promotion_overrides_after_its_switch_says_that_its_pods_keep_running(
    model: Model,
) -> None:
    for _ in range(2):
        model.release()

    class Promotion(LocalObjects):
        """Let a newer release be promoted, to which the traffic is not switched yet."""

        def patch(
            self,
            object_kind: str,
            object_name: str,
            object_change: dict[str, Any],
            dry_run: bool = False,
        ) -> None:
            super().patch(object_kind, object_name, object_change, dry_run)
            if object_kind == "Service" and not dry_run:
                third_version = tracking.register_version(
                    model.name, "releases/c/", "s3://b/c", "cd" * 32, "", {}
                ).version
                promotion.promote(model.store, model.name, third_version, "1", f"{model.name}-3")

    with pytest.raises(
        ChampionChangedError, match="is cancelled, and its pods keep running: they have the traffic"
    ):
        model.roll_back(objects=Promotion(model.cluster))

    assert model.state == ("3", "1", {"1": 1, "2": 1}, False)


@pytest.mark.slow
def test_a_rollback_never_chooses_servers_that_were_not_promoted(model: Model) -> None:
    """While a rollback starts, another run may be verifying a new version, and new servers of an
    earlier version."""
    for _ in range(2):
        model.release()
    tracking.register_version(model.name, "releases/c/", "s3://b/c", "cd" * 32, "", {})
    for name, version in ((f"{model.name}-1-new", "1"), (f"{model.name}-3", "3")):
        obj = model.rename(make_release(version))
        obj["metadata"]["name"] = name
        model.kinds["Deployment"].apply(obj)
    with pytest.raises(ConfigError, match="available versions: 1, 2"):
        model.roll_back("3")
    assert model.roll_back()["deployment"] == f"{model.name}-1"


@pytest.mark.slow
def test_an_unfinished_rollback_must_be_finished_first(model: Model) -> None:
    for _ in range(3):
        model.release()

    def broken(_: Any) -> None:
        raise OSError("the terminal is gone")

    with pytest.raises(OSError, match="terminal"):
        model.roll_back(report=broken)

    assert model.state == ("2", "2", {"1": 0, "2": 1, "3": 0}, True)
    with pytest.raises(
        ConfigError,
        match=f"to version 2 is unfinished: finish it with `rekindle rollback {model.name}`",
    ):
        model.roll_back("1")

    assert model.roll_back()["before"] == "3"
    assert model.state == ("2", "2", {"1": 0, "2": 1, "3": 0}, False)
    assert model.roll_back("1")["before"] == "2"
    assert model.state == ("1", "1", {"1": 1, "2": 0, "3": 0}, False)


@pytest.mark.slow
def test_a_rollback_refused_by_mlflow_changes_nothing(model: Model, mlflow_server: str) -> None:
    for _ in range(2):
        model.release()
    original = model.state
    # MLflow refuses requests to this host
    with Proxy(mlflow_server, "127.0.0.7") as proxy:
        result = model.run_rollback(model.name, MLFLOW_TRACKING_URI=proxy.url)
    assert result.returncode == 1, result.stderr
    assert "refused: PERMISSION_DENIED: the host is" in result.stderr, result.stderr
    assert model.state == original == ("2", "2", {"1": 0, "2": 1}, False)
    result = model.run_rollback(model.name)
    assert result.returncode == 0, result.stderr
    assert "(before: version 2)" in result.stdout, result.stderr
    assert model.state == ("1", "1", {"1": 1, "2": 0}, False)


@pytest.mark.slow
def test_a_rollback_can_be_repeated_after_mlflow_failed_during_it(
    model: Model, mlflow_server: str
) -> None:
    for _ in range(3):
        model.release()

    with Proxy(mlflow_server) as proxy:

        def leave(write: Any) -> None:
            proxy.away = proxy.away or write.path.endswith("/alias")

        proxy.after = leave
        result = model.run_rollback(
            model.name, MLFLOW_TRACKING_URI=proxy.url, MLFLOW_HTTP_REQUEST_MAX_RETRIES="0"
        )

        assert result.returncode == 1
        assert "`rekindle rollback " in result.stderr
        assert "does not answer" in result.stderr

    for _ in range(2):
        result = model.run_rollback(model.name, "2")
        assert result.returncode == 0, result.stderr
        assert model.state == ("2", "2", {"1": 0, "2": 1, "3": 0}, False)


@pytest.mark.slow
def test_a_release_during_an_unfinished_rollback_keeps_the_traffic(model: Model) -> None:
    """After the rollback was killed, another release may follow; the next command then starts a new
    rollback."""
    for _ in range(2):
        model.release()

    class UnreachableObjects(LocalObjects):
        def patch(
            self,
            object_kind: str,
            object_name: str,
            object_change: dict[str, Any],
            dry_run: bool = False,
        ) -> None:
            if object_kind == "Service" and not dry_run:
                raise RekindleError("the cluster does not answer.")
            super().patch(object_kind, object_name, object_change, dry_run)

    with pytest.raises(RekindleError, match=r"finish it with `rekindle rollback .*`"):
        model.roll_back(objects=UnreachableObjects(model.cluster))

    assert model.state == ("1", "2", {"1": 1, "2": 1}, True)
    model.release()
    assert model.state == ("3", "3", {"1": 0, "2": 1, "3": 1}, False)
    assert model.roll_back()["version"] == "2"
    assert model.state == ("2", "2", {"1": 0, "2": 1, "3": 0}, False)


@pytest.mark.slow
def test_a_slow_rollback_checks_the_champion_before_it_patches_the_service(model: Model) -> None:
    for _ in range(2):
        model.release()

    class SlowObjects(LocalObjects):
        """Objects of Kubernetes for a slow rollback: before it patches the Service, another release
        is promoted and gets the traffic."""

        released = ""

        def patch(
            self,
            object_kind: str,
            object_name: str,
            object_change: dict[str, Any],
            dry_run: bool = False,
        ) -> None:
            if object_kind == "Service" and not dry_run and not self.released:
                self.released = model.release()
            super().patch(object_kind, object_name, object_change, dry_run)

    with pytest.raises(
        ChampionChangedError, match=r"version 3 of .* became the champion after version 1"
    ):
        model.roll_back(objects=SlowObjects(model.cluster))

    until("the new release to serve", lambda: model.state[:2] == ("3", "3"))
    assert model.state == ("3", "3", {"1": 0, "2": 1, "3": 1}, False)


class InterruptedObjects(LocalObjects):
    """Objects of Kubernetes whose user presses Ctrl-C while the pods start; `before_stop` is called
    before the pods are stopped."""

    before_stop: Callable[[], Any] = staticmethod(lambda: None)

    def patch(
        self,
        object_kind: str,
        object_name: str,
        object_change: dict[str, Any],
        dry_run: bool = False,
    ) -> None:
        if object_kind == "Deployment" and not dry_run and object_change["spec"]["replicas"] == 0:
            self.before_stop()
        super().patch(object_kind, object_name, object_change, dry_run)
        if object_kind == "Deployment" and not dry_run and object_change["spec"]["replicas"]:
            raise KeyboardInterrupt


@pytest.mark.slow
def test_an_interrupted_rollback_stops_no_pods_that_serve_by_another_command(model: Model) -> None:
    for _ in range(2):
        model.release()
    objects = InterruptedObjects(model.cluster)
    objects.before_stop = lambda: model.roll_back("1")
    with pytest.raises(KeyboardInterrupt):
        model.roll_back(objects=objects)
    champion, serves, pods, pending = model.state
    assert champion == "1"
    assert serves == "1"
    assert pending is False
    assert pods["1"] == 1


@pytest.mark.slow
def test_a_slow_rollback_stops_no_pods_of_the_current_version(model: Model) -> None:
    for _ in range(2):
        model.release()

    class SlowObjects(LocalObjects):
        slept = False

        def patch(
            self,
            object_kind: str,
            object_name: str,
            object_change: dict[str, Any],
            dry_run: bool = False,
        ) -> None:
            if (
                object_kind == "Deployment"
                and not dry_run
                and object_change["spec"]["replicas"] == 0
                and not self.slept
            ):
                self.slept = True
                model.release()
                model.roll_back("2")
            super().patch(object_kind, object_name, object_change, dry_run)

    with pytest.raises(ChampionChangedError, match=r"version 2 of .* keeps the traffic"):
        model.roll_back(objects=SlowObjects(model.cluster))

    assert model.state == ("2", "2", {"1": 0, "2": 1, "3": 0}, False)


@pytest.mark.slow
def test_a_rollback_whose_deployment_was_deleted_can_choose_another_version(model: Model) -> None:
    for _ in range(3):
        model.release()

    class UnreachableObjects(LocalObjects):
        def patch(
            self,
            object_kind: str,
            object_name: str,
            object_change: dict[str, Any],
            dry_run: bool = False,
        ) -> None:
            if object_kind == "Service" and not dry_run:
                raise RekindleError("the cluster does not answer.")
            super().patch(object_kind, object_name, object_change, dry_run)

    with pytest.raises(RekindleError, match="is unfinished"):
        model.roll_back("1", objects=UnreachableObjects(model.cluster))

    model.kinds["Deployment"].delete(f"{model.name}-1")
    with pytest.raises(
        ConfigError, match=r"unfinished rollback .* was deleted .*: name another version"
    ):
        model.roll_back()

    assert model.roll_back("2")["version"] == "2"
    assert model.state == ("2", "2", {"2": 1, "3": 0}, False)


@pytest.mark.slow
def test_an_interrupted_promotion_of_a_deleted_version_blocks_nothing(model: Model) -> None:
    for _ in range(2):
        model.release()
    record = {"version": "9", "deployment": f"{model.name}-9", "former": "", "unfinished": True}
    model.store.put(f"releases/{model.name}/promotion.json", json.dumps(record).encode())
    assert model.roll_back()["version"] == "1"
    assert model.release() == "3"


@pytest.mark.slow
def test_a_rollback_does_not_wait_for_its_own_promotion(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):
        model.release()
    monkeypatch.setattr(promotion, "UNFINISHED_TIMEOUT_S", 1e6)
    assert model.roll_back()["version"] == "1"


@pytest.mark.slow
def test_a_record_of_a_rollback_does_not_start_the_servers_of_something_else(model: Model) -> None:
    for _ in range(2):
        model.release()
    other = json.loads(json.dumps(make_release("1", 0)).replace("fraud-1", "billing"))
    model.kinds["Deployment"].apply(other | {"spec": other["spec"] | {"replicas": 0}})
    key = f"releases/{model.name}/promotion.json"
    state = json.loads(model.store.get(key))
    forged = {"version": "1", "deployment": "billing", "champion": "2", "replicas": 1}
    model.store.put(key, json.dumps(state | {"rollback": forged}).encode())

    with pytest.raises(ConfigError, match=r'"billing", .* is not of this version: name another'):
        model.roll_back()
    billing = model.kinds["Deployment"].read("billing")
    assert billing
    assert billing["spec"]["replicas"] == 0
    assert model.roll_back("2")["deployment"] == f"{model.name}-2", "naming a version ends it"
