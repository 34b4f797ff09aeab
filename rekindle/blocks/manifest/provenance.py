"""The workflow parameters that record the origin of a manifest."""

import hashlib
import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rekindle import project
from rekindle.keys import CACHED

RELEASED = ("git_sha", "lock_hash", "config_hash", "manifest_hash")  # parameters that are also recorded with a release
PROVENANCE = (*RELEASED, "config", "manifest", CACHED)  # the parameter `manifest` is encoded by `pack`
SCHEDULED, BACKFILL = "scheduled-time", "backfill"  # parameters that only scheduled runs and runs of `backfill` set
RESERVED_PARAMETERS = (*PROVENANCE, SCHEDULED, BACKFILL)  # parameters whose values are not part of the manifest's hash


LOCK_FILES = ("uv.lock", "poetry.lock", "pdm.lock", "Pipfile.lock", "pixi.lock", "requirements.txt")


def parameter(name: str) -> str:
    """Return the template tag for the value of a workflow parameter."""
    return f"{{{{workflow.parameters.{name}}}}}"


def uses_scheduled_time(manifest: Mapping[str, Any]) -> bool:
    """Return True if a template of the manifest uses the scheduled time, for example for a moving window."""
    return SCHEDULED in json.dumps(manifest["spec"].get("templates") or [])


def git_sha() -> str:
    """Return the commit of the project, with -dirty if files were changed; "" outside a repository.

    The repository may be untrusted: programs that its configuration names are not started.
    """
    settings = {"core.fsmonitor": "false", "core.hooksPath": os.devnull}
    filters = _git(["config", "-z", "--show-scope", "--name-only", "--get-regexp", r"^filter\."]).split("\0")
    for scope, name in zip(filters[::2], filters[1::2], strict=False):
        if scope in ("local", "worktree"):  # filters in the user's own git configuration are kept
            settings[name] = "false" if name.endswith(".required") else ""
    flags = ["--porcelain=2", "--branch", "--no-ahead-behind", "--untracked-files=no", "--ignore-submodules=dirty"]
    lines = _git(["--no-optional-locks", "status", *flags], settings).splitlines()
    commit = lines[0].removeprefix("# branch.oid ") if lines else ""
    is_dirty = any(not line.startswith("#") for line in lines)
    return f"{commit}{'-dirty' if is_dirty else ''}" if commit.isalnum() else ""


def lock_file(folder: Path | None = None) -> Path | None:
    """Return the file with the packages of a project (default: of the current project), or None.

    The file may be in a folder above the project, in the same repository.
    """
    folder = folder or project.root()
    for parent in (folder, *folder.parents):
        if file := next((parent / name for name in LOCK_FILES if (parent / name).is_file()), None):
            return file
        if (parent / ".git").exists():
            break
    return None


def lock_hash(folder: Path | None = None) -> str:
    """Return the sha256 of `lock_file`, or ""."""
    file = lock_file(folder)
    return hashlib.sha256(file.read_bytes()).hexdigest() if file else ""


def _git(arguments: list[str], settings: Mapping[str, str] | None = None) -> str:
    """Run git with `settings` and without network access; return its output, or "" if it fails."""
    # index of our first setting, after the user's settings
    settings, first_index = settings or {}, int(os.environ.get("GIT_CONFIG_COUNT") or 0)
    variables = {**os.environ, "GIT_ALLOW_PROTOCOL": "", "GIT_CONFIG_COUNT": str(first_index + len(settings))}
    for index, (name, value) in enumerate(settings.items(), first_index):
        variables |= {f"GIT_CONFIG_KEY_{index}": name, f"GIT_CONFIG_VALUE_{index}": value}
    try:
        process = subprocess.run(
            ["git", *arguments],
            cwd=project.root(),
            env=variables,
            capture_output=True,
            text=True,
            errors="surrogateescape",
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return process.stdout if process.returncode == 0 else ""
