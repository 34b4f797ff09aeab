"""Where a manifest came from: the workflow parameters that say so."""

import subprocess

PROVENANCE = ("git_sha", "config_hash", "manifest_hash")  # workflow parameters


def git_sha() -> str:
    """The commit of the working directory, with -dirty if files differ from it; "" outside a repository."""
    command = ["git", "--no-optional-locks", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
