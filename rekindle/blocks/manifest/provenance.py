"""The workflow parameters that record the origin of a manifest."""

import hashlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from argolocal.common.json_text import to_json
from rekindle import project
from rekindle.blocks.manifest.repository import GitError, open_repository
from rekindle.keys import CACHED

# parameters that are also recorded with a release
RELEASED = ("git_sha", "lock_hash", "config_hash", "manifest_hash")
# the parameter `manifest` is encoded by `pack`
PROVENANCE = (*RELEASED, "config", "manifest", CACHED)
# parameters that only scheduled runs and runs of `backfill` set
SCHEDULED = "scheduled-time"
BACKFILL = "backfill"
# parameters whose values are not part of the manifest's hash
RESERVED_PARAMETERS = (*PROVENANCE, SCHEDULED, BACKFILL)


LOCK_FILES = ("uv.lock", "poetry.lock", "pdm.lock", "Pipfile.lock", "pixi.lock", "requirements.txt")


def parameter(name: str) -> str:
    """Return the template tag for the value of a workflow parameter."""
    return f"{{{{workflow.parameters.{name}}}}}"


def uses_scheduled_time(manifest: Mapping[str, Any]) -> bool:
    """Return True if a template of the manifest uses the scheduled time, for example for a moving
    window."""
    return SCHEDULED in to_json(manifest["spec"].get("templates") or [])


def git_sha() -> str:
    """Return the commit of the project, with -dirty if files were changed; "" outside a
    repository."""
    try:
        with open_repository(project.root()) as repository:
            if repository:
                return repository.commit()
            return ""
    except GitError as error:
        sys.stderr.write(f"warning: the manifest does not name a commit: {error}\n")
        return ""


def lock_file(folder: Path | None = None) -> Path | None:
    """Return the file with the packages of a project (default: of the current project), or None.

    The file may be in a folder above the project, in the same repository.
    """
    folder = folder or project.root()
    for parent in (folder, *folder.parents):
        file = next((parent / name for name in LOCK_FILES if (parent / name).is_file()), None)
        if file:
            return file
        if (parent / ".git").exists():
            break
    return None


def lock_hash(folder: Path | None = None) -> str:
    """Return the sha256 of `lock_file`, or ""."""
    file = lock_file(folder)
    if file:
        return hashlib.sha256(file.read_bytes()).hexdigest()
    return ""
