"""Served scores are the offline scores, and a request that cannot be scored says why."""

import json
import random
import shutil
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from rekindle.errors import DataError
from rekindle.gate import Gate
from steps import fraud
from steps.fraud.replays import replay
from steps.fraud.scoring import FraudScorer

CLOSE = 1e-5
ROW = {"transaction_id": 1, "time": "2024-03-20T12:00:00", "card": 5, "terminal": 6, "amount": 3.5}


@pytest.fixture(scope="module")
def report(small_dataset: Path, expert: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report")
    fraud.evaluate(expert, None, small_dataset, path, Gate())
    return path


@pytest.fixture(scope="module")
def scorer(small_dataset: Path, expert: Path, tmp_path_factory: pytest.TempPathFactory) -> FraudScorer:
    release = tmp_path_factory.mktemp("release")
    shutil.copytree(expert, release, dirs_exist_ok=True)
    shutil.copytree(small_dataset / "state", release / "state")
    loaded = FraudScorer(release)
    loaded.score(loaded.example())
    return loaded


Requests = list[tuple[dict[str, Any], list[float]]]


@pytest.fixture(scope="module")
def requests(small_dataset: Path, report: Path) -> Requests:
    return list(replay(small_dataset, report, 60, 1, 1000, 100_000))


def scores(scorer: FraudScorer, request: dict[str, Any]) -> list[float]:
    return [s["score"] for s in scorer.score(json.loads(json.dumps(request)))]


def test_a_server_gives_every_transaction_its_offline_score(scorer: FraudScorer, requests: Requests) -> None:
    for request, expected in requests:
        assert scores(scorer, request) == pytest.approx(expected, abs=CLOSE)


def test_a_replay_covers_every_week_and_frauds(report: Path, requests: Requests) -> None:
    offline = pl.read_parquet(report / "scores.parquet")
    ids = [row["transaction_id"] for request, _ in requests for row in request["transactions"]]
    chosen = offline.filter(pl.col("id").is_in(ids))
    assert len(chosen) == len(ids) == 60
    counts = chosen.group_by("week").agg(pl.len(), pl.col("label").sum())
    there = offline.group_by("week").agg(frauds=pl.col("label").sum())
    for _, rows, frauds, known in counts.join(there, on="week").iter_rows():
        assert (rows, frauds) == (30, min(15, known))


def test_the_replay_would_notice_a_server_without_history(scorer: FraudScorer, requests: Requests) -> None:
    off = [
        abs(a - b)
        for request, expected in requests
        for a, b in zip(scores(scorer, request | {"history": []}), expected, strict=True)
    ]
    assert max(off) > 100 * CLOSE


def test_the_order_of_rows_in_a_request_does_not_matter(scorer: FraudScorer, requests: Requests) -> None:
    request, expected = requests[0]
    order = random.Random(3)
    history = order.sample(request["history"], len(request["history"]))
    places = order.sample(range(len(expected)), len(expected))
    shuffled = {"transactions": [request["transactions"][p] for p in places], "history": history}
    assert scores(scorer, shuffled) == pytest.approx([expected[p] for p in places], abs=CLOSE)


def test_a_label_younger_than_the_delay_changes_nothing(scorer: FraudScorer, requests: Requests) -> None:
    request, expected = requests[-1]
    first = min(datetime.fromisoformat(row["time"]) for row in request["transactions"])
    young, old = 0, 0
    changed = []
    for row in request["history"]:
        is_young = datetime.fromisoformat(row["time"]) > first - timedelta(days=7)
        young, old = young + is_young, old + (not is_young)
        changed.append(row | {"fraud": 1} if is_young else row)
    assert young and old
    first_only = [n for n, row in enumerate(request["transactions"]) if datetime.fromisoformat(row["time"]) == first]
    got = scores(scorer, {"transactions": request["transactions"], "history": changed})
    assert [got[n] for n in first_only] == pytest.approx([expected[n] for n in first_only], abs=CLOSE)


def test_a_transaction_is_scored_alike_alone_and_among_others(scorer: FraudScorer) -> None:
    others = [ROW | {"transaction_id": n, "card": n, "terminal": 100 + n, "amount": n} for n in range(20, 60)]
    alone, among = scores(scorer, {"transactions": [ROW]}), scores(scorer, {"transactions": [*others, ROW]})
    assert among[-1] == pytest.approx(alone[0], abs=CLOSE)


def test_ids_may_be_text_and_come_back_as_they_were(scorer: FraudScorer) -> None:
    row = ROW | {"transaction_id": "tx-9", "card": " 5", "terminal": "6", "time": "2024-03-20T13:00:00+01:00"}
    answer = scorer.score({"transactions": [row]})
    assert answer[0]["transaction_id"] == "tx-9"
    assert answer[0]["score"] == scorer.score({"transactions": [ROW]})[0]["score"]


def test_a_request_that_needs_too_much_history_is_left_out_of_the_replay(small_dataset: Path, report: Path) -> None:
    requests = list(replay(small_dataset, report, 60, 1, 7, 400))
    assert 0 < sum(len(r["transactions"]) for r, _ in requests) < 60
    assert max(len(r["history"]) for r, _ in requests) <= 400
    assert max(len(r["transactions"]) for r, _ in requests) <= 7


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"amount": -5}, r"transactions\[1\].amount is -5: it must be a number from 0 to 1,000,000,000"),
        ({"amount": float("nan")}, "amount is nan"),
        ({"amount": "12"}, "amount is '12'"),
        ({"amount": True}, "amount is True"),
        ({"time": "yesterday"}, r"transactions\[1\].time is 'yesterday': it must be ISO 8601"),
        ({"time": 1710936000}, "time is 1710936000"),
        ({"time": "2020-01-01"}, "older than the state of this model"),
        ({"card": 1.5}, "card is 1.5: it must be a whole number"),
        ({"card": None}, "card is None"),
        ({"card": 1 << 63}, "card is 9223372036854775808"),
        ({"terminal": "  "}, "terminal is '  '"),
        ({"terminal": ["x" * 100]}, r"terminal is \['x+\.\.\.:"),
        ({"transaction_id": 1}, r"transactions\[1\].transaction_id is 1: it must be unique"),
        ({"fraud": 1}, r'transactions\[1\] has "fraud", which is not known'),
        ({"ammount": 1}, 'has "ammount", which is not known. Did you mean "amount"'),
    ],
)
def test_a_wrong_value_is_named_with_its_place_and_rule(scorer: FraudScorer, change: dict[str, Any], says: str) -> None:
    with pytest.raises(DataError, match=says):
        scorer.score({"transactions": [ROW, ROW | {"transaction_id": 2} | change]})


def test_what_is_missing_or_no_object_is_named(scorer: FraudScorer) -> None:
    for row, says in [
        ({k: v for k, v in ROW.items() if k != "card"}, r"transactions\[0\].card is missing: it must be"),
        (7, r"transactions\[0\] is 7: it must be an object with transaction_id, time"),
    ]:
        with pytest.raises(DataError, match=says):
            scorer.score({"transactions": [row]})
    with pytest.raises(DataError, match=r"history\[0\].fraud is 2: it must be 1 or 0"):
        scorer.score({"transactions": [ROW], "history": [ROW | {"transaction_id": 5, "fraud": 2}]})
