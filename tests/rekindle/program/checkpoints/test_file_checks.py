"""A malformed file of a program does not count as complete, and the time of its check is
proportional to its size."""

import inspect
import struct
import sys
import zipfile
from pathlib import Path

import pytest

from rekindle.program.checkpoints import file_checks
from rekindle.program.checkpoints.file_checks import FileStructure, check_file
from rekindle.program.checkpoints.folder import list_folder
from tests.rekindle.program.checkpoints.folders import (
    Program,
    huggingface_files,
    make_archive,
    write,
    write_files,
)


@pytest.mark.parametrize("end", ["1e999", "-1e999", "NaN", "9" * 5000, "[]", "null"])
def test_a_strange_size_in_a_safetensors_file_is_not_complete(tmp_path: Path, end: str) -> None:
    header = f'{{"a": {{"data_offsets": [0, {end}]}}}}'.encode()
    file = write(tmp_path / "a.safetensors", struct.pack("<Q", len(header)) + header)
    assert check_file(file).problem == "the safetensors header is malformed"


@pytest.mark.parametrize("kind", [zipfile.ZIP_LZMA, zipfile.ZIP_BZIP2, zipfile.ZIP_DEFLATED])
def test_a_damaged_archive_of_any_kind_is_not_complete(tmp_path: Path, kind: int) -> None:
    file = tmp_path / "a.pt"
    with zipfile.ZipFile(file, "w", kind) as archive:
        archive.writestr("x", bytes(range(256)) * 100)

    data = bytearray(file.read_bytes())
    for index in range(40, 70):
        data[index] ^= 0xFF
    file.write_bytes(data)
    check = check_file(file)
    assert check.structure is FileStructure.ZIP
    assert check.problem.startswith("the zip archive is damaged")


def test_a_small_archive_with_huge_entries_does_not_stop_the_listings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_checks, "MIN_READ_BYTES", 3 << 20)
    file = tmp_path / "a.pt"
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in "ab":
            archive.writestr(name, bytes(20 << 20))

    reads: list[int] = []

    class Counted(zipfile.ZipExtFile):
        def read(self, n: int | None = -1) -> bytes:
            data = super().read(n)
            reads.append(len(data))
            return data

    monkeypatch.setattr(zipfile, "ZipExtFile", Counted)
    assert not check_file(file).problem
    assert 3 << 20 <= sum(reads) < 5 << 20


@pytest.mark.parametrize("name", ["rng_state_3000000000.pth", "random_states_3000000000.pkl"])
def test_a_file_of_a_huge_rank_does_not_stop_the_listings(tmp_path: Path, name: str) -> None:
    program = Program(tmp_path / "checkpoints")
    write(program.folder / "step_1" / name, make_archive())
    assert program.wait() == set()
    assert "is not of this program" in program.watch.incomplete["step_1"]


def test_a_link_that_leads_to_itself_does_not_stop_the_listings(tmp_path: Path) -> None:
    program = Program(tmp_path / "checkpoints", processes=1)
    write_files(program.folder / "checkpoint-5", huggingface_files(5))
    (program.folder / "checkpoint-5/latest").symlink_to("latest")
    assert program.look() == {"checkpoint-5"}


def test_deep_directories_do_not_stop_the_listings(tmp_path: Path) -> None:
    write(tmp_path / "step_1" / ("a/" * 300) / "file", "x")
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack()) + 100)
    try:
        (path,) = list_folder(tmp_path).units["step_1"].files
    finally:
        sys.setrecursionlimit(limit)
    assert path == "a/" * 300 + "file"
