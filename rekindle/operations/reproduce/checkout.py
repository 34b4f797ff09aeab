"""Writes a commit's files to a separate folder, without changing the repository's branches, index
or work tree."""

import re
from pathlib import Path

from rekindle import project
from rekindle.blocks.manifest.repository import GitError, open_repository
from rekindle.errors import ConfigError

PARTIAL_CLONE_ERROR = re.compile(r"unable to read|missing blob|could not fetch")


def find_commit(git_revision: str) -> str:
    """Return the sha of a commit in the project's repository; "" if it does not exist. Raises
    ConfigError."""
    if not git_revision:
        return ""

    try:
        with open_repository(project.current_root()) as repository:
            if repository:
                return repository.find_commit(git_revision)
            return ""
    except GitError as error:
        raise ConfigError(str(error)) from error


def check_out(commit_sha: str, target_folder: Path) -> Path:
    """Write the files of a commit to `target_folder`; return the folder of the project in it.
    Raises ConfigError."""
    target_folder.mkdir()
    project_root = project.current_root()

    try:
        with open_repository(project_root) as repository:
            if not repository:
                raise ConfigError(
                    f"{project_root} is not in a git repository: run the command in the folder of"
                    " the project."
                )

            repository.check_out_commit(commit_sha, target_folder)
            inner_path = project_root.relative_to(repository.work_tree)
    except GitError as error:
        error_remedy = ""
        if PARTIAL_CLONE_ERROR.search(str(error)):
            error_remedy = (
                ". A partial clone gets the missing files by `git fetch --refetch --no-filter`."
            )

        raise ConfigError(
            f"commit {commit_sha} cannot be checked out: {error}{error_remedy}"
        ) from error

    project_folder = target_folder / inner_path
    if not project_folder.is_dir():
        raise ConfigError(
            f"commit {commit_sha} does not have the folder {inner_path}: run the command in the"
            " folder of the project, in the repository that the release was made from."
        )

    return project_folder
