"""A version that was compared with another champion never replaces the current champion."""

import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from rekindle import tracking
from rekindle.errors import StorageError, TrackingError
from rekindle.mlflow_api import RequestRefused
from rekindle.release import promotion
from rekindle.storage import Store

Register = Callable[[], str]


@pytest.fixture
def name() -> str:
    return f"cards-{uuid.uuid4().hex[:6]}"


@pytest.fixture
def register(mlflow_server: str, name: str) -> Register:
    run_id = tracking.start_run(name, name)
    return lambda: (
        tracking.register_version(
            name, f"releases/{uuid.uuid4().hex}/", "s3://b/releases/x/", "ab" * 32, run_id, {}
        ).version
    )


def find_champion(name: str) -> str:
    release = tracking.champion(name)
    if release:
        return release.version
    return ""


@pytest.mark.slow
def test_only_one_of_the_runs_that_were_compared_with_a_champion_replaces_it(
    s3: Store, name: str, register: Register
) -> None:
    def attempt(version: str) -> bool:
        try:
            promotion.promote(s3, name, version, current, f"cards-{version}")
        except promotion.ChampionChangedError as error:
            assert (
                f"was compared with {f'version {current}' if current else 'none'}, but by now"
                in str(error)
            )
            return False
        return True

    for _ in range(4):
        current = find_champion(name)
        versions = [register() for _ in range(4)]
        with ThreadPoolExecutor() as pool:
            promoted = [
                version
                for version, done in zip(versions, pool.map(attempt, versions), strict=True)
                if done
            ]

        assert promoted == [find_champion(name)]


def test_a_retried_promotion_changes_nothing_and_returns_the_previous_deployment(
    s3: Store, name: str, register: Register
) -> None:
    first_version = register()
    second_version = register()
    assert promotion.promote(s3, name, first_version, "", "cards-1") == ""
    assert promotion.promote(s3, name, second_version, first_version, "cards-2") == "cards-1"
    assert promotion.promote(s3, name, second_version, first_version, "cards-2") == "cards-1"
    assert find_champion(name) == second_version


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("run_id", ["", "0123456789abcdef0123456789abcdef", "cards/cards-x7k2p"])
def test_a_promotion_is_read_again_for_every_form_of_its_run(
    s3: Store, name: str, register: Register, run_id: str
) -> None:
    """The record of the promotion names a run whose dataset is cached as EXPERIMENT/WORKFLOW."""
    version = register()
    promotion.promote(s3, name, version, "", "cards-1", run_id)
    promotion.promote(s3, name, version, "", "cards-1", run_id)
    assert find_champion(name) == version


def test_a_new_deployment_of_the_champion_replaces_its_old_one(
    s3: Store, name: str, register: Register
) -> None:
    version = register()
    promotion.promote(s3, name, version, "", "cards-1")
    for _ in range(2):
        assert promotion.promote(s3, name, version, version, "cards-2") == "cards-1"

    champion = tracking.champion(name)
    assert champion
    assert champion.version == version
    assert champion.deployment == "cards-2"
    assert promotion.list_expired_deployments(
        name, version, keep_count=3, previous_deployment="cards-1"
    ) == ["cards-1"]
    second_version = register()
    previous = promotion.promote(s3, name, second_version, version, "cards-3")
    assert previous == "cards-2"
    assert (
        promotion.list_expired_deployments(
            name, second_version, keep_count=3, previous_deployment=previous
        )
        == []
    )


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("write_number", [1, 2])
def test_the_next_run_finishes_a_promotion_that_was_killed(
    s3: Store, name: str, register: Register, write_number: int
) -> None:
    first_version = register()
    second_version = register()

    command = """
import os, signal, sys
from rekindle import tracking
from rekindle.release import promotion
from rekindle.storage import Store
def write(store, key, state, etag, original=promotion._write_promotion, count=[0]):
    count[0] += 1
    done = original(store, key, state, etag)
    if count[0] == int(sys.argv[3]):
        os.kill(os.getpid(), signal.SIGKILL)
    return done
promotion._write_promotion = write
promotion.promote(Store.from_env(), sys.argv[1], sys.argv[2], "", "cards-1")
"""

    process = subprocess.run(
        [sys.executable, "-c", command, name, first_version, str(write_number)],
        env=dict(os.environ),
    )
    assert process.returncode == -signal.SIGKILL

    with pytest.raises(
        promotion.ChampionChangedError, match=f"by now the champion is version {first_version}"
    ) as changed:
        promotion.promote(s3, name, second_version, "", "cards-2")

    assert changed.value.exit_code == 65, "a retry cannot help"
    assert find_champion(name) == first_version
    assert not json.loads(s3.get(f"releases/{name}/promotion.json"))["unfinished"]


@pytest.mark.slow
def test_a_promotion_respects_a_champion_that_was_set_by_hand(
    s3: Store, name: str, register: Register
) -> None:
    first_version = register()
    second_version = register()
    third_version = register()
    promotion.promote(s3, name, first_version, "", "cards-1")
    promotion.promote(s3, name, second_version, first_version, "cards-2")
    tracking.record_champion(name, first_version, "cards-1")
    with pytest.raises(promotion.ChampionChangedError):
        promotion.promote(s3, name, third_version, second_version, "cards-3")
    assert promotion.promote(s3, name, third_version, first_version, "cards-3") == "cards-1"


@pytest.mark.slow
def test_the_deployments_of_the_newest_releases_are_kept_for_a_rollback(
    s3: Store, name: str, register: Register
) -> None:
    versions = [register() for _ in range(5)]
    for previous, version in zip(["", *versions], versions, strict=False):
        promotion.promote(s3, name, version, previous, f"cards-{version}")
    assert promotion.list_expired_deployments(name, versions[-1], keep_count=2) == [
        f"cards-{version}" for version in versions[:2]
    ]
    assert promotion.list_expired_deployments(name, versions[1], keep_count=2) == []


@pytest.fixture
def versions(s3: Store, name: str, register: Register) -> list[str]:
    """Register three versions; the second version is the champion, which has replaced the first
    version."""
    first_version = register()
    second_version = register()
    third_version = register()
    promotion.promote(s3, name, first_version, "", "cards-1")
    promotion.promote(s3, name, second_version, first_version, "cards-2")
    return [first_version, second_version, third_version]


def test_a_rollback_is_recorded_decided_and_removed(
    s3: Store, name: str, versions: list[str]
) -> None:
    first_version, second_version, _ = versions
    assert promotion.read_pending_rollback(s3, name) is None
    rollback = promotion.Rollback(first_version, "cards-1", second_version, 3)
    promotion.record_rollback(s3, name, rollback)
    assert promotion.read_pending_rollback(s3, name) == rollback
    assert find_champion(name) == second_version

    with pytest.raises(promotion.ChampionChangedError, match=f"another command is changing {name}"):
        promotion.record_rollback(s3, name, rollback)

    for _ in range(2):
        promotion.decide_rollback(s3, name, rollback)
        assert find_champion(name) == first_version
        assert promotion.read_pending_rollback(s3, name) == replace(rollback, decided=True)

    assert promotion.promote(s3, name, first_version, second_version, "cards-1") == "cards-2", (
        "its servers must be stopped"
    )
    assert not promotion.end_rollback(s3, name, rollback, includes_decided=False), (
        "a decided rollback cannot be cancelled"
    )
    assert promotion.read_pending_rollback(s3, name)
    assert promotion.end_rollback(s3, name, rollback)
    assert promotion.read_pending_rollback(s3, name) is None
    assert promotion.end_rollback(s3, name, rollback)
    # the rollback was decided by a command that had lost its connection
    promotion.decide_rollback(s3, name, rollback)
    assert find_champion(name) == first_version
    assert promotion.read_pending_rollback(s3, name) is None


def test_a_rollback_that_is_not_decided_can_be_cancelled(
    s3: Store, name: str, versions: list[str]
) -> None:
    rollback = promotion.Rollback(versions[0], "cards-1", versions[1], 1)
    promotion.record_rollback(s3, name, rollback)
    for other in (replace(rollback, version=versions[2]), replace(rollback, champion=versions[2])):
        assert promotion.end_rollback(s3, name, other)
        assert promotion.read_pending_rollback(s3, name) == rollback, (
            "it belongs to another command"
        )
    assert promotion.end_rollback(s3, name, rollback, includes_decided=False)
    assert promotion.read_pending_rollback(s3, name) is None
    assert find_champion(name) == versions[1]


def test_a_rollback_can_restart_the_servers_of_the_champion(
    s3: Store, name: str, versions: list[str]
) -> None:
    rollback = promotion.Rollback(versions[1], "cards-2", versions[1], 0)
    promotion.record_rollback(s3, name, rollback)
    promotion.decide_rollback(s3, name, rollback)
    assert promotion.read_pending_rollback(s3, name) == replace(rollback, decided=True)
    assert promotion.promote(s3, name, versions[1], versions[0], "cards-2") == "", (
        "no other Deployment served"
    )


def test_a_promotion_overrides_a_rollback_that_is_not_decided(
    s3: Store, name: str, versions: list[str]
) -> None:
    first_version, second_version, third_version = versions
    rollback = promotion.Rollback(first_version, "cards-1", second_version, 1)
    promotion.record_rollback(s3, name, rollback)
    assert promotion.promote(s3, name, third_version, second_version, "cards-3") == "cards-2"
    assert promotion.read_pending_rollback(s3, name) is None
    with pytest.raises(
        promotion.ChampionChangedError,
        match=f"cancelled: by now the champion is version {third_version}.",
    ):
        promotion.decide_rollback(s3, name, rollback)
    assert find_champion(name) == third_version


def test_nothing_overrides_a_decided_rollback(s3: Store, name: str, versions: list[str]) -> None:
    first_version, second_version, third_version = versions
    rollback = promotion.Rollback(first_version, "cards-1", second_version, 1)
    promotion.record_rollback(s3, name, rollback)

    for other in (replace(rollback, replicas=2), replace(rollback, deployment="cards-3")):
        with pytest.raises(
            promotion.ChampionChangedError,
            match=f"by now the champion is version {second_version}.",
        ):
            promotion.decide_rollback(s3, name, other)

    promotion.decide_rollback(s3, name, rollback)
    with pytest.raises(
        promotion.ChampionChangedError,
        match=f"the champion is version {first_version}: version .* is not promoted",
    ):
        promotion.promote(s3, name, third_version, second_version, "cards-3")

    assert promotion.read_pending_rollback(s3, name) == replace(rollback, decided=True)
    tracking.record_champion(name, third_version, "cards-3")  # by hand
    with pytest.raises(promotion.ChampionChangedError):
        promotion.decide_rollback(s3, name, rollback)

    assert find_champion(name) == third_version


def test_a_champion_that_was_set_by_hand_ends_a_rollback(
    s3: Store, name: str, versions: list[str]
) -> None:
    rollback = promotion.Rollback(versions[0], "cards-1", versions[1], 1)
    promotion.record_rollback(s3, name, rollback)
    tracking.record_champion(name, versions[2], "cards-3")
    with pytest.raises(promotion.ChampionChangedError):
        promotion.decide_rollback(s3, name, rollback)
    assert find_champion(name) == versions[2]


def test_a_superseded_promotion_changes_nothing(s3: Store, name: str, versions: list[str]) -> None:
    first_version, second_version, third_version = versions
    assert promotion.is_superseded(name, first_version, "", "cards-1")
    assert not promotion.is_superseded(name, first_version, second_version, "cards-1"), (
        "it was compared with the champion"
    )
    assert not promotion.is_superseded(name, second_version, first_version, "cards-2"), (
        "it is the champion"
    )
    assert not promotion.is_superseded(name, third_version, first_version, "cards-3"), (
        "it was never promoted"
    )
    assert not promotion.is_superseded(name, first_version, "", "cards-9"), (
        "this Deployment was never promoted"
    )
    assert promotion.promote(s3, name, first_version, "", "cards-1") == ""
    assert find_champion(name) == second_version
    promotion.promote(s3, name, third_version, second_version, "cards-3", "run-3")
    promotion.promote(s3, name, second_version, third_version, "cards-2", "run-2")
    assert promotion.is_superseded(name, third_version, first_version, "cards-3", "run-3")
    assert promotion.is_superseded(name, third_version, second_version, "cards-3", "run-3"), (
        "its promotion was rolled back"
    )
    assert not promotion.is_superseded(name, third_version, first_version, "cards-3", "run-4"), (
        "another run promoted it"
    )
    assert promotion.is_superseded("unknown", first_version, "", "cards-1") is False


def test_an_unfinished_promotion_of_a_deleted_version_is_discarded(
    s3: Store,
    name: str,
    register: Register,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(promotion, "UNFINISHED_TIMEOUT_S", 0.0)
    version = register()
    record = {"version": "99", "deployment": "cards-99", "former": "", "unfinished": True}
    s3.put(f"releases/{name}/promotion.json", json.dumps(record).encode())
    assert promotion.promote(s3, name, version, "", "cards-1") == ""
    assert f"version 99 of {name} was deleted" in capsys.readouterr().err
    assert find_champion(name) == version
    s3.put(f"releases/{name}/promotion.json", json.dumps(record).encode())
    with pytest.raises(RequestRefused):
        promotion.promote(s3, name, "99", version, "cards-99")


def test_a_release_retains_the_newest_deployments(
    s3: Store, name: str, versions: list[str]
) -> None:
    _, second_version, third_version = versions
    # promote the version with the Deployment of the second version
    promotion.promote(s3, name, third_version, second_version, "cards-2")
    assert promotion.list_expired_deployments(name, third_version, keep_count=1) == ["cards-1"]
    assert promotion.list_running_deployments(name, third_version, keep_count=1) == ["cards-2"]
    assert promotion.list_expired_deployments(name, third_version, keep_count=2) == []
    assert promotion.list_running_deployments(name, second_version, keep_count=1) == [
        "cards-1",
        "cards-2",
    ]
    assert promotion.list_running_deployments(
        name, second_version, 1, previous_deployment="cards-9"
    ) == [
        "cards-9",
        "cards-1",
        "cards-2",
    ]


def test_a_write_succeeds_although_its_answer_was_lost(s3: Store, name: str) -> None:
    key = f"releases/{name}/promotion.json"
    assert promotion._write_promotion(s3, key, {"version": "1"}, None)
    assert promotion._write_promotion(s3, key, {"version": "1"}, None)
    assert not promotion._write_promotion(s3, key, {"version": "2"}, None)
    _, etag = s3.get_with_etag(key)
    assert promotion._write_promotion(s3, key, {"version": "2"}, etag)
    assert not promotion._write_promotion(s3, key, {"version": "3"}, etag)


def test_an_unavailable_service_is_retried_once_a_second_until_the_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [100.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(promotion, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    answers: list[Any] = [
        StorageError("s3 is unavailable"),
        TrackingError("MLflow is unavailable"),
        "yes",
    ]

    def call() -> str:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    assert promotion.retry_while_unavailable(call, deadline_seconds=102.0) == "yes"
    assert now == [102.0]
    answers = [StorageError("s3 is unavailable")] * 9
    with pytest.raises(StorageError):
        promotion.retry_while_unavailable(call, deadline_seconds=104.0)

    assert now == [105.0]
    assert len(answers) == 5


def test_a_rollback_waits_two_seconds_for_a_promotion_and_then_finishes_it(
    s3: Store, name: str, register: Register, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    version = register()

    def sleep(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(promotion, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    record = {"version": version, "deployment": "cards-1", "former": "", "unfinished": True}
    s3.put(f"releases/{name}/promotion.json", json.dumps(record).encode())
    assert promotion.read_pending_rollback(s3, name) is None
    assert find_champion(name) == version
    assert now == [pytest.approx(102.0, abs=0.06)]
    assert json.loads(s3.get(f"releases/{name}/promotion.json")) == record | {"unfinished": False}


def test_a_process_that_paused_between_its_writes_does_not_restore_its_version(
    s3: Store, name: str, register: Register
) -> None:
    first_version = register()
    second_version = register()
    key = f"releases/{name}/promotion.json"
    state = {"version": first_version, "deployment": "cards-1", "former": "", "unfinished": True}
    s3.put(key, json.dumps(state).encode())
    _, etag = s3.get_with_etag(key)
    # a retry of the step finishes the promotion
    assert promotion.promote(s3, name, first_version, "", "cards-1") == ""
    assert promotion.promote(s3, name, second_version, first_version, "cards-2") == "cards-1"
    promotion._finish_promotion(s3, name, key, state, etag)
    assert find_champion(name) == second_version
