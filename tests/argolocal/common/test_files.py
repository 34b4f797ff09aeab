"""Reading a file never waits: a file that is not regular, such as a FIFO, is rejected at once."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from argolocal.common.files import read_file_or_pipe, read_regular_file


@pytest.mark.parametrize("kind", ["device", "directory", "FIFO"])
def test_only_a_regular_file_is_read(tmp_path: Path, kind: str) -> None:
    paths = {"device": Path("/dev/zero"), "directory": tmp_path, "FIFO": tmp_path / "fifo"}
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(OSError):
        read_regular_file(paths[kind], 10)


def test_an_input_without_end_is_refused_and_a_pipe_is_read(tmp_path: Path) -> None:
    for path in (Path("/dev/zero"), tmp_path):
        with pytest.raises(OSError):
            read_file_or_pipe(path, 10)
    reader, writer = os.pipe()
    os.write(writer, b"name: a")
    os.close(writer)
    assert read_file_or_pipe(Path(f"/dev/fd/{reader}"), 100) == b"name: a"
    os.close(reader)
    os.mkfifo(tmp_path / "fifo")
    # no process writes to it
    assert read_file_or_pipe(tmp_path / "fifo", 100) == b""


@pytest.mark.fast_cases(4)
@pytest.mark.parametrize("package", ["argolocal", "rekindle"])
@pytest.mark.parametrize(
    "kind", ["loop", "config is a FIFO", "file", "config is a device", "config is a folder"]
)
def test_a_command_names_an_unusual_path_in_one_line(
    tmp_path: Path, package: str, kind: str
) -> None:
    command = ["status"]
    target = str(tmp_path)

    if kind == "loop":
        (tmp_path / f".{package}").symlink_to(f".{package}")
    elif kind == "file":
        (tmp_path / f".{package}").touch()
    else:
        os.mkfifo(tmp_path / "fifo")
        target = {"FIFO": str(tmp_path / "fifo"), "device": "/dev/zero", "folder": str(tmp_path)}[
            kind.split()[-1]
        ]
        command = ["lint", target]

    result = subprocess.run(
        [sys.executable, "-m", package, *command],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=30,
        env={name: value for name, value in os.environ.items() if not name.endswith("_HOME")},
    )

    assert result.returncode in (1, 2), result
    assert target in result.stderr or "is empty" in result.stderr
    assert "Traceback" not in result.stderr, result.stderr
    assert len(result.stderr.splitlines()) <= 3, result.stderr
