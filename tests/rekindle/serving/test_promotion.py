"""The champion is never replaced by a version that was judged against another one."""

import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from rekindle import tracking
from rekindle.serving import promotion
from rekindle.storage import Store

Register = Callable[[], str]


@pytest.fixture
def name() -> str:
    return f"cards-{uuid.uuid4().hex[:6]}"


@pytest.fixture
def register(mlflow_server: str, name: str) -> Register:
    run_id = tracking.start_run(name, name)
    return lambda: (
        tracking.register(name, f"releases/{uuid.uuid4().hex}/", "s3://b/releases/x/", "ab" * 32, run_id, {}).version
    )


def champion(name: str) -> str:
    found = tracking.champion(name)
    return found.version if found else ""


def test_of_runs_that_were_judged_against_the_same_champion_one_replaces_it(
    s3: Store, name: str, register: Register
) -> None:
    def attempt(version: str) -> bool:
        try:
            promotion.promote(s3, name, version, judged, f"cards-{version}")
        except promotion.ChampionChanged as error:
            assert f"was judged against {f'version {judged}' if judged else 'none'}, and by now" in str(error)
            return False
        return True

    for _ in range(4):
        judged, versions = champion(name), [register() for _ in range(4)]
        with ThreadPoolExecutor() as pool:
            promoted = [version for version, done in zip(versions, pool.map(attempt, versions), strict=True) if done]
        assert promoted == [champion(name)]


def test_a_retried_promotion_changes_nothing_and_still_knows_what_served_before(
    s3: Store, name: str, register: Register
) -> None:
    first, second = register(), register()
    assert promotion.promote(s3, name, first, "", "cards-1") == ""
    assert promotion.promote(s3, name, second, first, "cards-2") == "cards-1"
    assert promotion.promote(s3, name, second, first, "cards-2") == "cards-1"
    assert champion(name) == second


def test_other_servers_of_the_champion_replace_its_former_ones(s3: Store, name: str, register: Register) -> None:
    version = register()
    promotion.promote(s3, name, version, "", "cards-1")
    for _ in range(2):
        assert promotion.promote(s3, name, version, version, "cards-2") == "cards-1"
    champion = tracking.champion(name)
    assert champion and (champion.version, champion.deployment) == (version, "cards-2")


@pytest.mark.parametrize("at", [1, 2])
def test_a_promotion_that_was_killed_is_finished_by_whoever_comes_next(
    s3: Store, name: str, register: Register, at: int
) -> None:
    first, second = register(), register()
    command = """
import os, signal, sys
from rekindle import tracking
from rekindle.serving import promotion
from rekindle.storage import Store
def write(store, key, state, etag, original=promotion._write, count=[0]):
    count[0] += 1
    done = original(store, key, state, etag)
    if count[0] == int(sys.argv[3]):
        os.kill(os.getpid(), signal.SIGKILL)
    return done
promotion._write = write
promotion.promote(Store.from_env(), sys.argv[1], sys.argv[2], "", "cards-1")
"""
    killed = subprocess.run([sys.executable, "-c", command, name, first, str(at)], env=dict(os.environ))
    assert killed.returncode == -signal.SIGKILL
    with pytest.raises(promotion.ChampionChanged, match=f"by now the champion is version {first}"):
        promotion.promote(s3, name, second, "", "cards-2")
    assert champion(name) == first
    assert not json.loads(s3.get(f"releases/{name}/promotion.json"))["unfinished"]


def test_a_champion_that_somebody_set_by_hand_counts(s3: Store, name: str, register: Register) -> None:
    first, second, third = register(), register(), register()
    promotion.promote(s3, name, first, "", "cards-1")
    promotion.promote(s3, name, second, first, "cards-2")
    tracking.promote(name, first, "cards-1")
    with pytest.raises(promotion.ChampionChanged):
        promotion.promote(s3, name, third, second, "cards-3")
    assert promotion.promote(s3, name, third, first, "cards-3") == "cards-1"


def test_the_deployments_of_the_newest_releases_stay_for_a_rollback(s3: Store, name: str, register: Register) -> None:
    versions = [register() for _ in range(5)]
    before = ""
    for version in versions:
        promotion.promote(s3, name, version, before, f"cards-{version}")
        before = version
    assert promotion.expired(name, versions[-1], keep=2) == [f"cards-{version}" for version in versions[:2]]
    assert promotion.expired(name, versions[1], keep=2) == []
