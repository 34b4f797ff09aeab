"""Tests of the optional hooks of a workload: the hooks are few, are documented, and each hook is
used by an example."""

import math
import re
import shutil
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rekindle import Examples, Prepared
from rekindle.errors import ConfigError, DataError, RekindleError
from rekindle.workload import (
    FUNCTION_ARGUMENTS,
    REQUIRED_NAMES,
    SERVING_NAMES,
    DataConfig,
    check_program,
    get_training_function,
    load,
    prepare,
)
from steps.fraud.handbook_protocol import Weekly
from tests.commands import ROOT

# a workload defines one of these names, or `families`
ONE_OF = {"model", "load"}
# names for the settings of a training (docs/training.md)
TRAINING = {"optimizer", "schedule", "measures"}
EXAMPLES = ("steps.digits", "steps.language", "steps.boosting", "steps.fraud")


def documented_hooks() -> list[str]:
    """Return the hooks in the table of docs/your-own-model.md."""
    page = (ROOT / "docs/your-own-model.md").read_text()
    table = page.partition("## Optional hooks")[2].partition("\n## ")[0]
    return re.findall(r"^\| `([\w.]+)\(", table, re.MULTILINE)


def test_at_most_four_hooks_exist_and_an_example_uses_each() -> None:
    functions = set(FUNCTION_ARGUMENTS) - {*REQUIRED_NAMES, *SERVING_NAMES} - ONE_OF - TRAINING
    methods = {
        f"Examples.{name}" for name in vars(Examples) if not name.startswith("_") and name != "of"
    }
    methods -= {f"Examples.{name}" for name in Examples.__dataclass_fields__}
    assert set(documented_hooks()) == functions | methods
    assert len(documented_hooks()) <= 4
    used = {name for name in functions for example in EXAMPLES if hasattr(load(example), name)}
    assert used | {f"Examples.{name}" for name in vars(Weekly)} >= set(documented_hooks())


def test_a_model_without_predict_needs_a_predictor(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: Any = load("tests.rekindle.release.lines")
    monkeypatch.delattr(lines, "predict")
    with pytest.raises(
        ConfigError, match=r"lacks predict: it must define Instance and predict .* or a predictor"
    ):
        load("tests.rekindle.release.lines")
    monkeypatch.setattr(lines, "predictor", lambda release: None, raising=False)
    load("tests.rekindle.release.lines")


def test_a_metric_without_a_function_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: Any = load("tests.rekindle.release.lines")
    monkeypatch.setattr(lines, "metrics", (type(lines.metrics[0])("rmse"),))
    with pytest.raises(ConfigError, match="metric rmse lacks a function"):
        load("tests.rekindle.release.lines")


def test_a_source_that_does_not_fit_on_the_disk_is_an_error_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "raw").mkdir()
    for name in ("a.csv", "b.csv"):
        (tmp_path / "raw" / name).write_bytes(bytes(60_000))
    data = DataConfig(source=str(tmp_path / "raw"))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=100_000))
    with pytest.raises(
        RekindleError, match=r"the dataset needs about 0\.0 GB and .*out has .*or set TMPDIR"
    ):
        prepare(load("tests.rekindle.release.lines"), data, tmp_path / "out")


def test_optimizer_and_schedule_may_take_the_section_of_the_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines: Any = load("tests.rekindle.release.lines")
    monkeypatch.setattr(
        lines, "optimizer", lambda model, train, section: (model, train, section), raising=False
    )
    monkeypatch.setattr(lines, "schedule", lambda step, total: step / total, raising=False)
    load("tests.rekindle.release.lines")

    assert get_training_function(lines, "optimizer", "own")("net", "settings") == (
        "net",
        "settings",
        "own",
    )

    assert get_training_function(lines, "schedule", "own")(1, 4) == 0.25
    monkeypatch.setattr(lines, "schedule", lambda step, total, section, more: 1)

    with pytest.raises(ConfigError, match=r"cannot be called as schedule\(step, total, section\)"):
        load("tests.rekindle.release.lines")


def test_examples_may_only_take_the_champion_as_second_argument(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines: Any = load("tests.rekindle.release.lines")
    monkeypatch.setattr(lines, "examples", lambda path, champion: iter(()))
    load("tests.rekindle.release.lines")
    monkeypatch.setattr(lines, "examples", lambda path, champion, more: iter(()))
    with pytest.raises(ConfigError, match=r"cannot be called as examples\(path, champion\)"):
        load("tests.rekindle.release.lines")


def test_the_first_rows_of_a_csv_file_end_with_a_whole_row(tmp_path: Path) -> None:
    file = tmp_path / "notes.csv"
    folder = tmp_path / "rows"
    folder.mkdir()
    file.write_text('id,text\n1,a\n2,"two\nlines"\n3,c\n')
    first_rows = DataConfig(source=str(file)).first_rows(2, folder)
    assert first_rows
    assert Path(first_rows.source).read_text() == 'id,text\n1,a\n2,"two\nlines"\n'


def test_only_a_source_with_known_rows_has_first_rows(tmp_path: Path) -> None:
    for source in ("synthetic://7", "s3://bucket/rows.csv", str(tmp_path)):
        assert DataConfig(source=source).first_rows(2, tmp_path) is None


def test_example_facts_must_be_a_dict(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: Any = load("tests.rekindle.release.lines")
    monkeypatch.setattr(lines, "example_facts", [1], raising=False)
    with pytest.raises(ConfigError, match=r"example_facts is \[1\]: it must be a dict"):
        load("tests.rekindle.release.lines")


@pytest.mark.parametrize(
    ("prepared", "message"),
    [
        (
            {"newest": "2024-03-01T12:00:00"},
            "newest of `prepare` is '2024-03-01T12:00:00': it must be an ISO 8601 text",
        ),
        (
            {"newest": "2024-03-01"},
            "newest of `prepare` is '2024-03-01': it must be an ISO 8601 text with a time zone",
        ),
        (
            {"newest": "yesterday"},
            "newest of `prepare` is 'yesterday': it must be an ISO 8601 text with a time zone",
        ),
        (
            {"newest": datetime(2024, 3, 1, tzinfo=UTC)},
            "newest of `prepare` is datetime.datetime(2024, 3, 1, ",
        ),
        (
            {"facts": {"data_until": "2024-03-01"}},
            "the fact data_until of `prepare` is '2024-03-01': it must be",
        ),
        (
            {"facts": {"mean": math.nan}},
            "the facts of `prepare` are not JSON (facts.mean is nan: it must be a finite",
        ),
        (
            {"facts": {"mean": np.float32(1)}},
            "the facts of `prepare` are not JSON (Object of type float32",
        ),
        (
            {"facts": {"until": datetime(2024, 3, 1)}},
            "the facts of `prepare` are not JSON (Object of type datetime",
        ),
        ({"rows": np.int64(3)}, "rows of `prepare` is np.int64(3): it must be a number of rows"),
        ({"rejected": -1}, "rejected of `prepare` is -1: it must be a number of rows"),
    ],
)
def test_a_wrong_result_of_prepare_is_named(
    prepared: dict[str, Any], message: str, tmp_path: Path
) -> None:
    def write(data: Any, out: Path) -> Prepared:
        (out / "rows").write_text("1")
        return Prepared(**{"rows": 3, **prepared})

    with pytest.raises(DataError, match=f"^{re.escape(message)}"):
        prepare(SimpleNamespace(prepare=write), DataConfig(source="none://1"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_prepare_must_return_prepared(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"`prepare` returned NoneType: it must return rekindle\.Prepared"
    ):
        prepare(
            SimpleNamespace(prepare=lambda data, out: None),
            DataConfig(source="none://1"),
            tmp_path / "out",
        )


def test_the_newest_row_may_have_any_time_zone(tmp_path: Path) -> None:
    def write(data: Any, out: Path) -> Prepared:
        (out / "rows").write_text("1")
        return Prepared(
            rows=3, newest="2024-03-01T12:00:00+02:00", facts={"data_until": "2024-03-01T12:00:00Z"}
        )

    assert (
        prepare(SimpleNamespace(prepare=write), DataConfig(source="none://1"), tmp_path / "out")[
            0
        ].rows
        == 3
    )


def test_a_workload_for_a_program_needs_neither_model_nor_loss(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slopes: Any = load("tests.rekindle.program.slopes")
    assert not hasattr(slopes, "loss")
    check_program(slopes.__name__)

    monkeypatch.setattr(slopes, "load", lambda path: path)
    with pytest.raises(ConfigError, match=r"load\(path\) cannot be called as load\(path, facts\)"):
        load(slopes.__name__)

    monkeypatch.delattr(slopes, "load")
    with pytest.raises(
        ConfigError,
        match=r"defines neither model nor families nor load: .*load\(path, facts\) if a",
    ):
        load(slopes.__name__)


def test_a_workload_with_a_model_still_needs_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: Any = load("tests.rekindle.release.lines")
    monkeypatch.setattr(lines, "load", lambda path, facts: None, raising=False)
    load("tests.rekindle.release.lines")
    monkeypatch.delattr(lines, "loss")
    with pytest.raises(ConfigError, match="lacks loss: a workload module must define"):
        load("tests.rekindle.release.lines")
