"""Where a manifest came from: the workflow parameters that say so."""

import base64
import subprocess
import zlib

from rekindle.keys import CACHED

RELEASED = ("git_sha", "config_hash", "manifest_hash")  # a release records these, too
# workflow parameters; `manifest` is packed, and CACHED says what need not run, which changes no result
PROVENANCE = (*RELEASED, "config", "manifest", CACHED)
SCHEDULED, BACKFILL = "scheduled-time", "backfill"  # the same; empty, but in runs of a schedule and of `backfill`
OURS = (*PROVENANCE, SCHEDULED, BACKFILL)


def git_sha() -> str:
    """The commit of the working directory, with -dirty if files differ from it; "" outside a repository."""
    command = ["git", "--no-optional-locks", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def pack(text: str) -> str:
    """A text as a parameter in which Argo substitutes nothing; steps/prepare.py unpacks it."""
    return base64.b64encode(zlib.compress(text.encode(), 9)).decode()
