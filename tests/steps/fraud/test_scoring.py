"""Served scores equal offline scores, and invalid requests give clear errors."""

import json
import random
import re
import shutil
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from rekindle.errors import DataError
from rekindle.gate import Gate
from rekindle.release.evaluation import evaluate
from rekindle.release.request_validation import parse_body
from rekindle.serving.model_process import answer_batch
from steps import fraud
from steps.fraud.data.transactions import format_instant
from steps.fraud.replays import replay
from steps.fraud.scoring import FraudPredictor

CLOSE = 1e-5
ROW = {"transaction_id": 1, "time": "2024-03-20T12:00:00", "card": 5, "terminal": 6, "amount": 3.5}


@pytest.fixture(scope="module")
def report(small_dataset: Path, expert: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report")
    evaluate(fraud, expert, None, small_dataset, path, Gate())
    return path


@pytest.fixture(scope="module")
def predictor(
    small_dataset: Path, expert: Path, tmp_path_factory: pytest.TempPathFactory
) -> FraudPredictor:
    release = tmp_path_factory.mktemp("release")
    shutil.copytree(expert, release, dirs_exist_ok=True)
    loaded = FraudPredictor(release)
    predict_scores(loaded, loaded.example())
    return loaded


Requests = list[tuple[dict[str, Any], list[float]]]


@pytest.fixture(scope="module")
def requests(small_dataset: Path, report: Path) -> Requests:
    return list(replay(small_dataset, report, 60, 1))


def predict_scores(predictor: FraudPredictor, *requests: dict[str, Any]) -> list[float]:
    """Return the scores of requests that are predicted together."""
    parsed = [parse_body(predictor.Request, json.dumps(request).encode()) for request in requests]
    return [score for prediction in predictor.predict(parsed) for score in prediction]


def test_served_scores_equal_offline_scores(predictor: FraudPredictor, requests: Requests) -> None:
    for request, expected in requests:
        assert predict_scores(predictor, request) == pytest.approx(expected, abs=CLOSE)


def test_a_replay_covers_every_week_and_frauds(report: Path, requests: Requests) -> None:
    offline = pl.read_parquet(report / "scores.parquet")
    ids = [row["transaction_id"] for request, _ in requests for row in request["instances"]]
    chosen = offline.filter(pl.col("id").is_in(ids))
    assert len(chosen) == len(ids) == 60
    counts = chosen.group_by("week").agg(pl.len(), pl.col("label").sum())
    available = offline.group_by("week").agg(frauds=pl.col("label").sum())
    for _, rows, frauds, total in counts.join(available, on="week").iter_rows():
        assert rows == 30
        assert frauds == min(15, total)


def test_the_replay_detects_a_server_without_history(
    predictor: FraudPredictor, requests: Requests
) -> None:
    differences = [
        abs(a - b)
        for request, expected in requests
        for a, b in zip(predict_scores(predictor, request | {"history": []}), expected, strict=True)
    ]
    assert max(differences) > 100 * CLOSE


def test_a_request_without_history_is_answered_with_a_warning(
    predictor: FraudPredictor, requests: Requests
) -> None:
    request, _ = requests[-1]
    # these payments are already part of the serving state
    old_history = [row | {"time": "2024-01-09T00:00:00"} for row in request["history"][:3]]
    bodies = [
        request,
        request | {"history": []},
        request | {"history": old_history},
        predictor.example(),
    ]
    answers = answer_batch(predictor, [json.dumps(body).encode() for body in bodies], 1000).answers
    assert [answer.warned for answer in answers] == [False, True, True, False]
    contents = [json.loads(answer.body) for answer in answers]
    end = format_instant(predictor.state.train_end)

    for content in contents[1:3]:
        assert re.search(
            f"the history is missing: .* until {end} UTC, [1-3][0-9].[0-9] days before",
            content["warning"],
        )
        assert len(content["predictions"]) == len(request["instances"])


def test_the_order_of_rows_in_a_request_does_not_matter(
    predictor: FraudPredictor, requests: Requests
) -> None:
    request, expected = requests[0]
    order = random.Random(3)
    history = order.sample(request["history"], len(request["history"]))
    places = order.sample(range(len(expected)), len(expected))
    shuffled = {"instances": [request["instances"][p] for p in places], "history": history}
    assert predict_scores(predictor, shuffled) == pytest.approx(
        [expected[p] for p in places], abs=CLOSE
    )


def test_a_label_within_the_delay_changes_nothing(
    predictor: FraudPredictor, requests: Requests
) -> None:
    request, expected = requests[-1]
    first_time = min(datetime.fromisoformat(row["time"]) for row in request["instances"])
    young = 0
    old = 0
    changed = []

    for row in request["history"]:
        is_young = datetime.fromisoformat(row["time"]) > first_time - timedelta(days=7)
        young = young + is_young
        old = old + (not is_young)
        changed.append(row | {"fraud": 1} if is_young else row)

    assert young
    assert old
    first_only = [
        n
        for n, row in enumerate(request["instances"])
        if datetime.fromisoformat(row["time"]) == first_time
    ]

    got = predict_scores(predictor, {"instances": request["instances"], "history": changed})
    assert [got[n] for n in first_only] == pytest.approx(
        [expected[n] for n in first_only], abs=CLOSE
    )


def test_a_transaction_gets_the_same_score_alone_and_with_others(predictor: FraudPredictor) -> None:
    other_rows = [
        ROW | {"transaction_id": n, "card": n, "terminal": 100 + n, "amount": n}
        for n in range(20, 60)
    ]
    single_scores = predict_scores(predictor, {"instances": [ROW]})
    among = predict_scores(predictor, {"instances": [*other_rows, ROW]})
    assert among[-1] == single_scores[0]


def test_a_request_gets_the_same_bits_in_any_batch(
    predictor: FraudPredictor, requests: Requests
) -> None:
    bodies = [request for request, _ in requests]
    single_scores = [predict_scores(predictor, body) for body in bodies]
    order = random.Random(1)
    for _ in range(3):
        shuffled = order.sample(range(len(bodies)), len(bodies))
        batched_scores = predict_scores(predictor, *(bodies[index] for index in shuffled))
        assert batched_scores == [score for index in shuffled for score in single_scores[index]]


def test_ids_may_be_text(predictor: FraudPredictor) -> None:
    row = ROW | {
        "transaction_id": "tx-9",
        "card": " 5",
        "terminal": "6",
        "time": "2024-03-20T13:00:00+01:00",
    }
    assert predict_scores(predictor, {"instances": [row]}) == predict_scores(
        predictor, {"instances": [ROW]}
    )


def test_requests_that_need_too_much_history_are_not_replayed(
    small_dataset: Path, report: Path
) -> None:
    requests = list(replay(small_dataset, report, 60, 1, max_history=400))
    assert 0 < sum(len(r["instances"]) for r, _ in requests) < 60
    assert max(len(r["history"]) for r, _ in requests) <= 400


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"amount": -5},
            r"instances\[1\].amount is -5: it must be a number from 0 to 1,000,000,000",
        ),
        ({"amount": float("nan")}, r"instances\[1\].amount is nan: it must be a finite"),
        ({"amount": "12"}, "amount is '12'"),
        ({"amount": True}, "amount is True"),
        ({"time": "yesterday"}, r"instances\[1\].time is 'yesterday': it must be ISO 8601"),
        ({"time": 1710936000}, "time is 1710936000"),
        ({"time": "2020-01-01"}, "older than the end of the state of this model"),
        ({"card": 1.5}, "card is 1.5: it must be a whole number"),
        ({"card": None}, "card is None"),
        ({"card": 1 << 63}, "card is 9223372036854775808: it must fit into 64 bits"),
        ({"terminal": "  "}, "terminal is '  '"),
        ({"terminal": ["x" * 100]}, r"terminal is \['x+\.\.\.:"),
        (
            {"transaction_id": 1},
            r"instances\[1\].transaction_id equals instances\[0\]'s: each transaction_id must be",
        ),
        ({"fraud": 1}, r"instances\[1\] has the unknown key 'fraud'"),
        ({"ammount": 1}, "has the unknown key 'ammount'. Did you mean \"amount\""),
    ],
)
def test_an_invalid_value_is_named_with_its_position_and_rule(
    predictor: FraudPredictor, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        predict_scores(predictor, {"instances": [ROW, ROW | {"transaction_id": 2} | change]})


def test_missing_fields_and_wrong_types_are_named(predictor: FraudPredictor) -> None:
    for row, message in [
        (
            {k: v for k, v in ROW.items() if k != "card"},
            r"instances\[0\].card is missing: it is required",
        ),
        (7, r"instances\[0\] is 7: input should be an object"),
    ]:
        with pytest.raises(DataError, match=message):
            predict_scores(predictor, {"instances": [row]})

    with pytest.raises(DataError, match=r"history\[0\].fraud is 2: it must be 1 or 0"):
        predict_scores(
            predictor, {"instances": [ROW], "history": [ROW | {"transaction_id": 5, "fraud": 2}]}
        )
