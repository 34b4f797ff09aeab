"""A backfill trains a program once for each scheduled time in a range of dates."""

import json
from pathlib import Path

import pytest

from tests.commands import open_shell

WORKLOAD = """
import pickle

from pydantic import BaseModel

from rekindle import DataConfig, Metric, Prepared, Section


class Data(DataConfig):
    until: str = ""

    def at(self, time):
        return self.model_copy(update={"until": time.strftime("%d")})

    def first_rows(self, rows, folder):
        return self


class Model(Section): ...


class Instance(BaseModel):
    day: float


metrics = (Metric("error", lambda predictions, truths: 0.0, better="lower"),)


def prepare(data, out):
    (out / "day").write_text(data.until)
    return Prepared(rows=1)


def examples(path):
    yield {"day": 1.0}, 1.0


def load(path, facts):
    return pickle.loads(path.read_bytes())


def predict(model, instances, facts):
    return [instance.day for instance in instances]
"""
PROGRAM = """
import pathlib
import pickle
import sys

day = pathlib.Path(sys.argv[1], "day").read_text()
pathlib.Path(sys.argv[2], "step_1.pkl").write_bytes(pickle.dumps({"day": day}))
"""
CONFIG = {
    "name": "dated",
    "workload": "dated",
    "data": {"source": "simulate://0"},
    "program": {"command": ["fit.py", "{dataset}", "{checkpoints}"], "preload": []},
    "train": {"workers": 1, "min_workers": 1},
    "gate": {"maximum": {"error": 1}},
    "schedule": {"cron": "0 3 * * 1"},
}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_backfill_trains_a_program_with_the_data_of_each_date(tmp_path: Path) -> None:
    (tmp_path / "dated.py").write_text(WORKLOAD)
    (tmp_path / "fit.py").write_text(PROGRAM)
    (tmp_path / "dated.yaml").write_text(json.dumps(CONFIG))

    with open_shell(tmp_path) as typed:
        result = typed("rekindle backfill dated.yaml --from 2026-11-01 --to 2026-11-10 -o json")
        assert result.returncode == 0, result.stdout + result.stderr
        rows = json.loads(result.stdout)["weeks"]

    assert [row["phase"] for row in rows] == ["Succeeded", "Succeeded"]
    assert len({row["model_sha256"] for row in rows}) == 2, "each date has its own result"
