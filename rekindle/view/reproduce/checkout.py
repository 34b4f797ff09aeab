"""A commit's files in a folder of their own, without any change of the repository: no branch, index or work tree."""

import os
import subprocess
from pathlib import Path

from rekindle import project
from rekindle.errors import ConfigError


def find_commit(revision: str) -> str:
    """Return the sha of a commit in the project's repository; "" if it does not exist."""
    return _git("rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}") if revision else ""


def check_out(commit: str, folder: Path) -> Path:
    """Write the files of a commit to `folder`; return the folder of the project in it. Raises ConfigError."""
    folder.mkdir()
    index = {"GIT_INDEX_FILE": str(folder.with_suffix(".index"))}
    top = _git("rev-parse", "--show-toplevel")
    inner = _git("rev-parse", "--show-prefix")
    for arguments in (["read-tree", commit], ["checkout-index", "--all", "--force", f"--prefix={folder}/"]):
        process = _run(["-C", top, *arguments], index)
        if process.returncode:
            raise ConfigError(f"commit {commit} cannot be checked out: git says {process.stderr.strip()[:500]}")
    project_folder = folder / inner
    if not project_folder.is_dir():
        raise ConfigError(
            f"commit {commit} does not have the folder {inner}: run the command in the folder of the project, in the "
            "repository that the release was made from."
        )
    return project_folder


def _git(*arguments: str) -> str:
    process = _run([*arguments])
    return process.stdout.strip() if process.returncode == 0 else ""


def _run(arguments: list[str], variables: dict[str, str] | None = None) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, **(variables or {})}
    try:
        return subprocess.run(["git", *arguments], cwd=project.root(), env=environment, capture_output=True, text=True)
    except FileNotFoundError:
        raise ConfigError(
            "git is not installed: the command checks out the commit of the release. Install it."
        ) from None
