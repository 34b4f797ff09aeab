"""The metadata of a sharded checkpoint is read without running its pickle."""

import os
import pickle
from pathlib import Path

import pytest
from torch.distributed.checkpoint.state_dict_saver import save

from rekindle.program.dcp_metadata import InvalidMetadata, parse_dcp_metadata
from tests.rekindle.program.folders import shard_metadata


def test_the_files_of_a_real_checkpoint_are_found(tmp_path: Path) -> None:
    import torch

    save({"weight": torch.ones(100), "step": 5}, checkpoint_id=tmp_path / "step_5", no_dist=True)
    metadata = parse_dcp_metadata((tmp_path / "step_5/.metadata").read_bytes())
    shard = tmp_path / "step_5/__0_0.distcp"
    assert metadata.sizes == {shard.name: shard.stat().st_size}
    assert metadata.save_id


def test_a_pickle_in_the_metadata_is_not_executed(tmp_path: Path) -> None:
    class Attack:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.mkdir, (str(tmp_path / "attacked"),)

    with pytest.raises(InvalidMetadata):
        parse_dcp_metadata(pickle.dumps(Attack()))
    assert not (tmp_path / "attacked").exists()


def test_metadata_without_its_end_is_rejected() -> None:
    data = shard_metadata({"__0_0.distcp": 100})
    for size in range(len(data)):
        with pytest.raises(InvalidMetadata):
            parse_dcp_metadata(data[:size])


@pytest.mark.parametrize("path", ["../other", "/etc/passwd", "a/../../b", "", "a\0b"])
def test_metadata_cannot_name_a_file_outside_its_folder(path: str) -> None:
    with pytest.raises(InvalidMetadata):
        parse_dcp_metadata(shard_metadata({path: 100}))
