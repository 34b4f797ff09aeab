"""Volumes of memory, which the pods of an object share: they outlive the processes of these pods."""

import hashlib
import json
import time
from contextlib import suppress
from pathlib import Path
from shutil import rmtree
from typing import Any

from argolocal.common import program
from argolocal.common.files import is_own, make_own
from argolocal.state.journal import RunFiles

SHARED, PREFIX = Path("/dev/shm"), "argolocal-job-"
OWNER = "run"  # file with the path of the run that a memory volume belongs to
ABANDONED = 3600.0  # seconds after which nobody resumes the run
Object = dict[str, Any]


def shared_memory(run: Path, job: str) -> Path:
    """The directory for memory volumes of a job's pods: it outlives their processes, but not the job.

    Its name depends on the workflow's uid, so that no other user can know it and make it before us.
    """
    with suppress(FileNotFoundError):
        job += json.loads((run / "manifest.yaml").read_text())["metadata"].get("uid", "")
    key = f"{run.resolve()}/{job}"
    return SHARED / f"{PREFIX}{hashlib.sha256(key.encode()).hexdigest()[:12]}"


def memory_volume(run: Path, job: str, spec: Object) -> dict[str, str]:
    """Where the memory volume of a pod is, if it has one; the pods of a job share it."""
    if not any((volume.get("emptyDir") or {}).get("medium") == "Memory" for volume in spec.get("volumes") or []):
        return {}
    memory = shared_memory(run, job)
    make_own(memory)
    (memory / OWNER).write_text(str(run.resolve()))
    return {program.variable("SHM"): str(memory)}


def sweep_shared_memory() -> None:
    """Removes what interrupted runs left, an hour after its last use, or at once if the run itself was removed.

    A run that is resumed later goes on from its checkpoints in the object store.
    """
    for memory in SHARED.glob(f"{PREFIX}*"):
        with suppress(OSError):  # removed meanwhile
            if not is_own(memory):  # what another user put there may be a pipe, whose reader waits for ever
                continue
            run = Path((memory / OWNER).read_text())
            used = max(file.stat().st_mtime for file in memory.iterdir())
            abandoned = time.time() - used > ABANDONED and not RunFiles(run.parents[1], run.name).runner()
            if abandoned or not run.exists():
                rmtree(memory, ignore_errors=True)
