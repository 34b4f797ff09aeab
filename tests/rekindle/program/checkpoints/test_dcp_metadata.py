"""The metadata of a sharded checkpoint is read without running its pickle."""

import os
import pickle
import tracemalloc
from pathlib import Path

import pytest
from torch.distributed.checkpoint.state_dict_saver import save

from rekindle.program.checkpoints.dcp_metadata import InvalidMetadata, parse_dcp_metadata
from tests.rekindle.program.checkpoints.folders import make_shard_metadata


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
    data = make_shard_metadata({"__0_0.distcp": 100})
    for size in range(len(data)):
        with pytest.raises(InvalidMetadata):
            parse_dcp_metadata(data[:size])


@pytest.mark.parametrize("path", ["../other", "/etc/passwd", "a/../../b", "", "a\0b"])
def test_metadata_cannot_name_a_file_outside_its_folder(path: str) -> None:
    with pytest.raises(InvalidMetadata):
        parse_dcp_metadata(make_shard_metadata({path: 100}))


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_each_protocol_of_pickle_is_read(protocol: int) -> None:
    metadata = pickle.loads(make_shard_metadata({"a/__0_0.distcp": 1 << 40}))
    (size,) = parse_dcp_metadata(pickle.dumps(metadata, protocol)).sizes.items()
    assert size == ("a/__0_0.distcp", 1 << 40)


def test_a_few_bytes_do_not_fill_the_memory_of_the_pod() -> None:
    """The operation LONG_BINPUT makes CPython's unpickler allocate as much as its number says."""
    tracemalloc.start()
    try:
        with pytest.raises(InvalidMetadata):
            parse_dcp_metadata(b"\x80\x02Nr" + (4_000_000).to_bytes(4, "little") + b".")
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


# 2**100 numbers, as 100 nested pairs of one tuple
DOUBLED_TUPLES = b"K\x01" + 100 * b"2\x86"
FROM_MEMO = b"K\x01\x94" + b"".join(b"h" + bytes([number]) + b"\x86\x94" for number in range(100))


@pytest.mark.parametrize("value", [DOUBLED_TUPLES, FROM_MEMO], ids=["duplicates", "memo"])
@pytest.mark.parametrize("place", [b"%bN", b"\x8c\x0drelative_path%b"], ids=["key", "path"])
def test_a_value_that_is_shared_many_times_does_not_stop_the_uploads(
    value: bytes, place: bytes
) -> None:
    """To compute the hash or the text of the value would take 2**100 steps."""
    new = b"cx\ny\n)\x81"
    pickled_size = new + b"}" + place % value + b"sb"
    data = b"\x80\x02" + new + b"}\x8c\x0cstorage_data}K\x01" + pickled_size + b"ssb."
    with pytest.raises(InvalidMetadata):
        parse_dcp_metadata(data)


@pytest.mark.parametrize("size", [-1, 1 << 62, 1 << 200, True, 1.5])
def test_the_size_of_a_shard_is_a_number_of_bytes(size: object) -> None:
    metadata = pickle.loads(make_shard_metadata({"a": 2}))
    next(iter(metadata.storage_data.values())).length = size
    with pytest.raises(InvalidMetadata):
        parse_dcp_metadata(pickle.dumps(metadata))
