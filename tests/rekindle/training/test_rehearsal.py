"""Workloads that cannot be trained are refused before their data is prepared; a passed check is not repeated."""

from pathlib import Path

import pytest

from rekindle.errors import ConfigError
from rekindle.training.rehearsal import check_trainable
from tests.rekindle.training.untrainable import FAULTS, TEMPLATE, write_workload


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REKINDLE_PATH", str(tmp_path))
    monkeypatch.setenv("REKINDLE_CACHE", str(tmp_path / "cache"))


def test_an_untrainable_workload_is_refused_in_one_sentence(tmp_path: Path) -> None:
    code, sentence = FAULTS["a closure"]
    with pytest.raises(ConfigError, match=f"^{sentence}"):
        check_trainable(write_workload(tmp_path, "closure", code))


def test_a_workload_that_passed_the_rehearsal_is_tried_again_only_after_a_change(tmp_path: Path) -> None:
    log = tmp_path / "built.txt"
    trace = f"def model(section, facts):\n    open({str(log)!r}, 'a').write('built\\n')\n"
    code = TEMPLATE.replace("def model(section, facts):\n", trace)
    sections = write_workload(tmp_path, "traced", code)
    check_trainable(sections)
    built = log.read_text()
    check_trainable(sections)
    assert log.read_text() == built
    check_trainable(sections | {"train": sections["train"] | {"seed": 7}})
    assert len(log.read_text()) > len(built)


def test_a_rehearsal_whose_process_dies_refuses_no_workload(tmp_path: Path) -> None:
    code = TEMPLATE.replace("    from torch import nn\n", "    import os\n\n    os._exit(9)\n")
    check_trainable(write_workload(tmp_path, "dying", code))
