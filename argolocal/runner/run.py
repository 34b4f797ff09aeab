"""Run a manifest on this machine. The scheduler is a pure state machine; this module connects it to
the clock, processes and files.

    cluster = LocalCluster()
    status = LocalRun.create(manifest, parameters, cluster).run(on_change=print)    # WorkflowStatus
    status = LocalRun.load("demo-4k2xp", cluster).run()    # resume
    stop("demo-4k2xp", cluster)
    resume_suspended("demo-4k2xp", {"approve": "YES"}, home)

Every change is written to the run's journal before it takes effect, so a run can be resumed even
after `kill -9` of this process: completed steps are not repeated, and running steps are killed and
start again. On KeyboardInterrupt, all pods are stopped gracefully, and the run can be resumed.
"""

import contextlib
import json
import os
import shutil
import signal
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from argolocal import validate
from argolocal.common import program
from argolocal.common.files import write_atomically
from argolocal.common.interrupts import InterruptHandlers
from argolocal.common.json_text import to_json
from argolocal.common.processes import is_alive, read_start_ticks, signal_group
from argolocal.controllers.kubectl import Resources
from argolocal.controllers.memory_volumes import clean_up_shared_memory
from argolocal.engine import suspend
from argolocal.engine.inputs import add_labels
from argolocal.engine.nodes import KillPod, NodeResumed, StartPod, format_time
from argolocal.engine.scheduler import Scheduler
from argolocal.errors import ArgolocalError, ConfigError
from argolocal.interfaces import Cluster
from argolocal.manifest import read as manifests
from argolocal.manifest.allowed_values import COMPLETED_PHASES, FAILED_PHASES
from argolocal.manifest.resolve import store_templates
from argolocal.manifest.volume_claims import list_claims
from argolocal.pods import artifacts, volumes
from argolocal.pods.executor import Executor
from argolocal.runner import preflight, requests
from argolocal.runner.requests import NodeChange, RunRequest
from argolocal.runner.retry_workflow import reset_for_retry
from argolocal.state.journal import (
    DISK_FULL,
    MANIFEST_FILE,
    Busy,
    DiskFull,
    NotQueued,
    RunExists,
    RunFiles,
    StateError,
    Status,
    make_write_error,
    reset_interrupted,
)
from argolocal.state.locks import SharedLocks

STOP_GRACE_S = 1.0  # seconds between SIGTERM and SIGKILL of the pods when the run is stopped
STOP_TIMEOUT_S = 600.0  # seconds until `stop` sends SIGTERM to a runner again
OnChange = Callable[[Status], None]


def stop(name: str, cluster: Cluster) -> str:
    """Stop a run as `argo stop` does: terminate its pods, then run the exit handlers.

    Wait until the stopped run has ended, and return its name. If the runner of the run is dead, run
    the exit handlers in this process. Raises ConfigError for a run that has already completed.
    """
    run_files = RunFiles(cluster.home, name)
    run_files.workflow()

    phase = run_files.load()[0]["phase"]
    if phase in COMPLETED_PHASES and not run_files.runner():
        raise ConfigError(
            f"{name} is completed ({phase}) and cannot be stopped. `{program.name} down` ends its"
            " deployments."
        )

    (run_files.root / "stop").touch()
    try:
        # another process may continue the run after the first process has ended
        for pid in iter(run_files.runner, None):
            os.kill(pid, signal.SIGTERM)
            deadline = time.monotonic() + STOP_TIMEOUT_S
            while run_files.runner() == pid and time.monotonic() < deadline:
                time.sleep(0.05)

        if run_files.load()[0]["phase"] not in COMPLETED_PHASES:
            local_run = LocalRun.load(name, cluster)
            local_run.shutdown = "Stop"
            local_run.run()
    finally:
        (run_files.root / "stop").unlink(missing_ok=True)

    return name


def resume_suspended(name: str, resume_values: Mapping[str, str], home: Path) -> bool:
    """Resume the suspended steps of a running workflow, with `resume_values` as the values of their
    outputs.

    Return True once the runner has recorded the request. Return False if no process runs the
    workflow; a process that later resumes the run finds the values in the stored request. Raises
    ConfigError, and Busy if a process runs the workflow but no step is suspended.
    """
    run_files = RunFiles(home, name)
    workflow = run_files.workflow()

    is_running = run_files.runner() is not None
    if is_running or resume_values:
        values_by_node = suspend.select_resume_values(run_files.load()[0], resume_values)
    else:
        values_by_node = {}

    if is_running and not values_by_node and not workflow["spec"].get("suspend"):
        run_files.lock()  # raises Busy
        run_files.close()
    elif is_running or resume_values:
        changes = {id: NodeChange(outputs=outputs) for id, outputs in values_by_node.items()}
        return requests.send(run_files, RunRequest(changes, suspend=False))

    return False


class LocalRun:
    """One run, which this process has locked. `shutdown`: shutdown strategy with which the run
    starts, or "". `status_json`: the status that was recorded last, without its nodes."""

    def __init__(
        self, run_files: RunFiles, workflow: dict[str, Any], status: Status, cluster: Cluster
    ) -> None:
        self.files = run_files
        self.workflow = workflow
        self.cluster = cluster
        self.name: str = workflow["metadata"]["name"]
        self.status = status
        self.shutdown = ""
        self.on_change: OnChange | None = None
        self.status_json = ""
        # the request of a user that is not in the journal yet
        self.request: RunRequest | None = None

    @classmethod
    def create(
        cls,
        manifest: Mapping[str, Any],
        parameters: Mapping[str, str] | None,
        cluster: Cluster,
        report_note: Callable[[str], None] | None = None,
        report_warning: Callable[[str], None] | None = None,
        queued_path: str | None = None,
    ) -> "LocalRun":
        """Validate a manifest and create its run on disk, without starting it. Raises ConfigError.

        `report_note`: function that receives the notes of preflight.py. `report_warning`: function
        that receives the warnings about tasks whose failure or result has no effect. `queued_path`:
        the folders with Python modules for the run's pods, if a server process will run it.
        """
        workflow = validate_workflow(manifest, parameters, cluster, report_note, report_warning)
        is_scheduled = manifest["kind"] == "CronWorkflow"
        run_files = _create_files(cluster.home, workflow, is_scheduled, queued_path)
        return cls(run_files, workflow, {"phase": "", "nodes": {}}, cluster)

    @classmethod
    def load(cls, name: str, cluster: Cluster, is_queued: bool = False) -> "LocalRun":
        """Load a run from disk to resume it, and kill the processes that a dead runner has left.

        `is_queued` is True if a server process runs or continues the run. Raises ConfigError for an
        unknown run, Busy for a run in progress, and NotQueued for a queued run that another
        process has ended in the meantime.
        """
        run_files = RunFiles(cluster.home, name)
        workflow, status, process_records = run_files.open()

        try:
            if is_queued and (
                status["phase"] in COMPLETED_PHASES or not run_files.queue_entry.exists()
            ):
                raise NotQueued(f"the run {name} is not in the queue: it has ended.")
            _kill_leftover_processes(run_files, process_records)
            Resources(cluster, workflow, run_files.root).clean_up()
            now = format_time(time.time())

            if status["phase"] in FAILED_PHASES:
                if workflow["spec"].pop("shutdown", None):
                    write_atomically(run_files.root / MANIFEST_FILE, to_json(workflow, indent=1))
                status = reset_for_retry(status) | {"startedAt": now}
                shutil.rmtree(run_files.root / "creates", ignore_errors=True)
            else:
                status = reset_interrupted(status, now)

            try:
                run_files.snapshot(status)
            except DiskFull:
                # remove the files of failed steps, which may have filled the disk
                artifacts.remove_directory(run_files.pods)
                run_files.snapshot(status)
        except BaseException:
            run_files.close()
            raise

        return cls(run_files, workflow, status, cluster)

    def run(
        self, on_change: OnChange | None = None, interrupts: InterruptHandlers | None = None
    ) -> Status:
        """Run the workflow to its end and return its status. Raises KeyboardInterrupt after a
        signal has stopped all pods; `load` then continues the run.

        `on_change`: function to call with each new status. `interrupts`: signal handlers whose
        `with` block the caller has entered.
        """
        self.on_change = on_change
        clean_up_shared_memory()
        shutdown_strategy = self.shutdown or self.workflow["spec"].get("shutdown") or ""
        locks = SharedLocks(self.cluster)

        with contextlib.ExitStack() as exit_stack:
            interrupts = interrupts or exit_stack.enter_context(InterruptHandlers())
            exit_stack.enter_context(interrupts.deferred())
            exit_stack.enter_context(contextlib.closing(self.files))
            exit_stack.enter_context(contextlib.closing(locks))

            while True:
                resources = Resources(self.cluster, self.workflow, self.files.root)
                executor = Executor(self.files, self.workflow, self.cluster, interrupts, resources)

                try:
                    return self._loop(
                        Scheduler(self.workflow, self.status, shutdown_strategy, locks), executor
                    )
                except KeyboardInterrupt:
                    executor.halt(STOP_GRACE_S)
                    if shutdown_strategy or not (self.files.root / "stop").exists():
                        raise

                    shutdown_strategy = "Stop"
                    self.status = self.files.load()[0]
                except BaseException as error:
                    executor.halt(STOP_GRACE_S)
                    if isinstance(error, OSError) and error.errno in DISK_FULL:
                        raise make_write_error(error, self.files.root) from error
                    # another service may have failed because of a full disk
                    if isinstance(error, ArgolocalError) and not isinstance(error, StateError):
                        self.files.check_space()

                    raise
                finally:
                    executor.close()
                    # kill processes that have left their session, or that had just been started
                    _kill_leftover_processes(self.files, {})

    def _loop(self, scheduler: Scheduler, executor: Executor) -> Status:
        """Pass the events of the pods to the scheduler, and its actions to the executor, until the
        workflow is completed. Return the status of the completed workflow."""
        self.status = scheduler.status
        events: list[Any] = self._read_request(scheduler)

        while True:
            actions = scheduler.advance(time.time(), events)
            self._record(scheduler)
            if self.request:
                requests.complete(self.files, self.request)
                self.request = None

            if scheduler.done:
                executor.halt(STOP_GRACE_S)
                self._delete_leftovers(scheduler)
                return scheduler.status

            for action in actions:
                if isinstance(action, KillPod):
                    executor.kill(action.id)
                elif isinstance(action, StartPod):
                    executor.start(action)

            if scheduler.wake is None:
                timeout_seconds = None
            else:
                timeout_seconds = max(0.0, scheduler.wake - time.time())

            events = [*executor.wait(timeout_seconds), *self._read_request(scheduler)]

    def _read_request(self, scheduler: Scheduler) -> list[NodeResumed]:
        """Read the request that a user has sent, if any. Change the workflow's spec as the request
        demands, and return an event for each node that the request changes."""
        request = requests.read_pending(self.files)
        if request is None:
            return []

        self.request = request
        spec = self.workflow["spec"]
        if request.suspend:
            spec["suspend"] = True
        elif request.suspend is False:
            spec.pop("suspend", None)
        if request.shutdown:
            spec["shutdown"] = scheduler.shutdown = request.shutdown

        write_atomically(self.files.root / MANIFEST_FILE, to_json(self.workflow, indent=1))
        return request.events()

    def _delete_leftovers(self, scheduler: Scheduler) -> None:
        """Delete the claims and artifacts that must be deleted when the workflow completes."""
        for volume in list_claims(self.workflow):
            if volume not in scheduler.status.get("persistentVolumeClaims", []):
                volumes.delete(self.cluster, volume)
        changed_node_ids = artifacts.collect_garbage(
            scheduler.status, self.workflow["spec"], self.cluster.store
        )
        scheduler.table.changed_nodes.update(dict.fromkeys(changed_node_ids))
        self._record(scheduler)

    def _record(self, scheduler: Scheduler) -> None:
        """Append the changes of the status to the journal, and call `on_change`."""
        journal_entry = {
            key: value for key, value in scheduler.table.drain_changes().items() if value
        }
        status_json = to_json(
            {key: value for key, value in scheduler.status.items() if key != "nodes"}
        )
        if status_json != self.status_json:
            self.status_json = status_json
            journal_entry["status"] = json.loads(status_json)
        if journal_entry:
            self.files.append(journal_entry)
            if self.on_change:
                self.on_change(scheduler.status)


def validate_workflow(
    manifest: Mapping[str, Any],
    parameters: Mapping[str, str] | None,
    cluster: Cluster,
    note: Callable[[str], None] | None = None,
    warn: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Convert a manifest to the Workflow to run, with a new name and uid. Raises ConfigError.

    See `LocalRun.create` for `note` and `warn`.
    """
    identity = manifests.ObjectIdentity(time.time(), str(uuid.uuid4()), manifests.generate_suffix())

    workflow = manifests.build_workflow(manifest, parameters, cluster.find, identity=identity)
    for line in preflight.check_workflow(workflow, cluster, manifest):
        if note:
            note(line)

    findings = validate.check(workflow, find_object=cluster.find)
    for finding in validate.unheeded_tasks(findings):
        if warn:
            warn(str(finding))

    # also check the Workflow that a CronWorkflow creates, because Argo rejects a CronWorkflow with
    # an invalid Workflow
    if manifest["kind"] == "CronWorkflow":
        validate.check({**manifest, "spec": {**manifest["spec"], "workflowSpec": workflow["spec"]}})

    workflow = store_templates(
        add_labels(workflow),
        cluster.find,
        lambda spec, path: preflight.check_referenced(spec, cluster, path),
    )
    submitted_spec = manifests.make_submitted_spec(manifest, parameters)
    if submitted_spec:
        # the server shows the submitted spec, and a copy of the run is made from it, so that the
        # copy refers to the WorkflowTemplate again
        workflow["submittedSpec"] = submitted_spec
    return workflow


def _create_files(
    home: Path, workflow: dict[str, Any], is_scheduled: bool, queued_path: str | None
) -> RunFiles:
    """Create the run on disk. The name of a CronWorkflow's run ends with its scheduled time in unix
    seconds. If a run with this name exists, use the next unused second instead. Raises
    ConfigError."""
    while True:
        run_files = RunFiles(home, workflow["metadata"]["name"])
        try:
            run_files.create(workflow, queued_path)
            return run_files
        except (RunExists, Busy):
            if not is_scheduled:
                raise
            name_prefix, _, scheduled_second = run_files.name.rpartition("-")
            workflow["metadata"]["name"] = f"{name_prefix}-{int(scheduled_second) + 1}"


def _kill_leftover_processes(run_files: RunFiles, process_records: Mapping[str, list[int]]) -> None:
    """Kill all processes of this run's pods. A process belongs to a pod if it is in the pod's
    session, if its root directory is the pod's root directory, or if it has the environment
    variable program.POD_VARIABLE of the pod. `process_records`: pid and start time of the first
    process of each pod. Raises ArgolocalError if a process does not exit."""
    start_ticks_by_session = {pid: start_ticks for pid, start_ticks in process_records.values()}
    pods_folder = f"{run_files.pods}/"
    pids = [
        int(proc_folder.name)
        for proc_folder in Path("/proc").iterdir()
        if proc_folder.name.isdigit()
    ]
    leftover_pids = (
        pid
        for pid in pids
        if pid != os.getpid() and _is_leftover_process(pid, start_ticks_by_session, pods_folder)
    )

    leftover_processes = {pid: read_start_ticks(pid) for pid in leftover_pids}
    for pid in leftover_processes:
        signal_group(pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

    deadline = time.monotonic() + 5
    while any(
        start_ticks and is_alive(pid, start_ticks)
        for pid, start_ticks in leftover_processes.items()
    ):
        if time.monotonic() > deadline:
            raise ArgolocalError(
                f"processes {sorted(leftover_processes)} of {run_files.name} do not exit after"
                " SIGKILL: end them first."
            )

        time.sleep(0.01)


def _is_leftover_process(
    pid: int, start_ticks_by_session: Mapping[int, int], pods_folder: str
) -> bool:
    # the process has exited or belongs to another user
    with contextlib.suppress(OSError):
        if os.readlink(f"/proc/{pid}/root").startswith(pods_folder):
            return True

    with contextlib.suppress(OSError):
        if (
            f"\0{program.POD_VARIABLE}={pods_folder}".encode()
            in b"\0" + Path(f"/proc/{pid}/environ").read_bytes()
        ):
            return True

    try:
        start_ticks = start_ticks_by_session.get(os.getsid(pid))
    except (ProcessLookupError, PermissionError):
        return False

    return start_ticks is not None and (read_start_ticks(pid) or 0) >= start_ticks
