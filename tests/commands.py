"""Runs the code blocks of a document: writes its files, runs its commands. For the tests of README and docs."""

import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent


def blocks(document: Path, language: str) -> list[str]:
    """The fenced blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", document.read_text(), re.DOTALL | re.MULTILINE)


def commands(document: Path) -> list[str]:
    """What a reader types, in order."""
    lines = [line for block in blocks(document, "console") for line in block.splitlines()]
    return [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]


def write_files(document: Path, folder: Path) -> None:
    """Blocks whose first line is `# NAME` become files."""
    for language in ("yaml", "python"):
        for block in blocks(document, language):
            (folder / block.splitlines()[0].removeprefix("# ")).write_text(block)


@contextmanager
def shell(folder: Path, **settings: str) -> Iterator["Shell"]:
    """A shell in `folder` with the repository's commands; at the end, what it started is stopped."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("S3_", "AWS_", "MLFLOW_", "REKINDLE_"))}
    path = f"{BIN}:{os.environ['PATH']}"
    opened = Shell(folder, {**kept, "PATH": path, "REKINDLE_SERVE__PORT": port, "NO_COLOR": "1", **settings})
    try:
        yield opened
    finally:
        opened("rekindle down")


class Shell:
    """`shell(command)` → its completed process."""

    def __init__(self, folder: Path, environ: Mapping[str, str]) -> None:
        self.folder, self.environ = folder, environ

    def __call__(self, command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "-c", command],
            cwd=self.folder,
            env=dict(self.environ),
            capture_output=True,
            text=True,
            timeout=300,
        )
