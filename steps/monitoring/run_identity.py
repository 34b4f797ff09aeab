"""Computes an identity of the code that a run loads, and checks that it covers all of the code.
Only then may a scheduled run skip the training because nothing has changed.
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rekindle import StorageError, Store, project
from rekindle.cache import code, loaded, run_code
from rekindle.cache.runner import reasons_uncovered
from rekindle.kubernetes_names import S3_BUCKET
from rekindle.program.processes import program_code
from rekindle.tracking import WORKFLOW, RunData

# tag of a run: why its code cannot be compared with the code of other runs
UNCOVERED_TAG = "code.uncovered"


@dataclass(frozen=True)
class RunIdentity:
    """The identity of a run's code. `uncovered`: reason why the identity does not cover all files
    that the run loads, or ""."""

    code: str
    uncovered: str = ""


def find(manifest: Mapping[str, Any], more_modules: Iterable[str]) -> RunIdentity:
    """Return the identity of the code of a run: of the modules and files that its manifest names,
    of `more_modules`, and of everything that they import."""
    folders = project.search_path()
    modules = sorted({*run_code.modules_in(manifest, folders), *more_modules})
    identity = code.code_identity(modules)

    reason = run_code.reason_other_images(manifest)
    # an image contains its pods' code; `reason` is "" if all pods use this image
    if not reason and not identity.startswith(code.IMAGE_DIGEST):
        sections = run_code.program_sections(manifest)
        reason = program_code.reason_unknown(sections, modules, folders)
        reason = reason or loaded.reason_uncovered(modules)
    return RunIdentity(identity, reason)


def why_uncovered(last: RunData, manifest: Mapping[str, Any]) -> str:
    """Return the reason why the identity of an earlier run does not cover all files that it loaded,
    or ""."""
    if UNCOVERED_TAG in last.tags:
        return f"in the earlier run, {last.tags[UNCOVERED_TAG]}"
    if not os.environ.get(S3_BUCKET):
        return ""

    run = last.tags[WORKFLOW]
    try:
        store = Store.from_env().short_retries()
        reasons = reasons_uncovered(store, run, _tasks(manifest))
    except StorageError as error:
        return f"it is unknown which files {run} has loaded ({error})"
    return next((f"in {run}/{task}, {reason}" for task, reason in reasons.items()), "")


def _tasks(manifest: Mapping[str, Any]) -> Iterator[str]:
    for template in manifest["spec"].get("templates") or []:
        for task in (template.get("dag") or {}).get("tasks") or []:
            yield task["name"]
