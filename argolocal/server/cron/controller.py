"""The controller of a home's CronWorkflows: it starts their runs, and keeps their status.

    controller = CronController(cluster, objects, clock=time.time)
    controller.look()    # several times in a second

A run is named NAME-UNIXTIME after its scheduled time, so it cannot start twice. The order of the
writes lets a server that was killed at any point continue: the run, the status of the CronWorkflow,
what was decided (`cron/NAME.json` in the home). Source: Argo's workflow/cron/operator.go.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from argolocal.common.files import write_atomically
from argolocal.common.json_text import read_object, to_json
from argolocal.errors import ArgolocalError, NodeError, describe, write_stderr
from argolocal.interfaces import Cluster
from argolocal.language.functions import ExprError
from argolocal.language.gofmt import format_timestamp
from argolocal.manifest import object_labels
from argolocal.manifest.allowed_values import API_VERSION
from argolocal.manifest.types import Object
from argolocal.runner import requests
from argolocal.runner.requests import RunRequest
from argolocal.server.cron import conditions, history
from argolocal.server.cron.progress import (
    Decision,
    Missed,
    Progress,
    decide,
    describe_schedule,
    find_next,
)
from argolocal.server.queue import submit
from argolocal.state.journal import MANIFEST_FILE, QUEUE_FOLDER, RunExists, RunFiles
from argolocal.state.stored_objects import ObjectMissing, StoredObjects

KIND = "CronWorkflow"
FOLDER = "cron"
# annotation with the folders of Python modules for the pods of a schedule's runs
PATH_ANNOTATION = "argolocal/module-path"
# labels of a CronWorkflow that its runs get
PROPAGATED_LABELS = (object_labels.CONTROLLER_INSTANCE, *object_labels.CREATOR)
SPEC_ERROR = "SpecError"
SUBMISSION_ERROR = "SubmissionError"
# a look that follows the last one within so many seconds has missed nothing
MAX_PAUSE_S = 60.0
TERMINATE_TIMEOUT_S = 1.0
INVALID = (ArgolocalError, ValueError, KeyError, TypeError, OSError)


class CronController:
    """Starts the runs of all CronWorkflows. Only the server of a home uses it."""

    def __init__(
        self, cluster: Cluster, objects: StoredObjects, clock: Callable[[], float]
    ) -> None:
        self.cluster = cluster
        self.objects = objects
        self.clock = clock
        self.last_look: float | None = None
        self.version = -1
        self.crons: dict[str, Object] = {}
        self.progress: dict[str, Progress] = {}
        # name of a CronWorkflow → its next scheduled time
        self.next_times: dict[str, float] = {}
        # name of a CronWorkflow → the last warning about it
        self.messages: dict[str, str] = {}

    def look(self) -> None:
        """Start the runs that are due now, and update the status of the CronWorkflows."""
        now = self.clock()
        is_continuous = self.last_look is not None and 0 <= now - self.last_look <= MAX_PAUSE_S
        self._read_objects()

        for name in list(self.crons):
            with self._warnings(name):
                self._reconcile_active(name)
                if not is_continuous or self.next_times.get(name, 0.0) <= now:
                    self._look_at(name, now, is_continuous)
        self.last_look = now

    def _read_objects(self) -> None:
        version = self.objects.version()
        if version == self.version:
            return

        names = self.objects.names(KIND)
        for name in self.crons.keys() - set(names):
            self.progress.pop(name, None)
            self._progress_file(name).unlink(missing_ok=True)

        self.crons = {}
        self.next_times = {}
        for name in names:
            with self._warnings(name):
                self._read_object(name)
        self.version = version

    def _read_object(self, name: str) -> None:
        cron = self.objects.get(KIND, name)
        labels = cron["metadata"].get("labels") or {}
        if labels.get(object_labels.CRON_WORKFLOW_COMPLETED) == "true":
            return

        if self.last_look is None:
            self.progress.update(read_progress(self.cluster.home, name))
        self.crons[name] = cron
        if self.last_look is None:
            self._restore_active(name)

    @contextmanager
    def _warnings(self, name: str) -> Iterator[None]:
        """Print an error that concerns one CronWorkflow, once, so that the others continue."""
        try:
            yield
        except ObjectMissing:
            # it was deleted in this moment
            return
        except INVALID as error:
            message = f"the CronWorkflow {name}: {describe(error)}"
            if self.messages.get(name) != message:
                write_stderr(f"warning: {message}")
            self.messages[name] = message

    def _look_at(self, name: str, now: float, is_continuous: bool) -> None:
        cron = self.crons[name]
        try:
            decision = decide(cron, self.progress.get(name), now, is_continuous)
            self.next_times[name] = find_next(cron, now) or float("inf")
        except INVALID as error:
            self._set_condition(name, SPEC_ERROR, str(error))
            self.next_times[name] = float("inf")
            return

        progress = decision.progress.add_missed(
            [time for time in decision.missed if not self._has_run(name, time)], decision.reason
        )
        # a server that was killed may have started it just before
        if decision.due is not None and not self._has_run(name, decision.due):
            reason = self._run(name, decision.due, now)
            if reason:
                progress = progress.add_missed([decision.due], reason)

        is_changed = self._must_store(name, decision, is_continuous)
        self.progress[name] = progress
        if is_changed:
            self._write_progress(name)

    def _must_store(self, name: str, decision: Decision, is_continuous: bool) -> bool:
        previous = self.progress.get(name)
        is_other_schedule = (
            previous is None
            or previous.uid != decision.progress.uid
            or previous.schedule != decision.progress.schedule
        )
        return decision.is_new or is_other_schedule or not is_continuous

    def _run(self, name: str, time: int, now: float) -> str:
        """Start the run of a scheduled time, or return the reason why it does not start."""
        cron = self.crons[name]
        spec = cron["spec"]
        if spec.get("suspend"):
            return "the schedule was suspended"
        if self._stop_if_needed(name):
            return "stopStrategy has ended the schedule"

        try:
            if not conditions.may_run(cron, now):
                return "when was false"
        except (NodeError, ExprError) as error:
            message = f"run policy error: {error}"
            self._set_condition(name, SUBMISSION_ERROR, message)
            return message

        active = [reference["name"] for reference in _status(cron).get("active") or []]
        policy = spec.get("concurrencyPolicy") or "Allow"
        if policy == "Forbid" and active:
            return f"the previous run {active[-1]} was in progress (concurrencyPolicy: Forbid)"
        if policy == "Replace":
            for run in active:
                self._terminate(run)

        return self._submit(name, time)

    def _submit(self, name: str, time: int) -> str:
        workflow = build_workflow(self.crons[name], time)
        try:
            path = (self.crons[name]["metadata"].get("annotations") or {}).get(PATH_ANNOTATION)
            submit(self.cluster, workflow, path=path)
        except RunExists:
            # as in Argo, for example a user has started a run with this name
            return ""
        except ArgolocalError as error:
            message = f"Failed to submit Workflow: {error}"
            self._set_condition(name, SUBMISSION_ERROR, message)
            return message

        self._add_active(name, workflow["metadata"]["name"], time)
        return ""

    def _terminate(self, run: str) -> None:
        """End the active run of a CronWorkflow that another one replaces."""
        files = RunFiles(self.cluster.home, run)
        if (files.root / MANIFEST_FILE).exists():
            requests.send(files, RunRequest(shutdown="Terminate"), TERMINATE_TIMEOUT_S)

    def _add_active(self, name: str, run: str, time: int) -> None:
        """Note a run that has started in the status."""
        metadata = RunFiles(self.cluster.home, run).workflow()["metadata"]
        reference = {
            "apiVersion": API_VERSION,
            "kind": "Workflow",
            "name": run,
            "namespace": metadata.get("namespace"),
            "uid": metadata["uid"],
        }

        def change(item: Object) -> None:
            status = item.setdefault("status", {})
            if reference not in (status.get("active") or []):
                status["active"] = [*(status.get("active") or []), reference]
            status["phase"] = "Active"
            status["lastScheduledTime"] = format_timestamp(time)
            status["conditions"] = _without_condition(status, SUBMISSION_ERROR, SPEC_ERROR)
            annotations = item["metadata"].setdefault("annotations", {})
            annotations[object_labels.LAST_USED_SCHEDULE] = describe_schedule(item)

        self._update(name, change)

    def _restore_active(self, name: str) -> None:
        """Note the runs that a server has started just before it was killed."""
        known = {reference["uid"] for reference in _status(self.crons[name]).get("active") or []}
        uid = self.crons[name]["metadata"]["uid"]
        for entry in sorted((self.cluster.home / QUEUE_FOLDER).glob(f"{name}-*")):
            time = re.fullmatch(r"\d+", entry.name.removeprefix(f"{name}-"))
            files = RunFiles(self.cluster.home, entry.name)
            if not time or not (files.root / MANIFEST_FILE).exists():
                continue
            metadata = files.workflow()["metadata"]
            if metadata["uid"] not in known and history.owner_uid(metadata) == uid:
                self._add_active(name, files.name, int(time[0]))

    def _reconcile_active(self, name: str) -> None:
        """Count the runs that have ended, and remove old ones."""
        active = _status(self.crons[name]).get("active") or []
        ended = {
            reference["uid"]: history.read_final_phase(self.cluster.home, reference["name"])
            for reference in active
            if not history.is_active(self.cluster.home, reference["name"])
        }
        if not ended:
            return

        def change(item: Object) -> None:
            status = item.setdefault("status", {})
            status["active"] = [
                reference
                for reference in status.get("active") or []
                if reference["uid"] not in ended
            ]
            for phase in ended.values():
                if phase:
                    counter = "succeeded" if phase == "Succeeded" else "failed"
                    status[counter] = (status.get(counter) or 0) + 1

        self._update(name, change)
        self._stop_if_needed(name)
        history.remove_old_runs(self.cluster.home, self.crons[name])

    def _stop_if_needed(self, name: str) -> bool:
        """End the schedule if its stopStrategy demands it. Return True if it has ended."""
        try:
            must_stop = conditions.must_stop(self.crons[name], self.clock())
        except ExprError as error:
            message = f"failed to check CronWorkflow '{name}' stopping condition: {error}"
            self._set_condition(name, SPEC_ERROR, message)
            return False
        if not must_stop:
            return False

        def change(item: Object) -> None:
            item.setdefault("status", {})["phase"] = "Stopped"
            item["metadata"].setdefault("labels", {})[object_labels.CRON_WORKFLOW_COMPLETED] = (
                "true"
            )

        self._update(name, change)
        return True

    def _set_condition(self, name: str, type: str, message: str) -> None:
        condition = {"type": type, "status": "True", "message": message}

        def change(item: Object) -> None:
            status = item.setdefault("status", {})
            status["conditions"] = [*_without_condition(status, type), condition]
            if type == SUBMISSION_ERROR:
                status["failed"] = (status.get("failed") or 0) + 1

        self._update(name, change)

    def _update(self, name: str, change: Callable[[Object], None]) -> None:
        self.crons[name] = self.objects.update(KIND, name, change)

    def _has_run(self, name: str, time: int) -> bool:
        return (RunFiles(self.cluster.home, f"{name}-{time}").root / MANIFEST_FILE).exists()

    def _progress_file(self, name: str) -> Path:
        return self.cluster.home / FOLDER / f"{name}.json"

    def _write_progress(self, name: str) -> None:
        file = self._progress_file(name)
        file.parent.mkdir(exist_ok=True)
        write_atomically(file, to_json(asdict(self.progress[name])), 0o600)


def read_progress(home: Path, name: str) -> dict[str, Progress]:
    """Return the progress of a CronWorkflow by its name; {} if the server has not seen it. Raises
    InvalidDocument."""
    try:
        document = read_object(home / FOLDER / f"{name}.json")
    except FileNotFoundError:
        return {}
    decided = tuple((start, end) for start, end in document["decided"])
    missed = tuple(Missed(**item) for item in document["missed"])
    return {name: Progress(**{**document, "decided": decided, "missed": missed})}


def build_workflow(cron: Object, time: int) -> Object:
    """Return the Workflow of a CronWorkflow for a scheduled time in unix seconds. Source: Argo's
    workflow/common/convert.go."""
    metadata = cron["metadata"]
    own_labels: Mapping[str, Any] = metadata.get("labels") or {}
    added: Mapping[str, Any] = cron["spec"].get("workflowMetadata") or {}
    labels = {key: own_labels[key] for key in PROPAGATED_LABELS if key in own_labels}
    workflow_metadata = {
        "name": f"{metadata['name']}-{time}",
        "labels": {
            **labels,
            object_labels.CRON_WORKFLOW_LABEL: metadata["name"],
            **(added.get("labels") or {}),
        },
        "annotations": {
            object_labels.SCHEDULED_TIME_ANNOTATION: format_timestamp(time),
            **(added.get("annotations") or {}),
        },
        "ownerReferences": [make_owner_reference(metadata)],
    }
    if metadata.get("namespace"):
        workflow_metadata["namespace"] = metadata["namespace"]
    return {
        "apiVersion": API_VERSION,
        "kind": "Workflow",
        "metadata": workflow_metadata,
        "spec": cron["spec"]["workflowSpec"],
    }


def make_owner_reference(metadata: Mapping[str, Any]) -> Object:
    """Return the reference to a CronWorkflow, given its metadata, that its runs contain."""
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "name": metadata["name"],
        "uid": metadata["uid"],
        "controller": True,
        "blockOwnerDeletion": True,
    }


def _status(cron: Object) -> Object:
    return cron.get("status") or {}


def _without_condition(status: Object, *types: str) -> list[Object]:
    return [item for item in status.get("conditions") or [] if item["type"] not in types]
