"""Collect the code blocks of the documents, write the files that the blocks contain, and run the
commands of the blocks."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.ports import free_port

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
DOCUMENTS = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    ROOT / "template/README.md",
]
# commands that only read: test_blocks.py runs them on all pages
READ_COMMANDS = tuple(
    f"rekindle {name}" for name in ("config", "render", "lint", "check", "platform render", "step")
)
READ_COMMANDS += ("argolocal lint",)
README = ROOT / "README.md"
SERVING = ROOT / "docs/serving.md"
# target of make → its command, for the targets that a test can run
RECIPES = {
    "make run": "rekindle run configs/demo.yaml",
    "make test": "python -m pytest -n 4",
}
# command → file of the test that runs it; some of these commands never end
TESTED_ELSEWHERE = {
    "make test": ".ci/run",
    "rekindle run mine.yaml": "tests/test_end_to_end.py",
    "rekindle demo chaos": "tests/rekindle/demo/test_chaos.py",
    "cd power && make run": "test_project.py",
    "mlflow models serve": "tests/test_end_to_end.py",
    "rekindle ui": "tests/rekindle/page/test_site.py",
    "rekindle server": "tests/rekindle/cli/test_local_schedules.py",
    "argolocal server": "tests/argolocal/server/test_server.py",
    "argolocal ui": "tests/argolocal/page/test_application.py",
    "rekindle sweep configs": "tests/pipelines/test_sweep.py",
}
FILE_NAME = re.compile(r"# ([\w./-]+\.\w+)$")


@dataclass(frozen=True)
class Block:
    """A fenced block of a document; `line` is the line of the block's first fence."""

    document: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.document.relative_to(ROOT)}:{self.line}"

    @property
    def file(self) -> str:
        """Name of the file that the block contains: its first line is `# NAME`; "" if the block is
        not a file."""
        name = FILE_NAME.match(self.text.partition("\n")[0])
        if name:
            return name[1]
        return ""

    @property
    def commands(self) -> list[str]:
        """Commands that a reader types: the lines of a `console` block with a `$`, or all lines of
        an `sh` block."""
        if self.language == "console":
            return [line[2:] for line in self.text.splitlines() if line.startswith("$ ")]
        return self.text.replace("\\\n", "").splitlines()


def list_blocks(document: Path, language: str = "") -> list[Block]:
    """Return the fenced blocks of a document, optionally of one language."""
    text = document.read_text()
    fences = re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    all_blocks = [
        Block(document, text.count("\n", 0, fence.start()) + 1, fence[1], fence[2])
        for fence in fences
    ]
    return [block for block in all_blocks if language in ("", block.language)]


def list_commands(document: Path) -> list[str]:
    """Return the commands that a reader types at a terminal, in the order of the page."""
    return [command for block in list_blocks(document, "console") for command in block.commands]


def typed_by_hand(document: Path) -> list[str]:
    """Return the commands of a page that no other test runs."""
    tested_commands = (*READ_COMMANDS, *TESTED_ELSEWHERE)
    return [
        command
        for command in list_commands(document)
        if not any(tested_command in command for tested_command in tested_commands)
    ]


def write_files(document: Path, folder: Path) -> None:
    """Write the files that the blocks of a document contain."""
    for block in list_blocks(document):
        if block.file:
            (folder / block.file).parent.mkdir(parents=True, exist_ok=True)
            (folder / block.file).write_text(block.text)


@contextmanager
def open_shell(folder: Path, **settings: str) -> Iterator["Shell"]:
    """Yield a shell in `folder` with the commands of the repository; stop the services that the
    commands have started at the end."""
    port = str(free_port())

    inherited_variables = {
        k: v
        for k, v in os.environ.items()
        if not k.startswith(("S3_", "AWS_", "MLFLOW_", "REKINDLE_", "ARGOLOCAL_"))
    }

    # the fixture mlflow_server has set this variable
    if "MLFLOW_TRACKING_URI" in settings and "MLFLOW_TRACKING_TOKEN" in os.environ:
        inherited_variables["MLFLOW_TRACKING_TOKEN"] = os.environ["MLFLOW_TRACKING_TOKEN"]

    path = f"{BIN}:{os.environ['PATH']}"
    opened_shell = Shell(
        folder,
        {
            **inherited_variables,
            "PATH": path,
            "REKINDLE_SERVE__PORT": port,
            "NO_COLOR": "1",
            **settings,
        },
    )
    try:
        yield opened_shell
    finally:
        opened_shell("rekindle down")


class Shell:
    """`shell(command)` runs a command and returns its completed process."""

    def __init__(self, folder: Path, environ: Mapping[str, str]) -> None:
        self.folder = folder
        self.environ = environ

    def __call__(self, command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "-c", command],
            cwd=self.folder,
            env=dict(self.environ),
            capture_output=True,
            text=True,
            timeout=900,
        )
