"""Memory volumes (`emptyDir: {medium: Memory}`). All pods of a job share one volume, which outlives
the pods' processes."""

import hashlib
import json
import time
from contextlib import suppress
from pathlib import Path
from shutil import rmtree

from argolocal.common import program
from argolocal.common.checked_names import InvalidName
from argolocal.common.files import is_owned, make_owned
from argolocal.manifest.types import Object
from argolocal.state.journal import MANIFEST_FILE, RunFiles

SHARED_MEMORY = Path("/dev/shm")
DIRECTORY_PREFIX = "argolocal-job-"
OWNER_FILE = "run"  # name of the file with the path of the run that owns a memory volume
# a run that has not used its memory volume for this many seconds is unlikely to be resumed
ABANDONED_AFTER_S = 3600.0


def shared_memory(run: Path, job: str) -> Path:
    """Return the directory for the memory volume of a job's pods.

    Its name depends on the workflow's uid, so that no other user can guess the name and create the
    directory first.
    """
    with suppress(FileNotFoundError):
        job += json.loads((run / MANIFEST_FILE).read_text())["metadata"].get("uid", "")
    key = f"{run.resolve()}/{job}"
    return SHARED_MEMORY / f"{DIRECTORY_PREFIX}{hashlib.sha256(key.encode()).hexdigest()[:12]}"


def memory_volume(run: Path, job: str, spec: Object) -> dict[str, str]:
    """Create the memory volume that a job's pods share. Return the environment variable with its
    path, or {} if no volume is a memory volume."""
    if not any(
        (volume.get("emptyDir") or {}).get("medium") == "Memory"
        for volume in spec.get("volumes") or []
    ):
        return {}
    memory = shared_memory(run, job)
    make_owned(memory)
    (memory / OWNER_FILE).write_text(str(run.resolve()))
    return {program.variable("SHM"): str(memory)}


def clean_up_shared_memory() -> None:
    """Remove memory volumes of deleted runs, and of interrupted runs that did not use the volume
    for an hour.

    A run that is resumed later continues from its checkpoints in the object store.
    """
    for memory in SHARED_MEMORY.glob(f"{DIRECTORY_PREFIX}*"):
        # another process may remove the directory at the same time
        with suppress(OSError, InvalidName):
            # check the owner first, because another user may have created a pipe with this name,
            # and reading it would block
            if not is_owned(memory):
                continue

            run = Path((memory / OWNER_FILE).read_text())
            last_use = max(file.stat().st_mtime for file in memory.iterdir())

            is_abandoned = (
                time.time() - last_use > ABANDONED_AFTER_S
                and not RunFiles(run.parents[1], run.name).runner()
            )
            if is_abandoned or not run.exists():
                rmtree(memory, ignore_errors=True)
