"""`rekindle rollback` is one transaction: it is done whole, or undone, or finished by the next command."""

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
from argolocal.controllers.base import Controller
from rekindle import tracking
from rekindle.errors import ConfigError, RekindleError
from rekindle.local.cluster import LocalCluster
from rekindle.local.objects import LocalObjects
from rekindle.release import promotion
from rekindle.release.promotion import ChampionChanged
from rekindle.release.rollback import roll_back
from rekindle.storage import Store
from tests.argolocal.controllers.test_deployment import address, answering, load, release, rolled_out, wait
from tests.ports import free_port
from tests.proxy import Proxy
from tests.rekindle.cli.test_cli import rekindle
from tests.rekindle.hook import hook
from tests.waiting import until

INSTANCE = "app.kubernetes.io/instance"


@dataclass
class Model:
    """A model with releases on this machine, as pipelines leave them: the newest one serves."""

    name: str
    store: Store
    cluster: LocalCluster
    kinds: dict[str, Controller]
    port: int

    def release(self, slow: float = 0) -> str:
        """Register, deploy and promote one more version."""
        number = len(tracking.promoted_releases(self.name)) + 1
        run_id = tracking.start_run(self.name, f"{self.name}-{number}")
        tracking.log(run_id, params={"notify": {"format": "json", "events": ["rollback"], "mlflow_url": ""}})
        prefix, champion = f"releases/{uuid.uuid4().hex}/", tracking.champion(self.name)
        version = tracking.register(self.name, prefix, f"s3://b/{prefix}", "ab" * 32, run_id, {}).version
        before = champion.version if champion else ""
        promotion.promote(self.store, self.name, version, before, f"{self.name}-{version}")
        self.kinds["Deployment"].apply(self.called(release(version, slow)))
        self.kinds["Service"].apply(self.called(address(version, self.port)))
        if not slow:
            wait(self.kinds, rolled_out, name=f"{self.name}-{version}")
        if before:
            self.rest(before)
        return version

    def called(self, obj: dict[str, Any]) -> dict[str, Any]:
        return json.loads(json.dumps(obj).replace("fraud", self.name))

    def typed(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """`rekindle rollback` as a user of this home types it."""
        return rekindle("rollback", *arguments, cwd=self.cluster.home.parent, **environment)

    def rest(self, version: str) -> None:
        LocalObjects(self.cluster).patch("Deployment", f"{self.name}-{version}", {"spec": {"replicas": 0}})

    def roll_back(
        self, version: str = "", seconds: float = 30, report: Callable[[Any], None] = lambda _: None, **known: Any
    ) -> dict[str, str]:
        objects = known.get("objects") or LocalObjects(self.cluster)
        return roll_back(objects, self.store, self.name, version, seconds, report)

    @property
    def state(self) -> tuple[str, str, dict[str, int], bool]:
        """The champion, the version that the Service selects, the pods of each version, whether a record is left."""
        champion, service = tracking.champion(self.name), self.kinds["Service"].read(self.name)
        objects = [self.kinds["Deployment"].read(name) or {} for name in self.kinds["Deployment"].names()]
        pods = {obj["metadata"]["name"].rpartition("-")[2]: obj["spec"]["replicas"] for obj in objects}
        serves = service["spec"]["selector"][INSTANCE].rpartition("-")[2] if service else ""
        pending = promotion.pending_rollback(self.store, self.name) is not None
        return champion.version if champion else "", serves, pods, pending


@pytest.fixture
def model(tmp_path: Path, s3: Store, mlflow_server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Model]:
    monkeypatch.setattr(promotion, "UNFINISHED_TIMEOUT_S", 0.2)
    name, cluster = f"cards-{uuid.uuid4().hex[:6]}", LocalCluster(tmp_path / ".rekindle")
    homes.make(cluster.home)
    yield Model(name, s3, cluster, cluster.kinds.controllers(cluster, cluster.home / "run"), free_port())
    cluster.down()


def test_going_back_by_hand_is_told_with_both_versions(model: Model) -> None:
    name = model.name
    for _ in range(2):
        model.release()
    with hook() as server:
        done = model.typed(name, "-o", "json", NOTIFY_URL=server.url)
        assert (done.returncode, json.loads(done.stdout)["version"]) == (0, "1"), done.stderr
        (message,) = server.received
        assert (message["event"], message["name"]) == ("rollback", name)
        assert message["text"] == "version 1 is serving again (before: version 2), by `rekindle rollback`."
        assert "/#/experiments/" in message["link"] and (tracking.find_run(name, f"{name}-1") or "-") in message["link"]
        done = model.typed(name, "2")
        assert done.returncode == 0 and "version 2 of" in done.stdout and "NOTIFY_URL is not set" in done.stderr
    assert model.state == ("2", "2", {"1": 0, "2": 1}, False)


def test_a_rollback_loses_no_request_and_what_cannot_be_is_refused(model: Model) -> None:
    for _ in range(2):
        model.release()
    wait(model.kinds, lambda _: answering(model.port, "2"), name=f"{model.name}-2")
    patient: list[str] = []
    with load(model.port) as seen:

        class Patient(LocalObjects):
            def patch(self, kind: str, name: str, change: dict[str, Any], dry_run: bool = False) -> None:
                # this server drains nothing when it is told to end
                if change["spec"] == {"replicas": 0} and not dry_run:
                    patient.append(name)
                    wait(model.kinds, lambda _: set(seen.latest.values()) == {"1"}, name=f"{model.name}-2")
                super().patch(kind, name, change, dry_run)

        found = model.roll_back(objects=Patient(model.cluster))
        assert found == {"model": model.name, "version": "1", "deployment": f"{model.name}-1", "before": "2"}
        wait(model.kinds, lambda status: not status.get("replicas"), name=f"{model.name}-2")
    assert (patient, set(seen)) == ([f"{model.name}-2"], {"1", "2"})
    assert model.state == ("1", "1", {"1": 1, "2": 0}, False)
    for version, reason in (("", "a release before version 1"), ("7", "available versions: 1, 2")):
        with pytest.raises(ConfigError, match=reason):
            model.roll_back(version)
    with pytest.raises(ConfigError, match='the model "sales" is not served here'):
        roll_back(LocalObjects(model.cluster), model.store, "sales", "", 1, lambda _: None)
    assert model.roll_back("1")["before"] == ""  # it serves already
    assert model.state == ("1", "1", {"1": 1, "2": 0}, False)


def test_a_rollback_whose_servers_do_not_start_leaves_what_serves(model: Model) -> None:
    model.release(slow=60)
    model.release()
    wait(model.kinds, lambda _: answering(model.port, "2"), name=f"{model.name}-2")
    with pytest.raises(
        RekindleError, match=r"0 of 1 pods ready after 0.5 s: the current version keeps serving.* is cancelled"
    ):
        model.roll_back("1", 0.5)
    assert answering(model.port, "2")
    assert model.state == ("2", "2", {"1": 0, "2": 1}, False)


def test_a_promotion_during_a_rollback_wins_and_is_said(model: Model) -> None:
    model.release(slow=60)
    model.release()
    failed: list[BaseException] = []

    def attempt() -> None:
        try:
            model.roll_back("1", 60)
        except ChampionChanged as error:
            failed.append(error)

    rollback = threading.Thread(target=attempt)
    rollback.start()
    deployments = model.kinds["Deployment"]
    wait(
        model.kinds,
        lambda _: (deployments.get(f"{model.name}-1") or {})["spec"]["replicas"] == 1,
        name=f"{model.name}-1",
    )
    third = tracking.register(model.name, "releases/c/", "s3://b/c", "cd" * 32, "", {}).version
    promotion.promote(model.store, model.name, third, "2", f"{model.name}-3")
    model.kinds["Deployment"].apply(model.called(release("3")))
    quick = {"spec": {"template": model.called(release("1"))["spec"]["template"]}}
    LocalObjects(model.cluster).patch("Deployment", f"{model.name}-1", quick)  # now it becomes ready
    rollback.join(60)
    assert [str(error) for error in failed] == [
        f"the rollback of {model.name} to version 1 is cancelled: by now the champion is version 3. The rollback to "
        "version 1 is cancelled, and its pods are stopped."
    ]
    assert model.state == ("3", "2", {"1": 0, "2": 1, "3": 1}, False)


def test_an_unfinished_rollback_is_finished_before_another_one_begins(model: Model) -> None:
    for _ in range(3):
        model.release()

    def broken(_: Any) -> None:
        raise OSError("the terminal is gone")

    with pytest.raises(OSError, match="terminal"):
        model.roll_back(report=broken)
    assert model.state == ("2", "2", {"1": 0, "2": 1, "3": 0}, True)
    with pytest.raises(
        ConfigError, match=f"to version 2 is unfinished: finish it with `rekindle rollback {model.name}`"
    ):
        model.roll_back("1")
    assert model.roll_back()["before"] == "3"
    assert model.state == ("2", "2", {"1": 0, "2": 1, "3": 0}, False)
    assert model.roll_back("1")["before"] == "2"
    assert model.state == ("1", "1", {"1": 1, "2": 0, "3": 0}, False)


def test_a_rollback_against_an_mlflow_that_refuses_moves_nothing(model: Model, mlflow_server: str) -> None:
    for _ in range(2):
        model.release()
    before = model.state
    with Proxy(mlflow_server, "127.0.0.7") as proxy:  # a host that it does not admit
        done = model.typed(model.name, MLFLOW_TRACKING_URI=proxy.url)
    assert done.returncode == 1 and "refused: PERMISSION_DENIED: the host is" in done.stderr, done.stderr
    assert model.state == before == ("2", "2", {"1": 0, "2": 1}, False)
    done = model.typed(model.name)
    assert done.returncode == 0 and "(before: version 2)" in done.stdout, done.stderr
    assert model.state == ("1", "1", {"1": 1, "2": 0}, False)


def test_mlflow_that_goes_in_the_middle_of_a_rollback_costs_only_one_more_command(
    model: Model, mlflow_server: str
) -> None:
    for _ in range(3):
        model.release()
    with Proxy(mlflow_server) as proxy:

        def leave(write: Any) -> None:
            proxy.away = proxy.away or write.path.endswith("/alias")

        proxy.after = leave
        done = model.typed(model.name, MLFLOW_TRACKING_URI=proxy.url, MLFLOW_HTTP_REQUEST_MAX_RETRIES="0")
        assert done.returncode == 1 and "`rekindle rollback " in done.stderr and "does not answer" in done.stderr
    for _ in range(2):
        done = model.typed(model.name, "2")
        assert done.returncode == 0, done.stderr
        assert model.state == ("2", "2", {"1": 0, "2": 1, "3": 0}, False)


def test_a_release_in_the_middle_of_an_unfinished_rollback_keeps_the_traffic(model: Model) -> None:
    """Killed after its decision: a release that was judged against it may follow, and the next command is a new one."""
    for _ in range(2):
        model.release()

    class Gone(LocalObjects):
        def patch(self, kind: str, name: str, change: dict[str, Any], dry_run: bool = False) -> None:
            if kind == "Service" and not dry_run:
                raise RekindleError("the cluster does not answer.")
            super().patch(kind, name, change, dry_run)

    with pytest.raises(RekindleError, match=r"finish it with `rekindle rollback .*`"):
        model.roll_back(objects=Gone(model.cluster))
    assert model.state == ("1", "2", {"1": 1, "2": 1}, True)
    model.release()
    assert model.state == ("3", "3", {"1": 0, "2": 1, "3": 1}, False)
    assert model.roll_back()["version"] == "2"
    assert model.state == ("2", "2", {"1": 0, "2": 1, "3": 0}, False)


def test_whoever_is_slower_at_the_service_looks_again_who_is_the_champion(model: Model) -> None:
    for _ in range(2):
        model.release()

    class Slow(LocalObjects):
        """Between its look at the champion and its change of the Service a release is promoted and switched."""

        released = ""

        def patch(self, kind: str, name: str, change: dict[str, Any], dry_run: bool = False) -> None:
            if kind == "Service" and not dry_run and not self.released:
                self.released = model.release()
            super().patch(kind, name, change, dry_run)

    with pytest.raises(ChampionChanged, match=r"version 3 of .* became the champion after version 1"):
        model.roll_back(objects=Slow(model.cluster))
    until("the new release to serve", lambda: model.state[:2] == ("3", "3"))
    assert model.state == ("3", "3", {"1": 0, "2": 1, "3": 1}, False)


class Interrupted(LocalObjects):
    """Objects whose user presses Ctrl-C when the pods have begun to start; `meanwhile` runs before they are stopped."""

    meanwhile: Callable[[], Any] = staticmethod(lambda: None)

    def patch(self, kind: str, name: str, change: dict[str, Any], dry_run: bool = False) -> None:
        if kind == "Deployment" and not dry_run and change["spec"]["replicas"] == 0:
            self.meanwhile()
        super().patch(kind, name, change, dry_run)
        if kind == "Deployment" and not dry_run and change["spec"]["replicas"]:
            raise KeyboardInterrupt


def test_a_rollback_that_is_given_up_stops_no_pods_that_another_terminal_has_sent_the_traffic_to(model: Model) -> None:
    for _ in range(2):
        model.release()
    objects = Interrupted(model.cluster)
    objects.meanwhile = lambda: model.roll_back("1")
    with pytest.raises(KeyboardInterrupt):
        model.roll_back(objects=objects)
    champion, serves, pods, pending = model.state
    assert (champion, serves, pending) == ("1", "1", False) and pods["1"] == 1


def test_a_slow_rollback_ends_no_pods_of_what_serves_by_then(model: Model) -> None:
    for _ in range(2):
        model.release()

    class Slow(LocalObjects):
        slept = False

        def patch(self, kind: str, name: str, change: dict[str, Any], dry_run: bool = False) -> None:
            if kind == "Deployment" and not dry_run and change["spec"]["replicas"] == 0 and not self.slept:
                self.slept = True
                model.release()
                model.roll_back("2")
            super().patch(kind, name, change, dry_run)

    with pytest.raises(ChampionChanged, match=r"version 2 of .* keeps the traffic"):
        model.roll_back(objects=Slow(model.cluster))
    assert model.state == ("2", "2", {"1": 0, "2": 1, "3": 0}, False)


def test_a_rollback_to_a_deployment_that_was_deleted_gives_way_to_another_version(model: Model) -> None:
    for _ in range(3):
        model.release()

    class Away(LocalObjects):
        def patch(self, kind: str, name: str, change: dict[str, Any], dry_run: bool = False) -> None:
            if kind == "Service" and not dry_run:
                raise RekindleError("the cluster is away.")
            super().patch(kind, name, change, dry_run)

    with pytest.raises(RekindleError, match="is unfinished"):
        model.roll_back("1", objects=Away(model.cluster))
    model.kinds["Deployment"].delete(f"{model.name}-1")
    with pytest.raises(ConfigError, match=r"unfinished rollback .* was deleted: name another version"):
        model.roll_back()
    assert model.roll_back("2")["version"] == "2"
    assert model.state == ("2", "2", {"2": 1, "3": 0}, False)


def test_a_promotion_that_was_interrupted_blocks_no_model_whose_version_was_deleted(model: Model) -> None:
    for _ in range(2):
        model.release()
    record = {"version": "9", "deployment": f"{model.name}-9", "former": "", "unfinished": True}
    model.store.put(f"releases/{model.name}/promotion.json", json.dumps(record).encode())
    assert model.roll_back()["version"] == "1"
    assert model.release() == "3"


def test_a_rollback_does_not_wait_for_its_own_promotion(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2):
        model.release()
    monkeypatch.setattr(promotion, "UNFINISHED_TIMEOUT_S", 1e6)
    assert model.roll_back()["version"] == "1"
