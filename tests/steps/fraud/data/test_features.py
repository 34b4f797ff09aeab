"""The computed features equal values that are computed row by row from the features'
definitions."""

import math
from statistics import median

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from steps.fraud.data import features
from steps.fraud.data.transactions import DAY, Rows

HOUR = DAY // 24
START = 1_700_000_000_000_000 // DAY * DAY


@st.composite
def transactions(draw: st.DrawFn) -> Rows:
    """Generate rows sorted by (time, id). Coarse times give ties and windows that begin exactly at
    a transaction."""
    n = draw(st.integers(1, 60))
    step = draw(st.sampled_from([HOUR, 6 * HOUR, DAY, 9 * DAY]))
    time = sorted(draw(st.lists(st.integers(0, 50), min_size=n, max_size=n)))
    column = lambda high: draw(st.lists(st.integers(0, high), min_size=n, max_size=n))  # noqa: E731

    return Rows.of(
        id=np.arange(n),
        time=START + np.array(time) * step,
        card=column(2),
        terminal=column(2),
        amount=np.array(column(40_000)) / 100,
        fraud=column(1),
    )


def compute_reference(rows: Rows, row: int, delay: int) -> dict[str, float]:
    """Compute all features of a row from their definitions."""
    t = rows.time[row]
    amount = rows.cents / 100
    row_range = range(len(rows))
    card = [i for i in row_range if rows.card[i] == rows.card[row]]
    upto = [i for i in card if i <= row]
    earlier_amounts = upto[:-1][-50:]
    ratio = lambda a, b: math.log((a + 1) / (b + 1))  # noqa: E731
    middle = median(amount[i] for i in upto[-50:])
    seconds = (t % DAY) / 1e6
    longest = 30 * 86_400

    result = {
        "log_amount": math.log1p(amount[row]),
        "log_ratio_to_mean": ratio(
            amount[row], sum(amount[i] for i in earlier_amounts) / len(earlier_amounts)
        )
        if earlier_amounts
        else 0,
        "log_gap": math.log1p(
            min((t - rows.time[earlier_amounts[-1]]) / 1e6, longest) if earlier_amounts else longest
        ),
        "sin_time": math.sin(2 * math.pi * seconds / 86_400),
        "cos_time": math.cos(2 * math.pi * seconds / 86_400),
        "amount": amount[row],
        "weekend": np.datetime64(int(t), "us").item().weekday() >= 5,
        "night": np.datetime64(int(t), "us").item().hour <= 6,
        "log_ratio_to_median": ratio(amount[row], middle),
        "log_max5_to_median": ratio(max(amount[i] for i in upto[-5:]), middle),
        "log_max20_to_median": ratio(max(amount[i] for i in upto[-20:]), middle),
    }

    for days in (1, 7, 30):
        window = [i for i in card if t - days * DAY < rows.time[i] <= t]
        result[f"card_count_{days}d"] = len(window)
        result[f"card_mean_{days}d"] = sum(amount[i] for i in window) / len(window)

        labelled = [
            i
            for i in row_range
            if rows.terminal[i] == rows.terminal[row]
            and t - (delay + days) * DAY < rows.time[i] <= t - delay * DAY
        ]

        result[f"terminal_count_{days}d"] = len(labelled)
        result[f"terminal_risk_{days}d"] = sum(rows.fraud[i] for i in labelled) / max(
            len(labelled), 1
        )

    frauds = [i for i in labelled if rows.fraud[i]]
    genuine = [i for i in labelled if not rows.fraud[i]]
    for name, i in (("first", 0), ("last", -1)):
        since = (t - rows.time[frauds[i]]) / DAY if frauds else delay + 30
        result[f"days_since_{name}_fraud"] = since

    result["fraud_run"] = sum(i > genuine[-1] for i in frauds) if genuine else len(frauds)
    return result


def compute_table(rows: Rows, delay: int = 7, chunk: int = 250_000) -> np.ndarray:
    """Return the features in the order of `rows`."""
    result = np.empty((len(rows), len(features.NAMES)), np.float32)
    for piece_rows, piece_features in features.tables(rows, delay, chunk):
        result[piece_rows.id] = piece_features
    return result


def same_day(n: int) -> Rows:
    """Return n transactions of one card at one terminal at the same time."""
    return Rows.of(range(n), [START] * n, [1] * n, [1] * n, np.arange(n), [1] * n)


@settings(max_examples=50)
@given(transactions(), st.sampled_from([0, 7]))
@example(same_day(3), 0)
def test_every_feature_equals_its_definition(rows: Rows, delay: int) -> None:
    values = compute_table(rows, delay)
    for row in range(len(rows)):
        expected = compute_reference(rows, row, delay)
        np.testing.assert_allclose(
            values[row], [expected[n] for n in features.NAMES], rtol=1e-5, atol=1e-6
        )


@pytest.mark.slow
@settings(max_examples=50)
@given(transactions())
def test_features_do_not_depend_on_the_chunk_size(rows: Rows) -> None:
    assert compute_table(rows).tobytes() == compute_table(rows, chunk=1).tobytes()


@settings(max_examples=50)
@given(transactions(), st.data())
def test_features_ignore_labels_within_the_delay_and_later_transactions(
    rows: Rows, data: st.DataObject
) -> None:
    row = data.draw(st.integers(0, len(rows) - 1))
    now = rows.time[row]
    young = rows.time > now - 7 * DAY
    # transactions at the same time count, too
    past = rows.time <= now

    changed = Rows.of(
        rows.id,
        rows.time,
        rows.card,
        rows.terminal,
        np.where(past, rows.cents / 100, 999),
        rows.fraud ^ young,
    )

    np.testing.assert_array_equal(compute_table(rows)[past], compute_table(changed)[past])


@pytest.mark.slow
def test_rare_transactions_over_many_years_do_not_overflow() -> None:
    # each card and each terminal occurs twice, 20 years apart
    row_count = 400_000
    half = np.arange(row_count // 2)

    rows = Rows.of(
        id=np.arange(row_count),
        time=np.concatenate([half, half + 20 * 365 * DAY]) + START,
        card=np.concatenate([half, half]),
        terminal=np.concatenate([half, half]),
        amount=np.ones(row_count),
        fraud=np.ones(row_count, np.uint8),
    )

    values_by_feature = dict(zip(features.NAMES, compute_table(rows).T, strict=True))
    assert (values_by_feature["card_count_30d"] == 1).all()
    assert (values_by_feature["terminal_count_30d"] == 0).all()


@pytest.mark.parametrize("chunk_rows", [1, 3, 100])
def test_chunks_contain_only_complete_groups(chunk_rows: int) -> None:
    groups = np.array([0, 0, 0, 1, 5, 5, 9])
    pieces = [groups[piece] for piece in features.chunks(groups, chunk_rows)]
    assert np.concatenate(pieces).tolist() == groups.tolist()
    assert sum(len(set(piece)) for piece in pieces) == len(set(groups))
