"""The predictions for the rows of a file are written as JSON lines; if a line has no prediction, an
error names this line."""

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rekindle.errors import DataError
from rekindle.release.predictor import open_predictor
from rekindle.workload import prepare
from steps.scoring.score import score
from tests.rekindle.release import lines


def test_a_prediction_that_is_not_finite_is_named_with_its_line(tmp_path: Path) -> None:
    release = tmp_path / "release"
    prepare(lines, lines.Data(source="none"), release)
    description = {"sha256": "1", "workload": lines.__name__, "model": {}}
    (release / "model.json").write_text(json.dumps(description))
    save_file({"slope": torch.tensor([1e38])}, release / "model.safetensors")
    instances = tmp_path / "new.jsonl"

    instances.write_text('{"x": 0}\n{"x": 2}\n')
    assert score(open_predictor(release), instances, tmp_path / "new.out", 1) == 2
    assert all(map(math.isfinite, map(json.loads, (tmp_path / "new.out").read_text().splitlines())))

    instances.write_text('{"x": 0}\n{"x": 2}\n{"x": 1000}\n')

    with pytest.raises(
        DataError, match=r"NaN or infinity for new\.out, line 3: prediction is inf: "
    ):
        score(open_predictor(release), instances, tmp_path / "new.out", 2)
