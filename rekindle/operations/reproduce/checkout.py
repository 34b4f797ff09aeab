"""Writes a commit's files to a separate folder, without changing the repository's branches, index
or work tree."""

import re
from pathlib import Path

from rekindle import project
from rekindle.blocks.manifest.repository import GitError, open_repository
from rekindle.errors import ConfigError

PARTIAL_CLONE = re.compile(r"unable to read|missing blob|could not fetch")


def find_commit(revision: str) -> str:
    """Return the sha of a commit in the project's repository; "" if it does not exist. Raises
    ConfigError."""
    if not revision:
        return ""

    try:
        with open_repository(project.root()) as repository:
            if repository:
                return repository.find_commit(revision)
            return ""
    except GitError as error:
        raise ConfigError(str(error)) from error


def check_out(commit: str, folder: Path) -> Path:
    """Write the files of a commit to `folder`; return the folder of the project in it. Raises
    ConfigError."""
    folder.mkdir()
    root = project.root()

    try:
        with open_repository(root) as repository:
            if not repository:
                raise ConfigError(
                    f"{root} is not in a git repository: run the command in the folder of the"
                    " project."
                )

            repository.check_out(commit, folder)
            inner = root.relative_to(repository.top)
    except GitError as error:
        remedy = ""
        if PARTIAL_CLONE.search(str(error)):
            remedy = (
                ". A partial clone gets the missing files by `git fetch --refetch --no-filter`."
            )

        raise ConfigError(f"commit {commit} cannot be checked out: {error}{remedy}") from error

    project_folder = folder / inner
    if not project_folder.is_dir():
        raise ConfigError(
            f"commit {commit} does not have the folder {inner}: run the command in the folder of"
            " the project, in the repository that the release was made from."
        )

    return project_folder
