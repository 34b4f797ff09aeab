"""Workloads that cannot be trained are refused before their data is prepared; a check that was
successful is not repeated."""

from pathlib import Path
from typing import Any

import pytest

from rekindle.errors import ConfigError
from rekindle.training import rehearsal
from rekindle.training.rehearsal import check_trainable
from tests.rekindle.training.untrainable import FAULTS, TEMPLATE, write_workload


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REKINDLE_PATH", str(tmp_path))
    monkeypatch.setenv("REKINDLE_CACHE", str(tmp_path / "cache"))
    # the time limit is long, because a busy machine may need minutes
    monkeypatch.setattr(rehearsal, "REHEARSAL_TIMEOUT_S", 600)


# tests/rekindle/cli/test_check.py tests that another mistake is refused in the same way
@pytest.mark.slow
def test_an_untrainable_workload_is_refused_in_one_sentence(tmp_path: Path) -> None:
    code, sentence = FAULTS["a closure"]
    with pytest.raises(ConfigError, match=f"^{sentence}"):
        check_trainable(write_workload(tmp_path, "closure", code))


def test_a_workload_that_passed_the_rehearsal_is_tried_again_only_after_a_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sections = write_workload(tmp_path, "sound", TEMPLATE)
    check_trainable(sections)
    tried = count_rehearsals(monkeypatch, {"stage": ""})
    check_trainable(sections)
    assert tried == []
    check_trainable(sections | {"train": sections["train"] | {"seed": 7}})
    assert len(tried) == 1


@pytest.mark.parametrize(
    ("report", "count"),
    [
        # this error means that all of the data is needed
        ({"stage": "facts", "error": "the model needs facts[3]", "exit_code": 70}, 1),
        (
            {
                "stage": "facts",
                "error": "the model needs facts[3]",
                "exit_code": 70,
                "unprepared": "no network",
            },
            2,
        ),
        ({"stage": "timeout", "error": "it took more than 30 s.", "exit_code": 1}, 2),
    ],
)
def test_a_rehearsal_that_could_have_another_result_is_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, report: dict[str, Any], count: int
) -> None:
    sections = write_workload(tmp_path, "uncertain", TEMPLATE)
    tried = count_rehearsals(monkeypatch, report)
    for _ in range(2):
        check_trainable(sections)
    assert len(tried) == count


def count_rehearsals(monkeypatch: pytest.MonkeyPatch, report: dict[str, Any]) -> list[Any]:
    """Replace the process that checks a workload (a rehearsal) by a report; return the list of
    calls."""
    tried: list[Any] = []
    monkeypatch.setattr(
        rehearsal, "run_rehearsal", lambda config, **options: tried.append(config) or report
    )
    return tried


@pytest.mark.slow
def test_a_rehearsal_whose_process_dies_refuses_no_workload(tmp_path: Path) -> None:
    code = TEMPLATE.replace("    from torch import nn\n", "    import os\n\n    os._exit(9)\n")
    check_trainable(write_workload(tmp_path, "dying", code))


def test_a_training_that_was_not_tried_in_time_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rehearsal, "REHEARSAL_TIMEOUT_S", 0.01)
    check_trainable(write_workload(tmp_path, "late", TEMPLATE))
    assert (
        "not rehearsed before the run: it took more than 0.01 s. `rekindle check CONFIG`"
        in capsys.readouterr().err
    )
