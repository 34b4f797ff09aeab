"""The workflow parameters that record where a manifest comes from."""

import hashlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from argolocal.common.json_text import to_json
from rekindle import project
from rekindle.blocks.manifest.repository import GitError, open_repository
from rekindle.keys import CACHED_PARAMETER

# workflow parameters that are also recorded with a release
RELEASE_PARAMETERS = ("git_sha", "lock_hash", "config_hash", "manifest_hash")
# the value of `manifest` is encoded by `step.encode_parameter`
PROVENANCE_PARAMETERS = (*RELEASE_PARAMETERS, "config", "manifest", CACHED_PARAMETER)
# workflow parameters that are set only by scheduled runs and `rekindle backfill`
SCHEDULED_TIME = "scheduled-time"
# value of the parameter `scheduled-time` in a schedule, in which Argo inserts the time
SCHEDULED_TIME_TAG = "{{workflow.scheduledTime}}"
BACKFILL = "backfill"
# workflow parameters whose values do not affect the manifest's hash
RESERVED_PARAMETERS = (*PROVENANCE_PARAMETERS, SCHEDULED_TIME, BACKFILL)

LOCK_FILES = ("uv.lock", "poetry.lock", "pdm.lock", "Pipfile.lock", "pixi.lock", "requirements.txt")


def parameter_tag(parameter_name: str) -> str:
    """Return the template tag of a workflow parameter."""
    return f"{{{{workflow.parameters.{parameter_name}}}}}"


def uses_scheduled_time(manifest: Mapping[str, Any]) -> bool:
    """Return True if a template of the manifest refers to the scheduled time, for example because
    the data is a moving window."""
    return SCHEDULED_TIME in to_json(manifest["spec"].get("templates") or [])


def read_git_sha() -> str:
    """Return the id of the project's current commit, with the suffix -dirty if tracked files were
    changed; "" outside a git repository."""
    try:
        with open_repository(project.current_root()) as repository:
            if repository:
                return repository.read_commit()
            return ""
    except GitError as error:
        sys.stderr.write(f"warning: the manifest does not name a commit: {error}\n")
        return ""


def find_lock_file(project_folder: Path | None = None) -> Path | None:
    """Return the lock file with the pinned packages of a project (default: the current project).

    The lock file may be in a parent folder in the same repository. Return None if the project does
    not have a lock file.
    """
    project_folder = project_folder or project.current_root()
    for ancestor_folder in (project_folder, *project_folder.parents):
        file = next(
            (ancestor_folder / name for name in LOCK_FILES if (ancestor_folder / name).is_file()),
            None,
        )
        if file:
            return file
        if (ancestor_folder / ".git").exists():
            break
    return None


def hash_lock_file(project_folder: Path | None = None) -> str:
    """Return the sha256 of the project's lock file; "" if the project does not have a lock file."""
    file = find_lock_file(project_folder)
    if file:
        return hashlib.sha256(file.read_bytes()).hexdigest()
    return ""
