"""The marks of runs in the object store: RUN/.rekindle.json records which objects below RUN/ the
run owns, and when it ended.

A run writes its mark before its first artifact. Retention deletes no object of a run without a mark
in this store. Of a run with a mark, retention deletes only objects that the run owns: all objects
below RUN/ if the run's name was generated and is thus unique; otherwise those below RUN/TASK/ of
each task whose folder was empty when the run began. A mark in a shared folder of the store is
ignored, since other programs, such as clients of MLflow, can write there.

The marks are numbered in the order of their last changes, which therefore does not depend on
clocks.
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
from rekindle.storage import NotFound, Store, store_id

FILE = ".rekindle.json"
NUMBER_KEY = "run-number"  # object with the number of the last mark
# alphabet of the suffix that the API server appends to generateName
SUFFIX = re.compile("[bcdfghjklmnpqrstvwxz2456789]{5}")
GENERATED = re.compile(f".+{SUFFIX.pattern}")
MAX_PREFIX_LENGTH = 58
MAX_DIGITS = 18  # maximum number of digits in a mark's number
# folders of the object store that never belong to a run, even if its name is equal
SHARED_FOLDERS = {"releases", "cache", "cache-claims", "cache-code", "mlflow", "data"}


class Mark(BaseModel):
    """The mark of a run, RUN/.rekindle.json: which objects below RUN/ the run owns, and when the
    run ended.

    `number`: position in the order of the marks. `whole`: True if the run owns all objects in its
    folder, not only those of `tasks`. `ended`: Unix time of the end of the run; None while the run
    is active. `counted`: True if `keep_runs` counts the run; False for a run of a backfill.
    `run_id`: id of the run's record in MLflow; "" until the run has reported its end. `trial_ids`:
    ids of the records of its trials, if it is a sweep. `uid`: uid of the Workflow; "" if unknown.
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
    run_id: Annotated[str, name_field(ObjectId, optional=True)] = ""
    trial_ids: list[Annotated[str, name_field(ObjectId)]] = Field(default_factory=list)
    uid: str = ""

    def belongs_to(self, uid: str) -> bool:
        """Return True unless the mark belongs to a different Workflow of the same name, with
        another uid."""
        return not uid or not self.uid or self.uid == uid

    def owns(self, run: RunName, key: str) -> bool:
        """Return True if the run owns the object with this key."""
        folder, _, rest = key.partition("/")
        task, slash, _ = rest.partition("/")
        # a mark may be forged, so `whole` counts only for a run whose name looks generated: such a
        # name is unique
        owns_folder = self.whole and GENERATED.fullmatch(run) is not None
        if folder != run:
            return False
        # the object is in no task's folder
        if not slash:
            return owns_folder

        is_pod = run in self.tasks and task.startswith(f"{run}-")
        return owns_folder or task in self.tasks or is_pod


def begin(
    store: Store,
    workflow: Mapping[str, Any],
    pipeline: str,
    *,
    is_first: bool = True,
    counted: bool = True,
) -> None:
    """Write the mark of a run that begins or is resumed. Raises StorageError.

    `workflow`: the Workflow with its name and tasks. `is_first`: True if no task of the run has
    written artifacts yet. In this case, existing objects in the folder of the run belong to another
    owner, even if the name looks generated: a manifest may have both a name and a generateName.
    `counted`: True if `keep_runs` counts the run; False for a run of a backfill.
    """
    run = RunName(workflow["metadata"]["name"], "metadata.name")
    if run in SHARED_FOLDERS:
        return

    own_id = store_id(store)
    has_new_name = has_generated_name(workflow["metadata"])

    while True:
        mark, etag = _read_any_mark(store, run)
        if mark and mark.store == own_id:
            own_mark = mark
        else:
            own_mark = Mark(store=own_id, pipeline=pipeline, number=0)

        tasks = own_mark.tasks
        whole = own_mark.whole or (has_new_name and not (is_first and _has_objects(store, run)))
        if not whole:
            folders = [task for task in _list_folders(run, workflow) if task not in tasks]
            tasks = [*tasks, *(task for task in folders if _is_empty(store, run, task))]

        new_mark = Mark(
            store=own_id,
            pipeline=pipeline,
            number=_next_number(store),
            whole=whole,
            tasks=tasks,
            counted=counted,
            run_id=own_mark.run_id,
            trial_ids=own_mark.trial_ids,
            uid=workflow["metadata"].get("uid") or own_mark.uid,
        )
        if _write_mark(store, run, new_mark, etag):
            return


def end(
    store: Store,
    workflow: Mapping[str, Any],
    pipeline: str,
    succeeded: bool,
    run_id: str = "",
    *,
    counted: bool = True,
) -> None:
    """Record the end of a run, and the id `run_id` of its record in MLflow. Raises StorageError.

    A run without a mark gets one here; it owns its folder only if its name was generated.
    `counted`: False for a run of a backfill, also if its mark lacks the field.
    """
    run = RunName(workflow["metadata"]["name"], "metadata.name")
    if run in SHARED_FOLDERS:
        return

    own_id = store_id(store)
    while True:
        mark, etag = _read_any_mark(store, run)
        if not mark or mark.store != own_id:
            whole = has_generated_name(workflow["metadata"])
            mark = Mark(store=own_id, pipeline=pipeline, number=0, whole=whole)

        change = {
            "number": _next_number(store),
            "ended": time.time(),
            "succeeded": succeeded,
            "counted": mark.counted and counted,
            "run_id": run_id or mark.run_id,
        }
        if _write_mark(store, run, mark.model_copy(update=change), etag):
            return


def record_trial(store: Store, run: RunName, run_id: str) -> None:
    """Record the id of a trial's record in MLflow in the mark of its sweep, if the sweep has one.
    Raises StorageError.

    Retention deletes the records of trials only by these ids, because every client of MLflow can
    create a record with a trial's name.
    """
    while True:
        mark, etag = _read_any_mark(store, run)
        if not mark or mark.store != store_id(store) or run_id in mark.trial_ids:
            return
        change = {"trial_ids": [*mark.trial_ids, run_id]}
        if _write_mark(store, run, mark.model_copy(update=change), etag):
            return


def read(store: Store, run: RunName) -> Mark | None:
    """Return the mark of a run in this store, or None. Raises StorageError."""
    if run in SHARED_FOLDERS:
        return None
    mark, _ = _read_any_mark(store, run)
    if mark and mark.store == store_id(store):
        return mark
    return None


def has_artifacts(store: Store, run: RunName) -> bool:
    """Return True if the store has objects that the run owns. Raises StorageError."""
    mark = read(store, run)
    keys = (item.key for item in store.list(f"{run}/") if item.key != mark_key(run))
    return mark is not None and any(mark.owns(run, key) for key in keys)


def mark_key(run: RunName) -> str:
    return f"{run}/{FILE}"


def has_generated_name(metadata: Mapping[str, Any]) -> bool:
    """Return True if the name is generateName, followed by random characters as the API server
    appends them."""
    name = metadata.get("name")
    prefix = metadata.get("generateName")
    if not isinstance(name, str) or not isinstance(prefix, str) or not prefix:
        return False
    stem = prefix[:MAX_PREFIX_LENGTH]
    return name.startswith(stem) and SUFFIX.fullmatch(name.removeprefix(stem)) is not None


def _list_folders(run: RunName, workflow: Mapping[str, Any]) -> list[str]:
    """Return the folders below RUN/ that a run may write: the names of its tasks, and the name of
    the run, which stands for the folders of all its pods."""
    folders: dict[str, None] = {}
    for template in (workflow.get("spec") or {}).get("templates") or []:
        tasks = list((template.get("dag") or {}).get("tasks") or [])
        for group in template.get("steps") or []:
            tasks += group if isinstance(group, list) else group.get("parallel") or []
        for task in tasks:
            name = TaskName.or_none(task.get("name"))
            if name:
                folders[name] = None
    return [*folders, str(run)]


def _is_empty(store: Store, run: RunName, folder: str) -> bool:
    """Return True if the folder of a task is empty. The name of the run as `folder` stands for the
    folders of all its pods."""
    prefix = f"{run}/{run}" if folder == run else f"{run}/{folder}/"
    return next(iter(store.list(prefix)), None) is None


def _has_objects(store: Store, run: RunName) -> bool:
    """Return True if the folder of a run has objects other than the mark."""
    return any(item.key != mark_key(run) for item in store.list(f"{run}/"))


def _next_number(store: Store) -> int:
    """Return the number of the next mark: the last number plus 1, or the Unix time in milliseconds
    if that is larger.

    The time ensures that new runs do not count as the oldest if the last number is lost.
    """
    while True:
        try:
            data, etag = store.get_with_etag(NUMBER_KEY)
        except NotFound:
            data = b"0"
            etag = None
        last = int(data) if data.isdigit() and len(data) <= MAX_DIGITS else 0
        number = max(last + 1, int(1000 * time.time()))
        with suppress(Conflict):
            store.put(NUMBER_KEY, str(number).encode(), if_match=etag, if_absent=etag is None)
            return number


def _read_any_mark(store: Store, run: RunName) -> tuple[Mark | None, str | None]:
    try:
        data, etag = store.get_with_etag(mark_key(run))
    except NotFound:
        return None, None
    try:
        return Mark.model_validate_json(data), etag
    except ValidationError:  # not a valid mark, so Rekindle has not written this object
        return None, etag


def _write_mark(store: Store, run: RunName, mark: Mark, etag: str | None) -> bool:
    """Write a mark unless it has changed since `etag`. Return True if the mark was written."""
    try:
        store.put(
            mark_key(run),
            to_json(mark.model_dump()).encode(),
            if_match=etag,
            if_absent=etag is None,
        )
    except Conflict:
        return False
    return True
