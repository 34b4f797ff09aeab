"""The controller that starts the runs of a home's CronWorkflows, and updates the status of the
CronWorkflows.

    controller = CronController(cluster, objects, clock=time.time)
    controller.reconcile()    # several times per second

The name of a run is NAME-UNIXTIME with its scheduled time, so a run cannot start twice. To start a
run, the controller first writes the run, then the status of the CronWorkflow, then the decision
about the scheduled time (`cron/NAME.json` in the home). Because the decision is written last,
another server can continue after a server that was killed at any point. Source: Argo's
workflow/cron/operator.go.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from argolocal.common.files import write_atomically
from argolocal.common.json_text import read_object, to_json
from argolocal.errors import DAMAGE_ERRORS, ArgolocalError, NodeError, describe, write_stderr
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
# annotation with the import path (folders with Python modules) of the pods of a schedule's runs
PATH_ANNOTATION = "argolocal/module-path"
# labels of a CronWorkflow that the runs of the CronWorkflow get
PROPAGATED_LABELS = (object_labels.CONTROLLER_INSTANCE, *object_labels.CREATOR)
SPEC_ERROR = "SpecError"
SUBMISSION_ERROR = "SubmissionError"
# maximum number of seconds between two calls of `reconcile` that does not count as a pause
MAX_PAUSE_S = 60.0
TERMINATE_TIMEOUT_S = 1.0


class CronController:
    """Starts the runs of all CronWorkflows. Only the server process uses a CronController.
    `version`: version of the stored objects that `crons` contains. `progress`: decisions by the
    name of the CronWorkflow."""

    def __init__(
        self, cluster: Cluster, objects: StoredObjects, clock: Callable[[], float]
    ) -> None:
        self.cluster = cluster
        self.objects = objects
        self.clock = clock
        self.reconciled_at: float | None = None
        self.version = -1
        self.crons: dict[str, Object] = {}
        self.progress: dict[str, Progress] = {}
        # name of a CronWorkflow → its next scheduled time
        self.next_times: dict[str, float] = {}
        # name of a CronWorkflow → the last warning about this CronWorkflow
        self.messages: dict[str, str] = {}

    def reconcile(self) -> None:
        """Start the runs that are due now, and update the status of the CronWorkflows."""
        now = self.clock()
        is_continuous = (
            self.reconciled_at is not None and 0 <= now - self.reconciled_at <= MAX_PAUSE_S
        )
        self._read_objects()

        for name in list(self.crons):
            with self._warnings(name):
                self._reconcile_active(name)
                if not is_continuous or self.next_times.get(name, 0.0) <= now:
                    self._start_due_run(name, now, is_continuous)
        self.reconciled_at = now

    def _read_objects(self) -> None:
        """Read all CronWorkflows again if an object has changed."""
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

        is_first_call = self.reconciled_at is None
        if is_first_call:
            self.progress.update(read_progress(self.cluster.home, name))
        self.crons[name] = cron
        if is_first_call:
            self._restore_active(name)

    @contextmanager
    def _warnings(self, name: str) -> Iterator[None]:
        """Print an error of one CronWorkflow as a warning instead of raising it, so that the other
        CronWorkflows are not affected. The same warning is not printed twice in succession."""
        try:
            yield
        except ObjectMissing:
            # the CronWorkflow has just been deleted
            return
        except DAMAGE_ERRORS as error:
            message = f"the CronWorkflow {name}: {describe(error)}"
            if self.messages.get(name) != message:
                write_stderr(f"warning: {message}")
            self.messages[name] = message

    def _start_due_run(self, name: str, now: float, is_continuous: bool) -> None:
        """Start the run of a CronWorkflow that is due, if any, and store the decision."""
        cron = self.crons[name]
        try:
            decision = decide(cron, self.progress.get(name), now, is_continuous)
            self.next_times[name] = find_next(cron, now) or float("inf")
        except DAMAGE_ERRORS as error:
            self._set_condition(name, SPEC_ERROR, str(error))
            self.next_times[name] = float("inf")
            return

        missed_times = [time for time in decision.missed if not self._has_run(name, time)]
        progress = decision.progress.add_missed(missed_times, decision.reason)
        # a server may have been killed just after it had started the run
        if decision.due is not None and not self._has_run(name, decision.due):
            reason = self._run(name, decision.due, now)
            if reason:
                progress = progress.add_missed([decision.due], reason)

        must_be_stored = self._must_be_stored(name, decision, is_continuous)
        self.progress[name] = progress
        if must_be_stored:
            self._write_progress(name)

    def _must_be_stored(self, name: str, decision: Decision, is_continuous: bool) -> bool:
        """Return True unless the decision only changes the position of the progress, which need not
        be stored."""
        old_progress = self.progress.get(name)
        has_new_schedule = (
            old_progress is None
            or old_progress.uid != decision.progress.uid
            or old_progress.schedule != decision.progress.schedule
        )
        return decision.is_new or has_new_schedule or not is_continuous

    def _run(self, name: str, time: int, now: float) -> str:
        """Start the run of a scheduled time. Return the reason why the run was not started, or
        ""."""
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

        active_runs = [reference["name"] for reference in _status(cron).get("active") or []]
        policy = spec.get("concurrencyPolicy") or "Allow"
        if policy == "Forbid" and active_runs:
            return f"the previous run {active_runs[-1]} was in progress (concurrencyPolicy: Forbid)"
        if policy == "Replace":
            for run in active_runs:
                self._terminate(run)

        return self._submit(name, time)

    def _submit(self, name: str, time: int) -> str:
        """Queue the run of a scheduled time. Return the reason why the run was not queued, or
        ""."""
        workflow = build_workflow(self.crons[name], time)
        try:
            path = (self.crons[name]["metadata"].get("annotations") or {}).get(PATH_ANNOTATION)
            submit(self.cluster, workflow, path=path)
        except RunExists:
            # as in Argo, this is not an error: a user may have started a run with this name
            return ""
        except ArgolocalError as error:
            message = f"Failed to submit Workflow: {error}"
            self._set_condition(name, SUBMISSION_ERROR, message)
            return message

        self._add_active(name, workflow["metadata"]["name"], time)
        return ""

    def _terminate(self, run: str) -> None:
        """End the active run of a CronWorkflow that another run replaces."""
        files = RunFiles(self.cluster.home, run)
        if (files.root / MANIFEST_FILE).exists():
            requests.send(files, RunRequest(shutdown="Terminate"), TERMINATE_TIMEOUT_S)

    def _add_active(self, name: str, run: str, time: int) -> None:
        """Add a run that has been started to the active runs in the status of a CronWorkflow."""
        metadata = RunFiles(self.cluster.home, run).workflow()["metadata"]
        reference = {
            "apiVersion": API_VERSION,
            "kind": "Workflow",
            "name": run,
            "namespace": metadata.get("namespace"),
            "uid": metadata["uid"],
        }

        def change(cron: Object) -> None:
            status = cron.setdefault("status", {})
            if reference not in (status.get("active") or []):
                status["active"] = [*(status.get("active") or []), reference]
            status["phase"] = "Active"
            status["lastScheduledTime"] = format_timestamp(time)
            status["conditions"] = _without_condition(status, SUBMISSION_ERROR, SPEC_ERROR)
            annotations = cron["metadata"].setdefault("annotations", {})
            annotations[object_labels.LAST_USED_SCHEDULE] = describe_schedule(cron)

        self._update(name, change)

    def _restore_active(self, name: str) -> None:
        """Add the runs that a server has started just before it was killed to the active runs in
        the status of a CronWorkflow."""
        references = _status(self.crons[name]).get("active") or []
        active_uids = {reference["uid"] for reference in references}
        cron_uid = self.crons[name]["metadata"]["uid"]
        for queue_entry in sorted((self.cluster.home / QUEUE_FOLDER).glob(f"{name}-*")):
            time = re.fullmatch(r"\d+", queue_entry.name.removeprefix(f"{name}-"))
            files = RunFiles(self.cluster.home, queue_entry.name)
            if not time or not (files.root / MANIFEST_FILE).exists():
                continue
            metadata = files.workflow()["metadata"]
            if metadata["uid"] not in active_uids and history.owner_uid(metadata) == cron_uid:
                self._add_active(name, files.name, int(time[0]))

    def _reconcile_active(self, name: str) -> None:
        """Remove the runs that have ended from the active runs in the status of a CronWorkflow, and
        count them. Finally, remove old runs of the CronWorkflow."""
        references = _status(self.crons[name]).get("active") or []
        # uid of a run that has ended → its phase
        final_phases = {
            reference["uid"]: history.read_final_phase(self.cluster.home, reference["name"])
            for reference in references
            if not history.is_active(self.cluster.home, reference["name"])
        }
        if not final_phases:
            return

        def change(cron: Object) -> None:
            status = cron.setdefault("status", {})
            status["active"] = [
                reference
                for reference in status.get("active") or []
                if reference["uid"] not in final_phases
            ]
            for phase in final_phases.values():
                if phase:
                    counter = "succeeded" if phase == "Succeeded" else "failed"
                    status[counter] = (status.get(counter) or 0) + 1

        self._update(name, change)
        self._stop_if_needed(name)
        history.remove_old_runs(self.cluster.home, self.crons[name])

    def _stop_if_needed(self, name: str) -> bool:
        """End the schedule of a CronWorkflow if its stopStrategy demands it. Return True if the
        schedule has ended."""
        try:
            must_stop = conditions.must_stop(self.crons[name], self.clock())
        except ExprError as error:
            message = f"failed to check CronWorkflow '{name}' stopping condition: {error}"
            self._set_condition(name, SPEC_ERROR, message)
            return False
        if not must_stop:
            return False

        def change(cron: Object) -> None:
            cron.setdefault("status", {})["phase"] = "Stopped"
            labels = cron["metadata"].setdefault("labels", {})
            labels[object_labels.CRON_WORKFLOW_COMPLETED] = "true"

        self._update(name, change)
        return True

    def _set_condition(self, name: str, type: str, message: str) -> None:
        """Set a condition in the status of a CronWorkflow, and count a failed submission."""
        condition = {"type": type, "status": "True", "message": message}

        def change(cron: Object) -> None:
            status = cron.setdefault("status", {})
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
    """Return {name: progress of the CronWorkflow}, or {} if the server has not decided about any
    scheduled time yet. Raises InvalidDocument."""
    try:
        document = read_object(home / FOLDER / f"{name}.json")
    except FileNotFoundError:
        return {}
    decided = tuple((start, end) for start, end in document["decided"])
    missed_runs = tuple(Missed(**fields) for fields in document["missed"])
    return {name: Progress(**{**document, "decided": decided, "missed": missed_runs})}


def build_workflow(cron: Object, time: int) -> Object:
    """Return the Workflow of a CronWorkflow for a scheduled time in unix seconds. Source: Argo's
    workflow/common/convert.go."""
    metadata = cron["metadata"]
    cron_labels: Mapping[str, Any] = metadata.get("labels") or {}
    added_metadata: Mapping[str, Any] = cron["spec"].get("workflowMetadata") or {}
    labels = {key: cron_labels[key] for key in PROPAGATED_LABELS if key in cron_labels}
    owner = {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "name": metadata["name"],
        "uid": metadata["uid"],
        "controller": True,
        "blockOwnerDeletion": True,
    }
    workflow_metadata = {
        "name": f"{metadata['name']}-{time}",
        "labels": {
            **labels,
            object_labels.CRON_WORKFLOW_LABEL: metadata["name"],
            **(added_metadata.get("labels") or {}),
        },
        "annotations": {
            object_labels.SCHEDULED_TIME_ANNOTATION: format_timestamp(time),
            **(added_metadata.get("annotations") or {}),
        },
        "ownerReferences": [owner],
    }
    if metadata.get("namespace"):
        workflow_metadata["namespace"] = metadata["namespace"]
    return {
        "apiVersion": API_VERSION,
        "kind": "Workflow",
        "metadata": workflow_metadata,
        "spec": cron["spec"]["workflowSpec"],
    }


def _status(cron: Object) -> Object:
    return cron.get("status") or {}


def _without_condition(status: Object, *types: str) -> list[Object]:
    conditions = status.get("conditions") or []
    return [condition for condition in conditions if condition["type"] not in types]
