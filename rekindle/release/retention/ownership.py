"""Marks of runs in the object store: which objects below RUN/ the run owns, and when it ended.

    RUN/.rekindle.json

A run writes its mark before its first artifact. Retention deletes nothing of a run without a mark
in this store, and of a run with a mark only what the mark names: everything below RUN/ if the name
of the run was generated, since nothing else can have had this name; otherwise RUN/TASK/ of the
tasks whose folders were empty when the run began. A mark in a shared folder of the store is
ignored: clients of MLflow, for example, can write objects to its folder.

The marks are numbered in the order of their last change, so that this order does not depend on
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
# characters that the API server appends to generateName
SUFFIX = re.compile("[bcdfghjklmnpqrstvwxz2456789]{5}")
GENERATED = re.compile(f".+{SUFFIX.pattern}")
MAX_PREFIX_LENGTH = 58
MAX_DIGITS = 18  # of the number of a mark
# folders of the object store that a run of the same name does not own
SHARED_FOLDERS = {"releases", "cache", "cache-claims", "cache-code", "mlflow", "data"}


class Mark(BaseModel):
    """The mark of a run. `number`: position in the order of the marks. `whole`: the run owns its
    whole folder.

    `ended`: Unix time; None while the run is active. `counted`: False for a run of a backfill.
    `run_id`: its record in MLflow; "" if the run has not reported its end. `uid`: of the workflow;
    "" if unknown.
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
    uid: str = ""

    def is_of(self, uid: str) -> bool:
        """False if another run of the same name has replaced the mark of the workflow `uid`."""
        return not uid or not self.uid or self.uid == uid

    def owns(self, run: RunName, key: str) -> bool:
        """True if the object with this key belongs to the run."""
        folder, _, rest = key.partition("/")
        task, slash, _ = rest.partition("/")
        # a mark may be forged; only a generated name shows that the whole folder is of this run
        owns_folder = self.whole and GENERATED.fullmatch(run) is not None
        if folder != run:
            return False
        if not slash:  # an object directly in the folder
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
    """Mark the folder of a run that begins or is resumed. Raises StorageError.

    `workflow`: the workflow with its name and its tasks. `is_first`: True if no task of the run has
    written artifacts yet. A folder with objects then belongs to somebody else, even if the name of
    the run looks generated: a manifest may have both a name and a generateName. `counted`: False
    for a run of a backfill.
    """
    run = RunName(workflow["metadata"]["name"], "metadata.name")
    if run in SHARED_FOLDERS:
        return

    own_id = store_id(store)
    has_new_name = is_generated(workflow["metadata"])

    while True:
        mark, etag = _read(store, run)
        if mark and mark.store == own_id:
            own_mark = mark
        else:
            own_mark = Mark(store=own_id, pipeline=pipeline, number=0)

        tasks = own_mark.tasks
        whole = own_mark.whole or (has_new_name and not (is_first and _has_objects(store, run)))
        if not whole:
            folders = [task for task in _folders(run, workflow) if task not in tasks]
            tasks = [*tasks, *(task for task in folders if _is_empty(store, run, task))]

        new_mark = Mark(
            store=own_id,
            pipeline=pipeline,
            number=_next_number(store),
            whole=whole,
            tasks=tasks,
            counted=counted,
            run_id=own_mark.run_id,
            uid=workflow["metadata"].get("uid") or own_mark.uid,
        )
        if _write(store, run, new_mark, etag):
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
    """Record the end of a run, and its record `run_id` in MLflow. Raises StorageError.

    A run that has not marked its folder owns it only if its name was generated. `counted`: False
    for a run of a backfill, also if its mark does not say it.
    """
    run = RunName(workflow["metadata"]["name"], "metadata.name")
    if run in SHARED_FOLDERS:
        return

    own_id = store_id(store)
    while True:
        mark, etag = _read(store, run)
        if not mark or mark.store != own_id:
            whole = is_generated(workflow["metadata"])
            mark = Mark(store=own_id, pipeline=pipeline, number=0, whole=whole)

        change = {
            "number": _next_number(store),
            "ended": time.time(),
            "succeeded": succeeded,
            "counted": mark.counted and counted,
            "run_id": run_id or mark.run_id,
        }
        if _write(store, run, mark.model_copy(update=change), etag):
            return


def read(store: Store, run: RunName) -> Mark | None:
    """Return the mark of a run in this store, or None. Raises StorageError."""
    if run in SHARED_FOLDERS:
        return None
    mark, _ = _read(store, run)
    if mark and mark.store == store_id(store):
        return mark
    return None


def has_artifacts(store: Store, run: RunName) -> bool:
    """True if the store has objects that the run owns. Raises StorageError."""
    mark = read(store, run)
    keys = (item.key for item in store.list(f"{run}/") if item.key != key_of(run))
    return mark is not None and any(mark.owns(run, key) for key in keys)


def key_of(run: RunName) -> str:
    return f"{run}/{FILE}"


def is_generated(metadata: Mapping[str, Any]) -> bool:
    """True if the API server has appended random characters to the name."""
    name = metadata.get("name")
    prefix = metadata.get("generateName")
    if not isinstance(name, str) or not isinstance(prefix, str) or not prefix:
        return False
    stem = prefix[:MAX_PREFIX_LENGTH]
    return name.startswith(stem) and SUFFIX.fullmatch(name.removeprefix(stem)) is not None


def _folders(run: RunName, workflow: Mapping[str, Any]) -> list[str]:
    """Return the folders below RUN/ that a run writes: of its tasks, and of its pods (the name of
    the run)."""
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
    """True if the folder of a task is empty; for the name of the run, if the folders of all its
    pods are."""
    prefix = f"{run}/{run}" if folder == run else f"{run}/{folder}/"
    return next(iter(store.list(prefix)), None) is None


def _has_objects(store: Store, run: RunName) -> bool:
    """True if the folder of a run has objects other than the mark."""
    return any(item.key != key_of(run) for item in store.list(f"{run}/"))


def _next_number(store: Store) -> int:
    """Return a number above the last one, and at least the Unix time in milliseconds.

    If the last number was lost, the next run would otherwise be the oldest.
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


def _read(store: Store, run: RunName) -> tuple[Mark | None, str | None]:
    try:
        data, etag = store.get_with_etag(key_of(run))
    except NotFound:
        return None, None
    try:
        return Mark.model_validate_json(data), etag
    except ValidationError:  # written by somebody else
        return None, etag


def _write(store: Store, run: RunName, mark: Mark, etag: str | None) -> bool:
    """Write a mark unless it has changed since `etag`."""
    try:
        store.put(
            key_of(run), to_json(mark.model_dump()).encode(), if_match=etag, if_absent=etag is None
        )
    except Conflict:
        return False
    return True
