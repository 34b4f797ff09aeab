"""Check whether the runs that a CronWorkflow has started are active, and remove old runs.

The behaviour follows Argo's workflow/cron/operator.go (enforceHistoryLimit).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from argolocal.common.checked_names import RunName
from argolocal.errors import ArgolocalError, write_stderr
from argolocal.manifest.allowed_values import COMPLETED_PHASES
from argolocal.manifest.types import Object
from argolocal.state.journal import MANIFEST_FILE, RunFiles

# default numbers of runs to keep, as in Argo
KEPT_SUCCEEDED = 3
KEPT_FAILED = 1


def is_active(home: Path, run: str) -> bool:
    """Return True if a run is in the queue of the server, or if a process runs it."""
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
    """Return the uid of the CronWorkflow that has started a run, or ""."""
    for owner in metadata.get("ownerReferences") or []:
        if owner.get("controller"):
            return str(owner.get("uid") or "")
    return ""


def remove_old_runs(home: Path, cron: Object) -> None:
    """Remove the oldest runs of a CronWorkflow, so that the numbers of its succeeded and failed
    runs do not exceed its history limits. Print a warning for a run that cannot be removed."""
    spec = cron["spec"]
    limits = {
        True: spec.get("successfulJobsHistoryLimit", KEPT_SUCCEEDED),
        False: spec.get("failedJobsHistoryLimit", KEPT_FAILED),
    }
    ended_runs = _find_ended_runs(home, cron)
    for has_succeeded, limit in limits.items():
        runs = [run for run in ended_runs if (run[1] == "Succeeded") is has_succeeded]
        runs.sort(key=lambda run: run[2], reverse=True)
        for files, _, _ in runs[max(int(limit), 0) :]:
            try:
                files.remove()
            except ArgolocalError as error:
                write_stderr(f"warning: {files.name} is not removed: {error}")


def _find_ended_runs(home: Path, cron: Object) -> list[tuple[RunFiles, str, str]]:
    """Return (files, phase, end time) of each run of a CronWorkflow that has ended."""
    name = cron["metadata"]["name"]
    ended_runs = []
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
            end_time = str(status.get("finishedAt") or "")
            ended_runs.append((files, status["phase"], end_time))

    return ended_runs
