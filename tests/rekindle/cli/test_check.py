"""`rekindle check` and `rekindle lint` of a project's workload, as real processes."""

import json
from pathlib import Path

from tests.rekindle.cli.test_cli import rekindle
from tests.rekindle.training.untrainable import FAULTS, TEMPLATE, write_workload


def write_config(folder: Path, name: str, code: str) -> str:
    sections = write_workload(folder, name, code)
    config = {"name": name, "workload": sections["workload"], "data": sections["data"]}
    (folder / "config.yaml").write_text(json.dumps(config))
    return "config.yaml"


def test_check_shows_model_memory_step_and_prediction(tmp_path: Path) -> None:
    config = write_config(tmp_path, "sound", TEMPLATE)
    done = rekindle("check", config, "--rows", "500", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for line in ("data        500 rows", "batch       float32 [32, 2]", "model       Sequential: 133 parameters"):
        assert line in done.stdout
    for line in ("1.weight: float32 [32, 2]", "bytes of training state per worker", "FLOPs", "metrics     rmse "):
        assert line in done.stdout


def test_an_untrainable_workload_ends_with_exit_code_2(tmp_path: Path) -> None:
    code, sentence = FAULTS["buffer"]
    config = write_config(tmp_path, "buffer", code)
    done = rekindle("lint", config, cwd=tmp_path, REKINDLE_CACHE=str(tmp_path / "c"))
    assert done.returncode == 2
    assert sentence in done.stderr
    done = rekindle("check", config, "-o", "json", cwd=tmp_path)
    assert done.returncode == 2
    report = json.loads(done.stdout)
    assert report["rows"] == 1000
    assert sentence in report["error"]
