"""Hostile archives must not write, read or change anything outside of their folder."""

import gzip
import io
import os
import random
import stat
import struct
import subprocess
import sys
import tarfile
import tracemalloc
import zipfile
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from argolocal.pods.archives import ArchiveError, is_tarball, unpack_tar, unpack_zip
from argolocal.pods.artifacts import remove_directory
from argolocal.pods.tarballs import CountedTarEntry, TarEntry, TarStream, open_tar
from tests.effort import count_calls

NAMES = [
    *(
        "a/b",
        "a/b/c",
        "l",
        "l/x",
        "l/l",
        "m/b/x",
        "m",
        "m/x",
        "./a/c",
        "a//b",
        "a",
        "a/../m",
        ".",
        "",
        "/",
        "//a",
        "..",
    ),
    *(
        "../outside",
        "a/../../outside",
        "l/../../outside",
        "/tmp/absolute",
        "x" * 300,
        "a/" * 300 + "x",
        "a\nb",
        "\x1b[2J",
    ),
]
TARGETS = [
    *(
        ".",
        "..",
        "a",
        "a/b",
        "l",
        "m",
        "l/..",
        "l/../..",
        "m/../../outside",
        "../outside",
        "../in/a",
        "../../x",
        "",
    ),
    *(
        "/etc/passwd",
        "/",
        "a/../..",
        "l/l/l/../../..",
        "x" * 300,
        "a/" * 2000,
        "../" * 1300 + "etc/passwd",
    ),
]
TYPES = [
    *(
        tarfile.REGTYPE,
        tarfile.DIRTYPE,
        tarfile.SYMTYPE,
        tarfile.SYMTYPE,
        tarfile.LNKTYPE,
        tarfile.CHRTYPE,
    ),
    *(
        tarfile.BLKTYPE,
        tarfile.FIFOTYPE,
        tarfile.CONTTYPE,
        tarfile.AREGTYPE,
        tarfile.GNUTYPE_SPARSE,
        b"Z",
    ),
]


def make_entry(
    name: str, kind: bytes = tarfile.REGTYPE, target: str = "", **more: Any
) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.type = kind
    entry.linkname = target
    for field, value in more.items():
        setattr(entry, field, value)
    return entry


FORMATS: Any = [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT]


def pack_archive(path: Path, members: Iterable[tarfile.TarInfo]) -> Path:
    with gzip.open(path, "wb", 1) as file:
        for entry in members:
            tar_format = random.Random(entry.name).choice(FORMATS)
            file.write(entry.tobuf(tar_format, errors="surrogateescape"))
            if entry.isreg() and 0 < entry.size < 1 << 20:
                file.write(b"x" * entry.size + b"\0" * (-entry.size % 512))
        file.write(bytes(1024))
    return path


def draw_entries(rng: random.Random) -> list[tarfile.TarInfo]:
    return [
        make_entry(
            rng.choice(NAMES[:10] if rng.random() < 0.9 else NAMES),
            rng.choice(TYPES),
            rng.choice(TARGETS[:12] if rng.random() < 0.8 else TARGETS),
            mode=rng.choice([0o644, 0o7777, 0o000, 0o4755]),
            size=0 if rng.random() < 0.6 else rng.choice([5, 700, 700, 700, 1 << 60]),
            mtime=rng.choice([0, 1e9, 1e9, 1e9, 1e23]),
        )
        for _ in range(rng.randrange(1, 7))
    ]


def read_surroundings(path: Path) -> list[tuple[Any, ...]]:
    """Return the state of the files around the archive: names, modes, contents, times."""
    files = [
        path,
        *(file for file in sorted(path.rglob("*")) if "in" not in file.relative_to(path).parts),
    ]

    return [
        (
            file,
            file.lstat().st_mode,
            file.lstat().st_nlink if file.is_file() else 0,
            file.is_file() and file.read_text(),
        )
        for file in files
    ]


def assert_harmless(root: Path) -> None:
    for folder, directories, files in os.walk(root):
        for name in [*directories, *files]:
            path = Path(folder, name)
            mode = path.lstat().st_mode
            assert stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISLNK(mode), path
            assert stat.S_ISLNK(mode) or not mode & 0o7000, path
            assert stat.S_ISDIR(mode) or path.lstat().st_nlink == 1, path
            assert Path(os.path.realpath(path)).is_relative_to(root), (path, os.readlink(path))


@pytest.mark.slow
def test_a_thousand_hostile_archives_change_no_file_outside_of_their_folder(tmp_path: Path) -> None:
    rng = random.Random(18)
    loaded = 0
    (tmp_path / "place").mkdir()
    (tmp_path / "place/outside").write_text("precious")
    (tmp_path / "x").write_text("precious")
    state_before = read_surroundings(tmp_path)

    for number in range(1000):
        members = draw_entries(rng)
        archive = pack_archive(tmp_path / "place/in.tmp", members)
        target = tmp_path / "place/in"

        try:
            unpack_tar(archive, target)
        except ArchiveError:
            assert not os.path.lexists(target), "nothing half-unpacked is left"
        else:
            loaded += 1
            assert_harmless(target)
            remove_directory(target) if target.is_dir() else target.unlink()

        archive.unlink(missing_ok=True)
        assert read_surroundings(tmp_path) == state_before, (
            number,
            [(entry.name, entry.type, entry.linkname) for entry in members],
        )

    assert loaded > 50, "the harmless among them are unpacked"


@pytest.mark.parametrize(
    "members",
    [
        [
            make_entry("d/e", tarfile.DIRTYPE),
            make_entry("d/e/l", tarfile.SYMTYPE, "../.."),
            make_entry("m", tarfile.SYMTYPE, "d/e/l/.."),
        ],
        [make_entry("a/real", size=1), make_entry("a/out", tarfile.SYMTYPE, "../outside")],
        [
            make_entry("l", tarfile.SYMTYPE, "d"),
            make_entry("d", tarfile.DIRTYPE),
            make_entry("l/x", size=3),
        ],
        [
            make_entry("l", tarfile.SYMTYPE, "d"),
            make_entry("d", tarfile.DIRTYPE),
            make_entry("l/up", tarfile.SYMTYPE, ".."),
        ],
        [make_entry("only", tarfile.SYMTYPE, "outside")],
    ],
    ids=[
        "resolved from elsewhere",
        "beside the moved entry",
        "written through",
        "linked through",
        "a link alone",
    ],
)
def test_a_link_to_a_file_outside_of_the_archive_is_rejected(
    tmp_path: Path, members: list[tarfile.TarInfo]
) -> None:
    (tmp_path / "outside").write_text("precious")
    with pytest.raises(ArchiveError):
        unpack_tar(pack_archive(tmp_path / "in.tmp", members), tmp_path / "in")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["in.tmp", "outside"]


def test_links_to_targets_inside_the_archive_are_unpacked(tmp_path: Path) -> None:
    members = [
        make_entry("tree/up", tarfile.SYMTYPE, "deep/down/../../file"),
        make_entry("tree/deep/down", tarfile.DIRTYPE),
        make_entry("tree/deep/back", tarfile.SYMTYPE, "../up"),
        make_entry("tree/file", size=2),
    ]
    unpack_tar(pack_archive(tmp_path / "in.tmp", members), tmp_path / "in")
    assert (tmp_path / "in/up").read_text() == (tmp_path / "in/deep/back").read_text() == "xx"


def test_an_archive_bomb_is_rejected_before_it_fills_the_disk(tmp_path: Path) -> None:
    many = pack_archive(
        tmp_path / "many", (make_entry(f"d{number}", tarfile.DIRTYPE) for number in range(2000))
    )
    with pytest.raises(
        ArchiveError, match="in has more than 1000 entries: pack fewer, larger files"
    ):
        unpack_tar(many, tmp_path / "in", max_entries=1000)

    deep_archive = pack_archive(
        tmp_path / "deep", [make_entry("/".join(f"{number}" * 150), size=1) for number in range(10)]
    )
    with pytest.raises(ArchiveError, match="in has more than 1000 entries"):
        unpack_tar(deep_archive, tmp_path / "in", max_entries=1000)

    large_archive = pack_archive(tmp_path / "large", [make_entry("zeros", size=1 << 50)])
    with pytest.raises(
        ArchiveError, match=r"in unpacks to more than .* GB, 90% of the free disk space: free some"
    ):
        unpack_tar(large_archive, tmp_path / "in")

    hole = make_entry("hole", tarfile.GNUTYPE_SPARSE, size=1 << 50)
    with pytest.raises(ArchiveError):
        unpack_tar(pack_archive(tmp_path / "hole", [hole]), tmp_path / "in")

    with zipfile.ZipFile(tmp_path / "zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("zeros", bytes(10 << 20))

    with pytest.raises(ArchiveError, match="in unpacks to more than"):
        unpack_zip(tmp_path / "zip", tmp_path / "in", max_disk_share=1e-9)

    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "deep",
        "hole",
        "large",
        "many",
        "zip",
    ]


def test_an_archive_that_raises_an_error_in_zipfile_is_rejected(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "in.tmp", "w") as archive:
        archive.writestr(zipfile.ZipInfo("x"), b"")
    data = (tmp_path / "in.tmp").read_bytes()
    empty_name = data.replace(b"x", b"\0")
    cut = data[:30]
    invalid_end = b"PK\5\6" + b"\xff" * 18
    for archive_bytes in (empty_name, cut, invalid_end):
        (tmp_path / "in.tmp").write_bytes(archive_bytes)
        with pytest.raises(ArchiveError, match="in cannot be unpacked"):
            unpack_zip(tmp_path / "in.tmp", tmp_path / "in")


def test_an_endless_header_costs_neither_memory_nor_time(tmp_path: Path) -> None:
    endless = pack_archive(
        tmp_path / "endless", [make_entry("name", tarfile.GNUTYPE_LONGNAME, size=1 << 33)]
    )
    with pytest.raises(ArchiveError, match="a header of more than"):
        unpack_tar(endless, tmp_path / "in")
    back = make_entry("back", size=-1024)
    # tarfile would read this header for ever
    with gzip.open(tmp_path / "back", "wb") as file:
        file.write(make_entry("first").tobuf() + back.tobuf(tarfile.GNU_FORMAT) + bytes(1024))
    with pytest.raises(ArchiveError):
        unpack_tar(tmp_path / "back", tmp_path / "in")


def make_sparse(
    parts: list[tuple[int, int]], size_bytes: int, stored_bytes: int
) -> tarfile.TarInfo:
    """Return the entry of a sparse file in an archive. `parts`: pairs (offset, length) of the
    file's data."""
    parts_text = ",".join(f"{offset},{length}" for offset, length in parts)
    headers = {
        "GNU.sparse.major": "0",
        "GNU.sparse.minor": "1",
        "GNU.sparse.name": "a",
        "GNU.sparse.map": parts_text,
    }
    return make_entry(
        "a", size=stored_bytes, pax_headers={**headers, "GNU.sparse.size": str(size_bytes)}
    )


def pack_sparse(path: Path, entry: tarfile.TarInfo) -> Path:
    content = b"".join(bytes([65 + number % 26]) * 512 for number in range(-(-entry.size // 512)))
    path.write_bytes(gzip.compress(entry.tobuf(tarfile.PAX_FORMAT) + content + bytes(1024)))
    return path


@pytest.mark.parametrize(
    "parts, message",
    [
        (
            [(number % 2 * (1 << 20) + number // 2 * 512, 512) for number in range(1000)],
            "overlap or are not in order",
        ),
        ([(0, 512), (0, 512)], "overlap or are not in order"),
        ([(0, 512), (1 << 21, 512)], "overlap or are not in order"),
        ([(0, 512), (512, 1 << 20)], "parts of 1049088 bytes, but only 1024 are stored"),
    ],
    ids=["jumps", "overlap", "outside", "more than there is"],
)
def test_a_sparse_file_with_an_unordered_map_is_rejected_as_in_go(
    tmp_path: Path, parts: Any, message: str
) -> None:
    archive = pack_sparse(
        tmp_path / "in.tmp", make_sparse(parts, 1 << 21, 512 * min(len(parts), 1000))
    )
    with pytest.raises(ArchiveError, match=message):
        unpack_tar(archive, tmp_path / "in")
    assert not (tmp_path / "in").exists()


def test_a_sparse_file_is_restored_and_its_holes_use_no_disk_space(tmp_path: Path) -> None:
    archive = pack_sparse(
        tmp_path / "in.tmp", make_sparse([(512, 512), (1 << 29, 512), (1 << 30, 0)], 1 << 30, 1024)
    )
    unpack_tar(archive, tmp_path / "in")
    content = (tmp_path / "in").open("rb")
    assert content.read(1024) == bytes(512) + b"A" * 512
    content.seek(1 << 29)
    assert content.read(1024) == b"B" * 512 + bytes(512)
    assert (tmp_path / "in").stat().st_size == 1 << 30
    assert (tmp_path / "in").stat().st_blocks * 512 < 1 << 20


def test_sparse_archives_of_gnu_tar_are_unpacked(tmp_path: Path) -> None:
    with (tmp_path / "file").open("wb") as file:
        for number in range(50):
            file.seek(number * 65536)
            file.write(b"%d" % number)
    content = (tmp_path / "file").read_bytes()
    for tar_format in ("gnu", "pax"):
        command = ["tar", "--sparse", f"--format={tar_format}", "-czf", "in.tmp", "file"]
        subprocess.run(command, cwd=tmp_path, check=True)
        unpack_tar(tmp_path / "in.tmp", tmp_path / tar_format)
        assert (tmp_path / tar_format).read_bytes() == content


def test_empty_gzip_members_are_not_read_to_the_end(tmp_path: Path) -> None:
    (tmp_path / "in.tmp").write_bytes(gzip.compress(b"") * 1_000_000)
    assert not is_tarball(tmp_path / "in.tmp")
    with pytest.raises(ArchiveError, match="gzip members have fewer than 1024 bytes each"):
        unpack_tar(tmp_path / "in.tmp", tmp_path / "in")

    gzip_stream = io.BytesIO()
    with tarfile.open(fileobj=gzip_stream, mode="w") as tar:
        tar.addfile(make_entry("a", size=20 << 20), io.BytesIO(bytes(20 << 20)))

    blocks = [
        gzip_stream.getvalue()[offset : offset + 1024]
        for offset in range(0, len(gzip_stream.getvalue()), 1024)
    ]
    (tmp_path / "in.tmp").write_bytes(
        b"".join(gzip.compress(block, 1) + b"\0" * 3 for block in blocks)
    )
    assert is_tarball(tmp_path / "in.tmp")
    unpack_tar(tmp_path / "in.tmp", tmp_path / "in")
    assert (tmp_path / "in").stat().st_size == 20 << 20


@pytest.mark.parametrize("padding", [0, 129 << 20], ids=["at the beginning", "behind a large file"])
def test_too_many_entries_are_refused_before_they_are_written(tmp_path: Path, padding: int) -> None:
    with tarfile.open(tmp_path / "in.tmp", "w:gz", compresslevel=1) as tar:
        tar.addfile(make_entry("padding", size=padding), io.BytesIO(bytes(padding)))
        for number in range(6000):
            tar.addfile(make_entry(f"d{number}", tarfile.DIRTYPE))

    mkdir_calls = []

    def count_call(_frame: Any, event: str, function: Any) -> None:
        if event == "c_call" and function is os.mkdir:
            mkdir_calls.append(function)

    sys.setprofile(count_call)
    try:
        with pytest.raises(ArchiveError, match="in has more than 5000 entries"):
            unpack_tar(tmp_path / "in.tmp", tmp_path / "in", max_entries=5000)
    finally:
        sys.setprofile(None)

    assert len(mkdir_calls) <= 1001


@pytest.mark.parametrize("layout", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_an_entry_is_counted_as_it_is_read(tmp_path: Path, layout: int) -> None:
    file = tmp_path / "in.tmp"
    kinds = (tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.AREGTYPE, tarfile.FIFOTYPE)
    with tarfile.open(file, "w:gz", format=layout) as tar:
        for file_bytes in (0, 1, 511, 512, 513, 5000):
            tar.addfile(
                make_entry(f"f{file_bytes}", size=file_bytes), io.BytesIO(bytes(file_bytes))
            )
        for kind in kinds:
            tar.addfile(make_entry(f"k{ord(kind)}/", kind, "target"))
        if layout != tarfile.USTAR_FORMAT:
            tar.addfile(make_entry("ä" * 150, size=700), io.BytesIO(bytes(700)))

    def read(kind: type[TarEntry]) -> list[tuple[bytes, int, int]]:
        with closing(TarStream(file)) as stream, open_tar(stream, kind) as tar:
            stream.budget = sys.maxsize
            return [(item.type, item.size, item.offset_data) for item in tar]

    assert read(CountedTarEntry) == read(TarEntry)


def test_an_entry_is_counted_with_fewer_calls_than_it_is_read(tmp_path: Path) -> None:
    file = tmp_path / "in.tmp"
    with tarfile.open(file, "w:gz", compresslevel=1) as tar:
        for number in range(1000):
            tar.addfile(make_entry(f"d{number}", tarfile.DIRTYPE))

    def read(kind: type[TarEntry]) -> None:
        with closing(TarStream(file)) as stream, open_tar(stream, kind) as tar:
            stream.budget = sys.maxsize
            assert len(tar.getmembers()) == 1000

    assert count_calls(lambda: read(CountedTarEntry)) < count_calls(lambda: read(TarEntry)) / 2


def test_the_entries_of_a_zip_are_counted_before_they_are_read(tmp_path: Path) -> None:
    count = 300_000
    entry = b"PK\1\2" + bytes(24) + struct.pack("<3H", 1, 0, 0) + bytes(12) + b"a"
    end = b"PK\5\6" + struct.pack("<4H2IH", 0, 0, 0xFFFF, 0xFFFF, len(entry) * count, 0, 0)
    (tmp_path / "in.tmp").write_bytes(entry * count + end)
    tracemalloc.start()
    with pytest.raises(ArchiveError, match="it has more than 1000 entries"):
        unpack_zip(tmp_path / "in.tmp", tmp_path / "in", max_entries=1000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 * len(entry) * count, (
        "an object for each entry takes eight times as much as its bytes"
    )


def test_overlapping_zip_entries_are_rejected(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "in.tmp", "w", zipfile.ZIP_DEFLATED) as archive:
        for name in "ab":
            archive.writestr(name, bytes(1 << 20))
        archive.filelist[1].header_offset = 0
        archive.filelist[1].filename = archive.filelist[1].orig_filename = "a"
    with pytest.raises(ArchiveError, match="a overlaps the entry before it"):
        unpack_zip(tmp_path / "in.tmp", tmp_path / "in")


def test_the_limits_of_tarballs_apply_to_zip_files(tmp_path: Path) -> None:
    for name, message in (
        ("/".join("d" * 1900), "more than 200 nested directories"),
        ("/".join("d" * 150), "more than 100 entr"),
    ):
        with zipfile.ZipFile(tmp_path / "in.tmp", "w") as archive:
            archive.writestr(name, b"x")
        with pytest.raises(ArchiveError, match=message):
            unpack_zip(tmp_path / "in.tmp", tmp_path / "in", max_entries=100)
        assert [file.name for file in tmp_path.iterdir()] == ["in.tmp"]
