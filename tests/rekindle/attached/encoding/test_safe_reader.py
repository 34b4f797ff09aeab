"""A checkpoint of a shared store cannot run code in the process that loads it."""

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from rekindle.attached.encoding.safe_reader import (
    SafePlanner,
    SafeReader,
    decode_named_values,
    encode_named_values,
)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Malicious:
    """Creates a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.file,)


def restore_state(folder: Path) -> dict[str, Any]:
    state: dict[str, Any] = {"weights": torch.zeros(3), "rest": b"", "step": 0}
    load(state, storage_reader=SafeReader(folder), planner=SafePlanner(), no_dist=True)
    return state


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint"
    state = {"weights": torch.ones(3), "rest": encode_named_values({"seed": [1, 2]}), "step": 7}
    save(state, checkpoint_id=folder, no_dist=True)
    return folder


def test_a_checkpoint_is_restored(checkpoint: Path) -> None:
    state = restore_state(checkpoint)
    assert state["weights"].tolist() == [1, 1, 1]
    assert state["step"] == 7
    assert decode_named_values(state["rest"]) == {"seed": [1, 2]}


def test_malicious_metadata_runs_no_code(checkpoint: Path, tmp_path: Path) -> None:
    file = tmp_path / "attacked"
    (checkpoint / ".metadata").write_bytes(pickle.dumps(Malicious(file)))
    with pytest.raises(BaseException, match="is not a part of metadata"):
        restore_state(checkpoint)
    assert not file.exists()


def test_a_malicious_value_runs_no_code(tmp_path: Path) -> None:
    file = tmp_path / "attacked"
    state = {"weights": torch.ones(3), "rest": Malicious(file), "step": 7}
    save(state, checkpoint_id=tmp_path / "checkpoint", no_dist=True)
    file.unlink(missing_ok=True)
    with pytest.raises(BaseException, match="Weights only load failed"):
        restore_state(tmp_path / "checkpoint")
    with pytest.raises(Exception, match="Weights only load failed"):
        decode_named_values(encode_named_values({"x": Malicious(file)}))
    assert not file.exists()
