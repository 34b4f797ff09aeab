"""Two drift checks of one model at the same time together count every request exactly once, and
start one training."""

import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from rekindle import tracking
from rekindle.documents import read_object
from rekindle.release import promotion
from rekindle.release.serve_config import DriftConfig
from rekindle.release.watch import drift
from rekindle.storage import Store
from tests.http_server import Answer, HttpServer, Request


class InterruptedStore(Store):
    """A store in which another process acts between the first read and the first write."""

    interruption: Callable[[], object] | None = None

    def put(self, *arguments: Any, **conditions: Any) -> str:
        if self.interruption:
            act = self.interruption
            self.interruption = None
            act()
        return super().put(*arguments, **conditions)


@pytest.fixture
def interrupted(s3: Store) -> InterruptedStore:
    store = InterruptedStore.from_env()
    assert isinstance(store, InterruptedStore)
    return store


@contextmanager
def served_champion(store: Store, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, str]]:
    """Yield the name and the version of a champion whose server has answered 7 instances."""
    name = f"drift-{uuid.uuid4().hex[:6]}"
    prefix = f"releases/{name}/{'0' * 12}/"
    run_id = tracking.start_run(name, name)
    version = tracking.register_version(
        name, prefix, store.uri(prefix), "0" * 64, run_id, {}
    ).version
    promotion.promote(store, name, version, "", f"{name}-1")

    page = (
        "process_start_time_seconds 1\nrekindle_instances_sum 7\n"
        f'rekindle_requests_total{{version="{version}",status="200"}} 7\n'
    )

    def answer(_: Request) -> Answer:
        return Answer(200, page)

    with HttpServer(answer) as server:
        variable = f"{name}-1".upper().replace("-", "_")
        monkeypatch.setenv(f"{variable}_SERVICE_HOST", "127.0.0.1")
        monkeypatch.setenv(f"{variable}_SERVICE_PORT", str(server.port))
        yield name, version


def test_only_one_of_two_concurrent_checks_starts_a_training(
    interrupted: InterruptedStore, s3: Store, mlflow_server: str
) -> None:
    config = DriftConfig.model_validate({"model": f"m-{uuid.uuid4().hex[:6]}"})
    days = []
    interrupted.interruption = lambda: days.append(drift.claim_retraining(s3, config, "other"))
    days.append(drift.claim_retraining(interrupted, config, "first"))
    assert days[0] == 0
    assert days[1] > 0


def test_a_promotion_does_not_forget_a_training_that_a_check_has_started_meanwhile(
    interrupted: InterruptedStore, s3: Store, mlflow_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served_champion(s3, monkeypatch) as (name, version):
        config = DriftConfig.model_validate({"model": name, "min_days_between": 0})
        interrupted.interruption = lambda: drift.claim_retraining(s3, config, "other")
        drift.reset_counts(interrupted, name, version)

    state = read_object(drift.DriftState, s3, f"releases/{name}/drift.json")
    assert state.retrained_by == "other"
    assert [counts.rows for counts in state.seen.values()] == [7]
