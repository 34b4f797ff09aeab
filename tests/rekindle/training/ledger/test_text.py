"""What a person reads about a run is what happened, and a picture of it can be drawn whatever happened."""

import time
from pathlib import Path
from typing import Any

import pytest

from rekindle.training.ledger.plot import draw
from rekindle.training.ledger.text import describe
from tests.rekindle.training.ledger.test_accounting import generation, join, lost, start, step, told


def story(*lines: tuple[Any, ...]) -> list[str]:
    """The words about events at unix seconds, without the time of day."""
    return [line[10:] if line[2:3] == ":" else line for line in describe(told(*lines))]


def test_a_loss_says_who_went_why_what_it_cost_and_when_it_was_back():
    again = (6, "join", {"worker": "new-b", "name": "b", "step": -1})
    told = story(
        *start("a", "b"), step(3, 10), step(4, 20), lost(5.5, "b", "silent"), (5.5, "open", {"hard": True}),
        generation(5.75, 2, 20, "a"), again, generation(6.5, 3, 25, "a", "b"), (8.5, "complete", {"step": 45}),
    )  # fmt: skip
    assert told[0].startswith("2 workers trained 45 steps in 8.5 s, ")
    assert told[1] == (
        "b was lost (silent for too long) at step 20; the others went on 0.25 s later. "
        "No step was lost, but 3 worker-seconds of work. It was back after 1 s."
    )
    assert told[-1] == "53 % of 16 worker-seconds trained, 28.8 % waited, 18.2 % lost."


def test_the_loss_of_all_says_what_was_done_again_and_where_the_state_came_from():
    again = [(9, "join", {"worker": f"new-{name}", "name": name, "step": -1}) for name in ("a", "b")]
    told = story(
        *start("a", "b"), step(3, 10), step(4, 20), lost(4.5, "a"), (4.5, "open", {"hard": True}), lost(4.5, "b"),
        *again, generation(9.5, 3, 5, "a", "b"), (9.5, "restored", {"step": 5, "tier": "durable"}),
        (11.5, "complete", {"step": 25}),
    )  # fmt: skip
    assert told[1:3] == [
        "a, b were lost (connection closed) at step 20, nobody was left. Training went on 5 s later. "
        "15 steps were done again, 4 worker-seconds of work.",
        "step 5 was restored from the object store.",
    ]


def test_a_run_that_was_given_up_or_waits_for_workers_says_so():
    end = [lost(4, "a"), (4, "open", {"hard": True})]
    assert story(*start("a"), step(3, 10), *end)[1] == (
        "a was lost (connection closed) at step 10; nobody trained after that."
    )
    verdict = (4, "verdict", {"code": 65, "message": "a: no data"})
    assert story(*start("a"), step(3, 10), verdict)[0].endswith("Then the run was given up: a: no data")


def test_a_run_that_stopped_early_says_so():
    plan = (0.1, "run", {"steps": 100, "workers": 1, "device": "cpu"})
    told = story(*start("a"), plan, step(3, 10), (4, "complete", {"step": 20}))
    assert "trained 20 of 100 steps" in told[0] and told[0].endswith("(train.patience).")


def test_a_newcomer_a_drain_and_a_new_coordinator_are_told_apart():
    drain = (6, "drain", {"worker": "id-a", "name": "a"})
    told = story(
        *start("a"), (3, "join", {"worker": "id-b", "name": "x-train-b"}), (3, "open", {"hard": False}),
        generation(3.5, 2, 14, "a", "x-train-b"), (5, "coordinator", {"id": "c2"}), step(5, 30),
        (5.9, "open", {"hard": False}), drain, generation(6.1, 3, 40, "x-train-b"), (7.1, "complete", {"step": 50}),
    )  # fmt: skip
    assert told[1:4] == [
        "b came in addition and trained 0.5 s later.",
        "the coordinator was started again; the workers trained on without it.",
        "a left in order, as told, at step 30; the others went on 0.1 s later.",
    ]


def test_a_thousand_losses_are_told_in_a_screenful():
    lines: list[tuple[Any, ...]] = start("a", "b")
    for n in range(1000):
        t = 10 * (n + 1)
        lines += [lost(t, "b"), (t, "open", {"hard": True}), generation(t + 1, 2, 90 * n, "a")]
        lines += [(t + 2, "join", {"worker": "id-b", "name": "b"}), generation(t + 3, 3, 90 * n + 9, "a", "b")]
    told = story(*lines)
    assert len(told) < 30
    assert "… 976 more of the kind …" in told
    assert "1000 losses stopped the others for 1 s (median), 1 s at most." in told


def test_gpu_time_is_called_so_and_long_runs_are_told_in_hours_and_dates():
    lines = [(0, "run", {"device": "NVIDIA H200", "steps": 900_000}), *start("a", "b"), lost(90_000, "b"),
             (90_000, "open", {"hard": True}), generation(90_001, 2, 800_000, "a"), step(90_010, 800_090)]  # fmt: skip
    found = describe(told(*lines))
    assert "800090 of 900000 steps in 25 h 00 min" in found[0]
    assert found[1].startswith(time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(90_000)))
    assert "of 50.0 GPU-hours trained" in found[-1]


@pytest.mark.parametrize(
    "lines",
    [
        [],
        start("a"),
        join("a"),
        [*start("a", "b"), step(3, 10), lost(4, "a"), (5, "coordinator", {"id": "c2"}), (5, "checkpoint", {"step": 9})],
        [*start(*(f"w-{n}" for n in range(50))), step(4e5, 10), (5e5, "complete", {"step": 20})],
    ],
)
def test_a_picture_can_be_drawn_of_any_run(lines: list[tuple[Any, ...]], tmp_path: Path):
    draw(told(*lines), tmp_path / "timeline.png")
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")
