"""Where a manifest came from: the workflow parameters that say so."""

import base64
import os
import subprocess
import zlib
from collections.abc import Mapping

from rekindle.keys import CACHED

RELEASED = ("git_sha", "config_hash", "manifest_hash")  # a release records these, too
# workflow parameters; `manifest` is packed, and CACHED says what need not run, which changes no result
PROVENANCE = (*RELEASED, "config", "manifest", CACHED)
SCHEDULED, BACKFILL = "scheduled-time", "backfill"  # the same; empty, but in runs of a schedule and of `backfill`
OURS = (*PROVENANCE, SCHEDULED, BACKFILL)


def parameter(name: str) -> str:
    """The value of a workflow parameter, as Argo fills it in."""
    return f"{{{{workflow.parameters.{name}}}}}"


def git_sha() -> str:
    """The commit of the working directory, with -dirty if files differ from it; "" outside a repository.

    The repository may be a stranger's, whose configuration names programs: none of them is started.
    """
    settings = {"core.fsmonitor": "false", "core.hooksPath": os.devnull}
    listed = _git(["config", "-z", "--show-scope", "--name-only", "--get-regexp", r"^filter\."]).split("\0")
    for scope, name in zip(listed[::2], listed[1::2], strict=False):
        if scope in ("local", "worktree"):  # those of the user's own configuration stay
            settings[name] = "false" if name.endswith(".required") else ""
    flags = ["--porcelain=2", "--branch", "--no-ahead-behind", "--untracked-files=no", "--ignore-submodules=dirty"]
    lines = _git(["--no-optional-locks", "status", *flags], settings).splitlines()
    commit = lines[0].removeprefix("# branch.oid ") if lines else ""
    dirty = any(not line.startswith("#") for line in lines)
    return f"{commit}{'-dirty' if dirty else ''}" if commit.isalnum() else ""


def _git(arguments: list[str], settings: Mapping[str, str] | None = None) -> str:
    """The output of git with these settings, which may fetch nothing; "" if it fails."""
    settings, first = settings or {}, int(os.environ.get("GIT_CONFIG_COUNT") or 0)  # after those of the user
    variables = {**os.environ, "GIT_ALLOW_PROTOCOL": "", "GIT_CONFIG_COUNT": str(first + len(settings))}
    for index, (name, value) in enumerate(settings.items(), first):
        variables |= {f"GIT_CONFIG_KEY_{index}": name, f"GIT_CONFIG_VALUE_{index}": value}
    try:
        done = subprocess.run(
            ["git", *arguments], env=variables, capture_output=True, text=True, errors="surrogateescape", timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def pack(text: str) -> str:
    """A text as a parameter in which Argo substitutes nothing; steps/prepare.py unpacks it."""
    return base64.b64encode(zlib.compress(text.encode(), 9)).decode()
