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
from argolocal.common.files import is_owned_directory, make_owned_directory
from argolocal.manifest.types import Object
from argolocal.state.journal import MANIFEST_FILE, RunFiles

SHARED_MEMORY = Path("/dev/shm")
DIRECTORY_PREFIX = "argolocal-job-"
# name of the file with the path of the run that owns a memory volume
OWNER_FILE = "run"
# a run counts as abandoned if it has not written to its memory volume for this many seconds
ABANDONED_AFTER_S = 3600.0


def shared_memory_path(run_directory: Path, job_name: str) -> Path:
    """Return the directory of the memory volume that a job's pods share.

    The directory's name depends on the workflow's uid, so that another user cannot guess the name
    and create the directory first.
    """
    with suppress(FileNotFoundError):
        job_name += json.loads((run_directory / MANIFEST_FILE).read_text())["metadata"].get(
            "uid", ""
        )
    volume_key = f"{run_directory.resolve()}/{job_name}"
    return (
        SHARED_MEMORY / f"{DIRECTORY_PREFIX}{hashlib.sha256(volume_key.encode()).hexdigest()[:12]}"
    )


def memory_volume_environment(run_directory: Path, job_name: str, spec: Object) -> dict[str, str]:
    """If a pod's `spec` has a memory volume, create the job's directory for it, and return the
    environment variable that contains the path. If the pod has no memory volume, return {}."""
    if not any(
        (volume.get("emptyDir") or {}).get("medium") == "Memory"
        for volume in spec.get("volumes") or []
    ):
        return {}
    volume_directory = shared_memory_path(run_directory, job_name)
    make_owned_directory(volume_directory)
    (volume_directory / OWNER_FILE).write_text(str(run_directory.resolve()))
    return {program.environment_variable("SHM"): str(volume_directory)}


def clean_up_shared_memory() -> None:
    """Remove the memory volumes of deleted runs, and of runs that are not running and have not
    written to the volume for an hour.

    If a run whose memory volume was removed is resumed later, it continues from its checkpoints in
    the object store.
    """
    for volume_directory in SHARED_MEMORY.glob(f"{DIRECTORY_PREFIX}*"):
        # another process may remove the directory at the same time
        with suppress(OSError, InvalidName):
            # Another user may have created the directory with a named pipe in it. Reading a pipe
            # would block.
            if not is_owned_directory(volume_directory):
                continue

            run_directory = Path((volume_directory / OWNER_FILE).read_text())
            last_use_time = max(file.stat().st_mtime for file in volume_directory.iterdir())

            is_abandoned = (
                time.time() - last_use_time > ABANDONED_AFTER_S
                and not RunFiles(run_directory.parents[1], run_directory.name).runner()
            )
            if is_abandoned or not run_directory.exists():
                rmtree(volume_directory, ignore_errors=True)
