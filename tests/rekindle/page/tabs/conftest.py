"""Fixtures: a home (directory of runs) with trainings, a sweep, a backfill and a canary, and the
page of this home."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from argolocal.common.json_text import to_json
from rekindle.local.cluster import LocalCluster
from rekindle.storage import Store
from tests.browser import PageServer, start_page
from tests.rekindle.page.tabs.recorded_runs import (
    MARKUP,
    VERDICT,
    make_evaluation_node,
    make_pod_node,
    record_events,
    record_metrics,
    record_run,
)
from tests.steps.finished_training import COMPLETE, EVENTS

CONFIG = {
    "name": "power",
    "train": {"learning_rate": 0.01, "epochs": 3},
    "cluster": {"image": "power:1"},
}
CHANGED_CONFIG = {**CONFIG, "train": {"learning_rate": 0.02, "epochs": 3}}
SWEEP = {
    "space": {"train": {"learning_rate": {"low": 0.001, "high": 0.1}}},
    "trials": 4,
    "rungs": 2,
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A home (directory of runs) whose services are stopped."""
    home = tmp_path_factory.mktemp("page") / "home"
    cluster = LocalCluster(home)
    store = cluster.store()
    cluster.services.start("s3")

    record_trainings(home, store)
    record_sweep(home, store)
    record_backfill(home)
    record_canary(home)

    cluster.services.down()
    yield home


def record_trainings(home: Path, store: Store) -> None:
    """Record three runs: a successful run, a run with changed settings and a worse model, and a
    failed run."""
    cached_parameter = {"prepare": {"task": "prepare", "at": "power-aaaaa/prepare"}, "reuse": "yes"}
    runs = (
        ("power-aaaaa", CONFIG, {"git_sha": "1" * 40}),
        ("power-bbbbb", CHANGED_CONFIG, {"git_sha": "2" * 40, "cached": to_json(cached_parameter)}),
    )
    for name, config, parameters in runs:
        nodes = [make_evaluation_node(name, VERDICT)]
        record_run(home, name, config, nodes, trainings=["train"], **parameters)
        events = [event for event in [*EVENTS, COMPLETE]]
        record_events(store, name, "train", events)
        store.put(f"{name}/evaluate/report/verdict.json", to_json(VERDICT).encode())
        losses = [(step, 1 / step) for step in range(1, 41)]
        record_metrics(home, name, {"train/loss": losses, f"train/{MARKUP}": losses})


def record_sweep(home: Path, store: Store) -> None:
    """Record a sweep with three trials: one trial is complete, one trial has failed, and one trial
    was stopped early."""
    record_run(home, "search-ccccc", {"name": "search", "sweep": SWEEP})
    jobs = [(0, 0), (1, 0), (2, 0), (1, 1)]
    for number, (trial, rung) in enumerate(jobs):
        decision = {"trial": trial, "rung": rung, "pod": 0}
        if rung == 0:
            decision |= {"settings": {"train.learning_rate": 0.01 * (trial + 1)}, "attrs": {}}
        prefix = "search-ccccc/search"
        store.put(f"{prefix}/jobs/{number:05d}.json", to_json(decision).encode())
        output = f"{prefix}/trials/{trial}/rung-{rung}"
        if trial == 2:
            failure = {"value": None, "why": f"the loss is NaN {MARKUP}"}
            store.put(f"{output}/failed.json", to_json(failure).encode())
            continue
        measured = {"step": 10, "loss": 0.5 - 0.1 * trial - 0.1 * rung}
        store.put(f"{output}/validation.json", to_json(measured).encode())
        model = {"step": 10 * (1 + rung), "sha256": str(trial)}
        store.put(f"{output}/model.json", to_json(model).encode())


def record_backfill(home: Path) -> None:
    """Record two weeks of a backfill, and a run of the same pipeline that does not belong to the
    backfill."""
    for number, verdict in enumerate(("release", "keep")):
        outputs = {
            "verdict": "keep",
            "judged": verdict,
            "reason": "a past week is not released",
            "metrics": to_json({"rmse": 2.0 + number}),
            "champion": "",
        }
        name = f"weekly-{number}-abc"
        record_run(
            home,
            name,
            {"name": "weekly"},
            [make_pod_node(name, "evaluate", outputs=outputs)],
            **{
                "backfill": "true",
                "scheduled-time": f"2026-01-{5 + 7 * number:02d}T03:00:00Z",
                "manifest_hash": "abcdef",
            },
        )
    record_run(home, "weekly-x-abc", {"name": "weekly"}, manifest_hash="abc123")


def record_canary(home: Path) -> None:
    """Record a canary that was rolled back at 25 % of the traffic."""
    name = "served-ddddd"
    rule = {"steps": [5, 25, 100], "requests": 100}
    inputs = {"rule": "{}", "former": "old", "version": "4", "champion": "3"}
    reason = f"taken back: version 4 with 25 % of the requests, versus 3: 9 of 100 failed {MARKUP}"
    outcomes = (("0", "passed"), ("5", "passed"), ("25", reason))
    nodes = [
        make_pod_node(
            name,
            f"watch-{percent}",
            inputs={**inputs, "percent": percent},
            outputs={"canary": outcome, "percent": "0"},
            startedAt=f"2026-03-01T00:0{number}:00.000Z",
            finishedAt=f"2026-03-01T00:0{number}:50.000Z",
        )
        for number, (percent, outcome) in enumerate(outcomes)
    ]
    record_run(home, name, {"name": "served", "serve": {"canary": rule}}, nodes)
    figures = {"candidate.requests": 100, "champion.requests": 300, "candidate.errors": 9}
    record_metrics(
        home, name, {f"canary.25.{figure}": [(0, value)] for figure, value in figures.items()}
    )


@pytest.fixture(scope="module")
def page(home: Path) -> Iterator[PageServer]:
    with start_page(home, "rekindle") as server:
        yield server
