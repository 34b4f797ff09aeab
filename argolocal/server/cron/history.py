"""The runs that a CronWorkflow has started: whether they have ended, and the removal of old ones.

Source: Argo's workflow/cron/operator.go, enforceHistoryLimit.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from argolocal.common.checked_names import RunName
from argolocal.errors import ArgolocalError, write_stderr
from argolocal.manifest.allowed_values import COMPLETED_PHASES
from argolocal.manifest.types import Object
from argolocal.state.journal import MANIFEST_FILE, RunFiles

KEPT_SUCCEEDED = 3
KEPT_FAILED = 1


def is_active(home: Path, run: str) -> bool:
    """Return True while the server has not run a queued run to its end."""
    files = RunFiles(home, run)
    return files.queue_entry.exists() or files.runner() is not None


def read_final_phase(home: Path, run: str) -> str:
    """Return the phase of a run that has ended, or "" if it was removed or is unreadable."""
    files = RunFiles(home, run)
    try:
        phase = files.load()[0]["phase"]
    except ArgolocalError:
        return ""
    return phase if phase in COMPLETED_PHASES else ""


def owner_uid(metadata: Mapping[str, Any]) -> str:
    """Return the uid of the CronWorkflow that a run belongs to, or ""."""
    for owner in metadata.get("ownerReferences") or []:
        if owner.get("controller"):
            return str(owner.get("uid") or "")
    return ""


def remove_old_runs(home: Path, cron: Object) -> None:
    """Remove the runs of a CronWorkflow beyond its history limits, oldest first."""
    spec = cron["spec"]
    limits = {
        True: spec.get("successfulJobsHistoryLimit", KEPT_SUCCEEDED),
        False: spec.get("failedJobsHistoryLimit", KEPT_FAILED),
    }
    ended = _find_ended_runs(home, cron)
    for has_succeeded, limit in limits.items():
        runs = [run for run in ended if (run[1] == "Succeeded") is has_succeeded]
        runs.sort(key=lambda run: run[2], reverse=True)
        for files, _, _ in runs[max(int(limit), 0) :]:
            try:
                files.remove()
            except ArgolocalError as error:
                write_stderr(f"warning: {files.name} is not removed: {error}")


def _find_ended_runs(home: Path, cron: Object) -> list[tuple[RunFiles, str, str]]:
    """Return the ended runs of a CronWorkflow with their phase and the time of their end."""
    name = cron["metadata"]["name"]
    ended = []
    for folder in (home / "runs").glob(f"{name}-*"):
        run_name = RunName.parse_or_none(folder.name)
        if not run_name or not folder.name.removeprefix(f"{name}-").isdecimal():
            continue
        files = RunFiles(home, run_name)
        if is_active(home, run_name) or not (files.root / MANIFEST_FILE).exists():
            continue
        try:
            status, _ = files.load()
            uid = owner_uid(files.workflow()["metadata"])
        except ArgolocalError:
            continue
        if uid == cron["metadata"]["uid"] and status["phase"] in COMPLETED_PHASES:
            ended.append((files, status["phase"], str(status.get("finishedAt") or "")))
    return ended
