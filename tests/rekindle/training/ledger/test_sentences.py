"""The description of a training by `rekindle explain` is true, and its timeline can be drawn for
any events."""

import time
from pathlib import Path
from typing import Any

import pytest

from rekindle.training.ledger.plot import draw_timeline
from rekindle.training.ledger.sentences import describe_summary
from tests.rekindle.training.ledger.events import (
    make_generation,
    make_join,
    make_lost,
    make_start,
    make_step,
    summarize,
)


def describe_events(*lines: tuple[Any, ...]) -> list[str]:
    """Return the description of events, given by unix seconds, without the time of day."""
    return [line[10:] if line[2:3] == ":" else line for line in describe_summary(summarize(*lines))]


def test_a_loss_is_described_with_its_reason_cost_and_duration():
    new_join = (6, "join", {"worker": "new-b", "name": "b", "step": -1})
    text = describe_events(
        *make_start("a", "b"),
        make_step(3, 10),
        make_step(4, 20),
        make_lost(5.5, "b", "silent"),
        (5.5, "open", {"hard": True}),
        make_generation(5.75, 2, 20, "a"),
        new_join,
        make_generation(6.5, 3, 25, "a", "b"),
        (8.5, "complete", {"step": 45}),
    )

    rate = (
        "2 workers trained 45 steps in 6.2 s, 7.2 steps/s; with starts and pauses it took 8.5 s,"
        " since "
    )
    assert text[0].startswith(rate), "steps / seconds is the rate"

    assert (
        text[1]
        == "b was lost (silent for too long) at step 20; the others continued 0.25 s later. "
        "No step was lost, but 3 worker-seconds of work. It was back after 1 s."
    )

    assert text[-1] == "53 % of 16 worker-seconds trained, 28.8 % waited, 18.2 % lost."


def test_the_loss_of_all_workers_is_described_with_repeated_steps_and_source_of_the_state():
    second_attempt = [
        (9, "join", {"worker": f"new-{name}", "name": name, "step": -1}) for name in ("a", "b")
    ]
    text = describe_events(
        *make_start("a", "b"),
        make_step(3, 10),
        make_step(4, 20),
        make_lost(4.5, "a"),
        (4.5, "open", {"hard": True}),
        make_lost(4.5, "b"),
        *second_attempt,
        make_generation(9.5, 3, 5, "a", "b"),
        (9.5, "restored", {"step": 5, "tier": "durable"}),
        (11.5, "complete", {"step": 25}),
    )

    assert text[1:3] == [
        (
            "a, b were lost (connection closed) at step 20; no worker was left. Training continued"
            " 5 s later. 15 steps were repeated, 4 worker-seconds of work."
        ),
        "step 5 was restored from the object store.",
    ]


def test_a_run_that_was_aborted_or_waits_for_workers_is_described_as_such():
    end = [make_lost(4, "a"), (4, "open", {"hard": True})]
    assert (
        describe_events(*make_start("a"), make_step(3, 10), *end)[1]
        == "a was lost (connection closed) at step 10; no worker trained after that."
    )
    verdict = (4, "verdict", {"code": 65, "message": "a: no data"})
    assert describe_events(*make_start("a"), make_step(3, 10), verdict)[0].endswith(
        "Then the run was aborted: a: no data"
    )


def test_early_stopping_is_described():
    plan = (0.1, "run", {"steps": 100, "workers": 1, "device": "cpu"})
    text = describe_events(*make_start("a"), plan, make_step(3, 10), (4, "complete", {"step": 20}))
    assert "trained 20 of 100 steps" in text[0]
    assert text[0].endswith("(train.patience).")


def test_a_join_a_drain_and_a_new_coordinator_have_different_descriptions():
    drain = (6, "drain", {"worker": "id-a", "name": "a"})
    text = describe_events(
        *make_start("a"),
        (3, "join", {"worker": "id-b", "name": "x-train-b"}),
        (3, "open", {"hard": False}),
        make_generation(3.5, 2, 14, "a", "x-train-b"),
        (5, "coordinator", {"id": "c2"}),
        make_step(5, 30),
        (5.9, "open", {"hard": False}),
        drain,
        make_generation(6.1, 3, 40, "x-train-b"),
        (7.1, "complete", {"step": 50}),
    )

    assert text[1:4] == [
        "b joined and trained 0.5 s later.",
        "the coordinator restarted; the workers continued without it.",
        "a left on request at step 30; the others continued 0.1 s later.",
    ]


def test_a_kill_of_all_workers_and_the_coordinator_is_described_without_survivors():
    second_attempt = [
        (9, "join", {"worker": f"new-{name}", "name": name, "step": -1}) for name in ("a", "b")
    ]
    text = describe_events(
        *make_start("a", "b"),
        make_step(3, 10),
        (8, "coordinator", {"id": "c2"}),
        *second_attempt,
        make_generation(9.5, 2, 5, "a", "b"),
        (9.5, "restored", {"step": 5, "tier": "durable"}),
        make_step(10, 10),
        (11.5, "complete", {"step": 25}),
    )

    assert "the coordinator restarted." in text

    assert (
        text[1]
        == "a, b were lost (while the coordinator was unavailable) at step 10 or later, at this"
        " time or later; no worker was left. Training continued at most 6.5 s later. At least 5"
        " steps were repeated: the ledger lacks the last steps."
    )


def test_a_loss_that_nobody_saw_has_the_step_and_time_of_the_last_step_in_shared_memory():
    second_attempt = [
        (9, "join", {"worker": f"new-{name}", "name": name, "step": 247}) for name in ("a", "b")
    ]
    # a restarted worker writes the event, and the time of the event is the time of the step
    last_step = (7, "step", {"step": 309, "last": True})

    events = [
        *make_start("a", "b"),
        make_step(3, 10),
        last_step,
        (8, "coordinator", {"id": "c2"}),
        *second_attempt,
        make_generation(9.5, 2, 247, "a", "b"),
        (9.5, "restored", {"step": 247, "tier": "hot"}),
        make_step(10, 300),
        (11.5, "complete", {"step": 400}),
    ]

    summary = summarize(*events)
    losses = [incident for incident in summary.incidents if incident.kind == "lost"]
    assert [(loss.t, loss.step, loss.repeated, loss.seen) for loss in losses] == [
        (7, 309, 62, True)
    ] * 2
    assert summary.repeated == 62
    assert describe_events(*events)[1].startswith(
        "a, b were lost (while the coordinator was unavailable) at step 309; no worker was left."
        " Training continued 2.5 s later. 62 steps were repeated, "
    )


def test_a_restored_step_proves_a_later_loss_than_the_ledger_has_recorded():
    new_join = [(9, "join", {"worker": "new-a", "name": "a", "step": 247})]
    text = describe_events(
        *make_start("a"),
        (8, "coordinator", {"id": "c2"}),
        *new_join,
        make_generation(9.5, 2, 247, "a"),
        (9.5, "restored", {"step": 247, "tier": "hot"}),
        make_step(10, 300),
        (11.5, "complete", {"step": 400}),
    )
    assert "at step 247 or later, at this time or later;" in text[1]
    assert "How many steps were repeated is unknown" in text[1]


def test_the_step_of_a_loss_is_the_newest_step_that_the_coordinator_knew():
    worker = "id-b"
    name = "b"
    why = "connection"
    loss = (3.9, "lost", {"worker": worker, "name": name, "why": why, "step": 18})

    text = describe_events(
        *make_start("a", "b"),
        make_step(3, 10),
        loss,
        (3.9, "open", {"hard": True}),
        make_generation(4, 2, 18, "a"),
    )

    assert text[1].startswith(
        "b was lost (connection closed) at step 18; the others continued 0.1 s later."
    )


def test_a_loss_without_a_recorded_step_does_not_say_step_0():
    text = describe_events(*make_start("a"), make_lost(2.5, "a"), (2.5, "open", {"hard": True}))
    assert (
        text[1]
        == "a was lost (connection closed) before the first recorded step; no worker trained after"
        " that."
    )


def test_a_group_that_outlives_its_coordinator_is_described_as_continuing():
    text = describe_events(
        *make_start("a"), make_step(3, 10), (20, "coordinator", {"id": "c2"}), make_step(21, 190)
    )
    assert text[1] == "the coordinator restarted; the workers continued without it."


def test_the_steps_of_a_resumed_training_are_counted_from_where_it_was_resumed():
    text = describe_events(
        (0, "coordinator", {"id": "c1"}),
        *make_join("a"),
        make_generation(2, 1, -1, "a"),
        (2, "restored", {"step": 80}),
        (4, "complete", {"step": 100}),
    )
    assert text[0].startswith("1 worker trained 20 steps (80 to 100) in 2 s, 10 steps/s")


def test_the_description_of_a_thousand_losses_fits_on_a_screen():
    lines: list[tuple[Any, ...]] = make_start("a", "b")
    for n in range(1000):
        t = 10 * (n + 1)
        lines += [
            make_lost(t, "b"),
            (t, "open", {"hard": True}),
            make_generation(t + 1, 2, 90 * n, "a"),
        ]
        lines += [
            (t + 2, "join", {"worker": "id-b", "name": "b"}),
            make_generation(t + 3, 3, 90 * n + 9, "a", "b"),
        ]
    text = describe_events(*lines)
    assert len(text) < 30
    assert "… 976 similar lines …" in text
    assert "1000 losses stopped the other workers for 1 s (median), at most 1 s." in text


def test_gpu_hours_and_dates_are_used_for_long_runs_on_gpus():
    lines = [
        (0, "run", {"device": "NVIDIA H200", "steps": 900_000}),
        *make_start("a", "b"),
        make_lost(90_000, "b"),
        (90_000, "open", {"hard": True}),
        make_generation(90_001, 2, 800_000, "a"),
        make_step(90_010, 800_090),
    ]
    text = describe_summary(summarize(*lines))
    assert "800090 of 900000 steps in 25 h 00 min" in text[0]
    assert "it took 25 h 00 min" in text[0]
    assert text[1].startswith(time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(90_000)))
    assert "of 50.0 GPU-hours trained" in text[-1]


@pytest.mark.parametrize(
    "lines",
    [
        [],
        make_start("a"),
        make_join("a"),
        [
            *make_start("a", "b"),
            make_step(3, 10),
            make_lost(4, "a"),
            (5, "coordinator", {"id": "c2"}),
            (5, "checkpoint", {"step": 9}),
        ],
        [
            *make_start(*(f"w-{n}" for n in range(50))),
            make_step(4e5, 10),
            (5e5, "complete", {"step": 20}),
        ],
    ],
)
def test_a_timeline_can_be_drawn_of_any_run(lines: list[tuple[Any, ...]], tmp_path: Path):
    draw_timeline(summarize(*lines), tmp_path / "timeline.png")
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")


def test_saves_of_a_program_that_does_not_tell_its_steps_are_not_called_steps():
    text = describe_events(
        (0, "run", {"program": True, "device": "cpu", "unit": "checkpoints"}),
        *make_start("a", "b"),
        make_step(3, 1),
        make_lost(4, "b"),
        (4, "open", {"hard": True}),
        make_generation(4.5, 2, 1, "a"),
        (4.5, "restored", {"step": 1, "tier": "disk"}),
        make_step(5, 12),
        (6, "complete", {"step": 12}),
    )
    assert "2 workers wrote 12 checkpoints in" in text[0]
    assert text[1].startswith("b was lost (connection closed) at checkpoint 1; the others")
    assert text[2] == "checkpoint 1 was restored from the node's disk."


def test_the_steps_before_the_first_report_of_a_program_were_trained():
    run = (2, "run", {"program": True, "device": "cpu"})
    restored = (2, "restored", {"step": 20, "tier": "durable"})
    began = make_start("a")[:-1]
    assert "1 worker trained 50 steps in" in describe_events(*began, run, make_step(10, 50))[0]
    assert (
        "trained 30 steps (20 to 50) in"
        in describe_events(*began, run, restored, make_step(10, 50))[0]
    )

    second_attempt = [(5, "killed", {"name": "a"}), make_generation(6, 2, -1, "a")]
    restored = (7, "restored", {"step": 20, "tier": "disk"})
    text = describe_events(*began, run, *second_attempt, restored, make_step(10, 50))
    assert "1 worker trained 50 steps in" in text[0]


def test_a_killed_process_of_a_program_is_a_loss():
    text = describe_events(
        (0, "run", {"program": True, "device": "cpu"}),
        *make_start("a", "b"),
        make_step(3, 10),
        (5, "killed", {"name": "b"}),
        (5, "open", {"hard": True}),
        make_generation(6, 2, 10, "a", "b"),
        (6, "restored", {"step": 10, "tier": "disk"}),
        make_step(9, 20),
    )
    assert text[1].startswith(
        "b was lost (a process of the program was killed) at step 10; the others continued 1 s"
    )


def test_a_program_repeats_the_steps_since_the_restored_checkpoint():
    # the other workers have reported step 30, but the checkpoint of step 30 was not complete
    text = describe_events(
        (0, "run", {"program": True, "device": "cpu"}),
        *make_start("a", "b"),
        make_step(4, 20),
        make_step(6, 40),
        make_lost(7, "b"),
        (7, "open", {"hard": True}),
        make_generation(7, 2, 40, "a"),
        (8, "restored", {"step": 20, "tier": "durable"}),
        make_step(9, 30),
    )
    assert text[1] == (
        "b was lost (connection closed) at step 40; the others continued 0 s later. 6"
        " worker-seconds of work since its last save was repeated."
    )


def test_the_work_that_a_program_repeats_is_told():
    text = describe_events(
        (0, "run", {"program": True, "device": "cpu"}),
        *make_start("a", "b"),
        make_step(3, 10),
        make_lost(5, "b"),
        (5, "open", {"hard": True}),
        make_generation(6, 2, 10, "a"),
        (6, "restored", {"step": 10, "tier": "disk"}),
        (7, "unsaved", {"seconds": 1.5}),
        (8, "progress", {"percentage": 45, "seconds_left": 180}),
    )
    assert "45 % are done, about 3 min 00 s are left." in text[0]
    assert text[1].endswith("4 worker-seconds of work since its last save was repeated.")
    assert text[2] == "step 10 was restored from the node's disk."
    assert text[3] == "the program stopped on SIGTERM without a save: 1.5 s of work were repeated."
