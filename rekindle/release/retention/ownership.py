"""The marks of runs in the object store. The mark RUN/.rekindle.json records which objects below
RUN/ the run owns, and when the run ended.

A run writes its mark before its first artifact. Retention never deletes an object of a run that has
no mark in this store. If a run has a mark, retention deletes only the objects that the run owns. A
run whose name was generated, and is thus unique, owns all objects below RUN/. Any other run owns
the objects below RUN/TASK/ of each task whose folder was empty when the run began. A mark in a
shared folder of the object store is ignored, since other programs, such as clients of MLflow, can
write to shared folders.

The marks of runs are numbered in the order of their last changes, so that this order does not
depend on clocks.
"""

import re
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from argolocal.common.json_text import to_json
from rekindle.documents import name_field
from rekindle.errors import Conflict
from rekindle.names import ObjectId, RunName, TaskName
from rekindle.storage import NotFound, Store, read_or_create_store_id

MARK_FILE = ".rekindle.json"
# object with the number of the last mark
NUMBER_KEY = "run-number"
# alphabet of the suffix that the API server appends to generateName
SUFFIX_PATTERN = re.compile("[bcdfghjklmnpqrstvwxz2456789]{5}")
GENERATED_NAME_PATTERN = re.compile(f".+{SUFFIX_PATTERN.pattern}")
MAX_PREFIX_LENGTH = 58
# maximum number of digits in a mark's number
MAX_NUMBER_DIGITS = 18
# folders of the object store that never belong to a run, even if a run has the same name
SHARED_FOLDERS = {"releases", "cache", "cache-claims", "cache-code", "mlflow", "data"}


class RunMark(BaseModel):
    """The mark of a run, RUN/.rekindle.json: which objects below RUN/ the run owns, and when the
    run ended.

    `number`: position in the order of the marks. `whole` is True if the run owns all objects in its
    folder, not only those of `tasks`. `ended`: the Unix time of the end of the run; None while the
    run is active. `counted` is True if `keep_runs` counts the run; False for a run of a backfill.
    `run_id`: id of the run's record in MLflow; "" until the run has reported its end. `trial_ids`:
    ids of the MLflow records of the trials, if the run is a sweep. `uid`: uid of the run's
    Workflow; "" if unknown.
    """

    model_config = ConfigDict(frozen=True, strict=True, allow_inf_nan=False)

    store: str
    pipeline: str
    number: int = Field(ge=0)
    whole: bool = False
    tasks: list[str] = Field(default_factory=list)
    ended: float | None = None
    succeeded: bool = False
    counted: bool = True
    run_id: Annotated[str, name_field(ObjectId, is_optional=True)] = ""
    trial_ids: list[Annotated[str, name_field(ObjectId)]] = Field(default_factory=list)
    uid: str = ""

    def belongs_to(self, workflow_uid: str) -> bool:
        """Return True unless the mark belongs to a different Workflow of the same name, with
        another uid."""
        return not workflow_uid or not self.uid or self.uid == workflow_uid

    def owns(self, run_name: RunName, key: str) -> bool:
        """Return True if the run owns the object with this key."""
        run_folder, _, relative_path = key.partition("/")
        task_folder, separator, _ = relative_path.partition("/")
        # a mark may be forged, so `whole` counts only for a run whose name looks generated, since
        # such a name is unique
        owns_folder = self.whole and GENERATED_NAME_PATTERN.fullmatch(run_name) is not None
        if run_folder != run_name:
            return False
        # a key without a folder of a task does not belong to a task
        if not separator:
            return owns_folder

        is_pod_folder = run_name in self.tasks and task_folder.startswith(f"{run_name}-")
        return owns_folder or task_folder in self.tasks or is_pod_folder


def begin_run(
    object_store: Store,
    workflow: Mapping[str, Any],
    pipeline_name: str,
    *,
    is_first: bool = True,
    is_counted: bool = True,
) -> None:
    """Write the mark of a run that begins or is resumed. Raises StorageError.

    `workflow`: the Workflow with its name and tasks. `is_first` is True if no task of the run has
    written artifacts yet. If no task has written artifacts yet, existing objects in the folder of
    the run belong to another owner, even if the run's name looks generated, because a manifest may
    have both a name and a generateName. `is_counted` is True if `keep_runs` counts the run; False
    for a run of a backfill.
    """
    run_name = RunName(workflow["metadata"]["name"], "metadata.name")
    if run_name in SHARED_FOLDERS:
        return

    own_store_id = read_or_create_store_id(object_store)
    has_new_name = has_generated_name(workflow["metadata"])

    while True:
        recorded_mark, etag = _read_any_mark(object_store, run_name)
        if recorded_mark and recorded_mark.store == own_store_id:
            own_mark = recorded_mark
        else:
            own_mark = RunMark(store=own_store_id, pipeline=pipeline_name, number=0)

        own_tasks = own_mark.tasks
        owns_whole_folder = own_mark.whole or (
            has_new_name and not (is_first and _has_objects(object_store, run_name))
        )
        if not owns_whole_folder:
            new_folders = [
                task_name
                for task_name in _list_folders(run_name, workflow)
                if task_name not in own_tasks
            ]
            own_tasks = [
                *own_tasks,
                *(
                    task_name
                    for task_name in new_folders
                    if _is_folder_empty(object_store, run_name, task_name)
                ),
            ]

        new_mark = RunMark(
            store=own_store_id,
            pipeline=pipeline_name,
            number=_reserve_next_number(object_store),
            whole=owns_whole_folder,
            tasks=own_tasks,
            counted=is_counted,
            run_id=own_mark.run_id,
            trial_ids=own_mark.trial_ids,
            uid=workflow["metadata"].get("uid") or own_mark.uid,
        )
        if _write_mark(object_store, run_name, new_mark, etag):
            return


def end_run(
    object_store: Store,
    workflow: Mapping[str, Any],
    pipeline_name: str,
    has_succeeded: bool,
    run_id: str = "",
    *,
    is_counted: bool = True,
) -> None:
    """Record the end of a run, and the id `run_id` of its record in MLflow. Raises StorageError.

    If the run has no mark, a mark is written, and the run owns its folder only if its name was
    generated. `is_counted` is False for a run of a backfill, also if its mark lacks the field.
    """
    run_name = RunName(workflow["metadata"]["name"], "metadata.name")
    if run_name in SHARED_FOLDERS:
        return

    own_store_id = read_or_create_store_id(object_store)
    while True:
        recorded_mark, etag = _read_any_mark(object_store, run_name)
        if not recorded_mark or recorded_mark.store != own_store_id:
            owns_whole_folder = has_generated_name(workflow["metadata"])
            recorded_mark = RunMark(
                store=own_store_id, pipeline=pipeline_name, number=0, whole=owns_whole_folder
            )

        mark_changes = {
            "number": _reserve_next_number(object_store),
            "ended": time.time(),
            "succeeded": has_succeeded,
            "counted": recorded_mark.counted and is_counted,
            "run_id": run_id or recorded_mark.run_id,
        }
        if _write_mark(object_store, run_name, recorded_mark.model_copy(update=mark_changes), etag):
            return


def record_trial(object_store: Store, run_name: RunName, run_id: str) -> None:
    """Record the id of a trial's record in MLflow in the mark of its sweep, if the sweep has one.
    Raises StorageError.

    Retention deletes the records of trials only by these ids, because every client of MLflow can
    create a record with a trial's name.
    """
    while True:
        recorded_mark, etag = _read_any_mark(object_store, run_name)
        if (
            not recorded_mark
            or recorded_mark.store != read_or_create_store_id(object_store)
            or run_id in recorded_mark.trial_ids
        ):
            return
        mark_changes = {"trial_ids": [*recorded_mark.trial_ids, run_id]}
        if _write_mark(object_store, run_name, recorded_mark.model_copy(update=mark_changes), etag):
            return


def read(object_store: Store, run_name: RunName) -> RunMark | None:
    """Return the mark of a run in this object store, or None. Raises StorageError."""
    if run_name in SHARED_FOLDERS:
        return None
    recorded_mark, _ = _read_any_mark(object_store, run_name)
    if recorded_mark and recorded_mark.store == read_or_create_store_id(object_store):
        return recorded_mark
    return None


def has_artifacts(object_store: Store, run_name: RunName) -> bool:
    """Return True if the object store has objects that the run owns. Raises StorageError."""
    run_mark = read(object_store, run_name)
    artifact_keys = (
        object_entry.key
        for object_entry in object_store.list(f"{run_name}/")
        if object_entry.key != make_mark_key(run_name)
    )
    return run_mark is not None and any(run_mark.owns(run_name, key) for key in artifact_keys)


def make_mark_key(run_name: RunName) -> str:
    return f"{run_name}/{MARK_FILE}"


def has_generated_name(workflow_metadata: Mapping[str, Any]) -> bool:
    """Return True if the name is generateName, followed by random characters as the API server
    appends them."""
    run_name = workflow_metadata.get("name")
    name_prefix = workflow_metadata.get("generateName")
    if not isinstance(run_name, str) or not isinstance(name_prefix, str) or not name_prefix:
        return False
    name_stem = name_prefix[:MAX_PREFIX_LENGTH]
    return (
        run_name.startswith(name_stem)
        and SUFFIX_PATTERN.fullmatch(run_name.removeprefix(name_stem)) is not None
    )


def _list_folders(run_name: RunName, workflow: Mapping[str, Any]) -> list[str]:
    """Return the folders below RUN/ that a run may write: the names of its tasks, and the name of
    the run, which stands for the folders of all its pods."""
    folders: dict[str, None] = {}
    for workflow_template in (workflow.get("spec") or {}).get("templates") or []:
        template_tasks = list((workflow_template.get("dag") or {}).get("tasks") or [])
        for step_group in workflow_template.get("steps") or []:
            template_tasks += (
                step_group if isinstance(step_group, list) else step_group.get("parallel") or []
            )
        for template_task in template_tasks:
            task_name = TaskName.parse_or_none(template_task.get("name"))
            if task_name:
                folders[task_name] = None
    return [*folders, str(run_name)]


def _is_folder_empty(object_store: Store, run_name: RunName, task_folder: str) -> bool:
    """Return True if the folder of a task is empty. The name of the run as `task_folder` stands
    for the folders of all its pods."""
    key_prefix = (
        f"{run_name}/{run_name}" if task_folder == run_name else f"{run_name}/{task_folder}/"
    )
    return next(iter(object_store.list(key_prefix)), None) is None


def _has_objects(object_store: Store, run_name: RunName) -> bool:
    """Return True if the folder of a run has objects other than the mark."""
    return any(
        object_entry.key != make_mark_key(run_name)
        for object_entry in object_store.list(f"{run_name}/")
    )


def _reserve_next_number(object_store: Store) -> int:
    """Return the number of the next mark: the last number plus 1, or the Unix time in milliseconds
    if that is larger.

    The Unix time ensures that new runs do not count as the oldest runs if the last number is lost.
    """
    while True:
        try:
            number_bytes, etag = object_store.get_with_etag(NUMBER_KEY)
        except NotFound:
            number_bytes = b"0"
            etag = None
        last_number = (
            int(number_bytes)
            if number_bytes.isdigit() and len(number_bytes) <= MAX_NUMBER_DIGITS
            else 0
        )
        next_number = max(last_number + 1, int(1000 * time.time()))
        with suppress(Conflict):
            object_store.put(
                NUMBER_KEY, str(next_number).encode(), if_match=etag, if_absent=etag is None
            )
            return next_number


def _read_any_mark(object_store: Store, run_name: RunName) -> tuple[RunMark | None, str | None]:
    try:
        mark_bytes, etag = object_store.get_with_etag(make_mark_key(run_name))
    except NotFound:
        return None, None
    try:
        return RunMark.model_validate_json(mark_bytes), etag
    except ValidationError:
        # the object is not a valid mark, so Rekindle has not written it
        return None, etag


def _write_mark(
    object_store: Store, run_name: RunName, new_mark: RunMark, etag: str | None
) -> bool:
    """Write the mark of a run unless the mark has changed since `etag`. Return True if the mark was
    written."""
    try:
        object_store.put(
            make_mark_key(run_name),
            to_json(new_mark.model_dump()).encode(),
            if_match=etag,
            if_absent=etag is None,
        )
    except Conflict:
        return False
    return True
