"""A user's own data: from a CSV file with other column names to a champion that answers over HTTP."""

import json
import urllib.request
from pathlib import Path

import polars as pl
import pytest

from steps.fraud.simulate import simulate
from steps.fraud.world import parse
from tests.commands import ROOT, shell, write_files


def payments(path: Path) -> None:
    """Real-shaped data: the README's column names, one more column, texts as ids, and two rows that are broken."""
    rows = simulate(parse("simulate://3?cards=150&terminals=300&days=70&start=2025-03-01"))
    table = rows.select(
        payment="P" + pl.col("id").cast(pl.String),
        at=pl.col("time").dt.to_string("%Y-%m-%dT%H:%M:%S"),
        card="C" + pl.col("card").cast(pl.String),
        shop=pl.col("terminal"),
        euros="amount",
        fraud="fraud",
        branch=pl.lit("north"),
    )
    broken = table.head(2).with_columns(payment=pl.lit("broken-") + pl.col("card"), euros=pl.lit(-1.0))
    pl.concat([table, broken]).write_csv(path)


@pytest.mark.timeout(600)  # several whole runs
def test_a_users_own_data_becomes_a_champion_and_the_next_run_must_beat_it(
    tmp_path: Path, s3_environment: dict[str, str], mlflow_server: str
):
    write_files(ROOT / "README.md", tmp_path)
    payments(tmp_path / "payments.csv")
    services = {**s3_environment, "MLFLOW_TRACKING_URI": mlflow_server}  # real ones, as far as this run knows
    with shell(tmp_path, **services, REKINDLE_TRAIN__EPOCHS="1") as typed:
        done = typed("rekindle run mine.yaml -o json")
        assert done.returncode == 0, done.stderr
        told = json.loads(done.stdout)
        assert (told["phase"], told["verdict"]) == ("Succeeded", "release")
        assert 0 < told["metrics"]["ap"] <= 1 and 0.5 < told["metrics"]["auc"] <= 1
        with urllib.request.urlopen(told["endpoint"] + "/health/ready") as answer:
            assert json.load(answer)["model_sha256"] == told["model_sha256"]

        kept = typed("rekindle run mine.yaml --set gate.minimum='{auc: 0.9999}' --set train.seed=9 -o json")
        assert (kept.returncode, json.loads(kept.stdout)["verdict"]) == (3, "keep"), kept.stderr
        with urllib.request.urlopen(told["endpoint"] + "/health/ready") as answer:
            assert json.load(answer)["model_sha256"] == told["model_sha256"]
