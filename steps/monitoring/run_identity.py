"""Compute an identity of the code that a run loads, and check that the identity covers all of the
code. A scheduled run may skip the training, because nothing has changed, only if the identity
covers all of its code.
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rekindle import StorageError, Store, project
from rekindle.cache import code, loaded, run_code
from rekindle.cache.uncovered import read_uncovered_reasons
from rekindle.kubernetes_names import S3_BUCKET
from rekindle.program.processes import program_code
from rekindle.tracking import WORKFLOW, RunData

# tag of a run with the reason why its code cannot be compared with the code of other runs
UNCOVERED_TAG = "code.uncovered"


@dataclass(frozen=True)
class RunIdentity:
    """The identity of a run's code. `uncovered`: reason why the identity does not cover all files
    that the run loads, or ""."""

    code: str
    uncovered: str = ""


def find(manifest: Mapping[str, Any], extra_module_names: Iterable[str]) -> RunIdentity:
    """Return the identity of the code of a run, which covers the modules and files that the run's
    manifest names, `extra_module_names`, and everything that these modules import."""
    search_folders = project.search_path()
    module_names = sorted(
        {*run_code.list_named_modules(manifest, search_folders), *extra_module_names}
    )
    code_identity = code.code_identity(module_names)

    uncovered_reason = run_code.reason_other_images(manifest)
    # if all pods use one image that is pinned by digest, the image contains all of the code
    if not uncovered_reason and not code_identity.startswith(code.IMAGE_DIGEST):
        program_sections = run_code.program_sections(manifest)
        uncovered_reason = program_code.explain_unknown_code(
            program_sections, module_names, search_folders
        )
        uncovered_reason = uncovered_reason or loaded.reason_uncovered(module_names)
    return RunIdentity(code_identity, uncovered_reason)


def why_uncovered(last_run: RunData, manifest: Mapping[str, Any]) -> str:
    """Return the reason why the code identity of an earlier run does not cover all files that the
    run loaded, or "" if the identity covers all files."""
    if UNCOVERED_TAG in last_run.tags:
        return f"in the earlier run, {last_run.tags[UNCOVERED_TAG]}"
    if not os.environ.get(S3_BUCKET):
        return ""

    run_name = last_run.tags[WORKFLOW]
    try:
        object_store = Store.from_env().short_retries()
        reason_by_task = read_uncovered_reasons(object_store, run_name, _list_task_names(manifest))
    except StorageError as error:
        return f"it is unknown which files {run_name} has loaded ({error})"
    return next(
        (f"in {run_name}/{task_name}, {reason}" for task_name, reason in reason_by_task.items()), ""
    )


def _list_task_names(manifest: Mapping[str, Any]) -> Iterator[str]:
    for template in manifest["spec"].get("templates") or []:
        for task in (template.get("dag") or {}).get("tasks") or []:
            yield task["name"]
