"""Run the pods of one run in one event loop: load their inputs, watch their processes and collect
their outputs.

    executor.start(action)
    events = executor.wait(timeout)
    executor.kill(node_id)
    executor.halt(grace_seconds)

Transfers of artifacts, and templates without a process (http, data), run in threads.
"""

import os
import selectors
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from argolocal.common import exit_codes
from argolocal.common.interrupts import InterruptHandlers
from argolocal.common.processes import read_start_ticks, signal_group
from argolocal.engine.nodes import PodEnded, PodProgressed, PodStarted, Resources, StartPod
from argolocal.errors import ArgolocalError, ConfigError, describe
from argolocal.interfaces import Cluster
from argolocal.pods import artifacts, containers
from argolocal.pods.artifacts import ArtifactError
from argolocal.pods.kinds import daemon, data, http
from argolocal.pods.kinds.container_set import START_ERROR_CODE, main_container
from argolocal.pods.kinds.sidecars import TERMINATED_EXIT_CODES
from argolocal.pods.pod_run import SIDECAR_GRACE_S, Outputs, PodRun
from argolocal.pods.process import (
    ContainerRun,
    Process,
    StartError,
    describe_missing_command,
    expand_variables,
    make_environment,
    start_container,
)
from argolocal.state.journal import DISK_FULL, RunFiles, StateError, make_write_error
from argolocal.state.progress import PROGRESS_ANNOTATION, complete_progress, parse_progress
from argolocal.store import ObjectStore

PodEvent = PodStarted | PodProgressed | PodEnded
START_ERRORS = (FileNotFoundError, PermissionError, StartError)
INIT_FAILED_MESSAGE = "Pod failed before main container starts due to PodInitializing: "
# Seconds between two records of a pod's progress. Argo records a progress once a minute.
PROGRESS_INTERVAL_S = 10.0
# seconds between attempts to acquire GPUs and memory that other runs use
RESOURCE_POLL_S = 0.2
DEADLINE_EXCEEDED = "Pod was active on the node longer than the specified deadline"


class Executor:
    """Runs all pods of one run. Only the thread that creates an Executor may call its methods,
    because the kernel kills the processes when the thread that has started them ends.

    `running`: pods that have not ended, by node id. `events`: events that `wait` has not returned
    yet. `wakeup`: eventfd to which threads write when they have ended, so that `wait` returns.
    """

    def __init__(
        self,
        run_files: RunFiles,
        workflow: dict[str, Any],
        cluster: Cluster,
        interrupts: InterruptHandlers,
        resources: Resources,
    ) -> None:
        self.files = run_files
        self.workflow = workflow
        self.cluster = cluster
        self.interrupts = interrupts
        self.resources = resources
        self.name: str = workflow["metadata"]["name"]
        self.namespace: str = workflow["metadata"]["namespace"]
        self.running: dict[str, PodRun] = {}
        # pods that wait for GPUs or memory, which other runs use
        self.waiting: list[PodRun] = []
        self.events: list[PodEvent] = []
        self.selector = selectors.DefaultSelector()
        self.wakeup = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.selector.register(self.wakeup, selectors.EVENT_READ, None)
        self.store_lock = threading.Lock()
        self.threads: list[threading.Thread] = []

    def start(self, action: StartPod) -> None:
        """Start the pod of a node. An error at the start of the pod ends the node instead of being
        raised."""
        with self._end_node_on_error(action.id):
            self._start(action)

    def _start(self, action: StartPod) -> None:
        containers.check_pod_names(action.template, action.pod)
        if "resource" in action.template:
            self.events += self.resources.start(action)
            return

        root = self.files.pods / action.pod
        pod = PodRun(action, root, self.files.logs / f"{action.pod}.log")
        self.running[action.id] = pod
        annotations = (action.template.get("metadata") or {}).get("annotations") or {}
        if parse_progress(annotations.get(PROGRESS_ANNOTATION)):
            pod.progress = annotations[PROGRESS_ANNOTATION].strip()
            self.events.append(PodProgressed(action.id, pod.progress))

        http_request = action.template.get("http")
        if http_request:
            self._run_in_thread(
                pod,
                lambda: http.run_http_template(http_request, self.cluster.secret),
                self._on_collected,
            )
            return

        data_source = action.template.get("data")
        if data_source:
            self.events.append(PodStarted(action.id))
            self._run_in_thread(
                pod, lambda: data.run_data_template(data_source, self._store), self._on_collected
            )
            return

        pod.clean_up()
        root.mkdir(parents=True)
        input_artifacts = [
            artifact for artifact in action.template["inputs"]["artifacts"] if artifact.get("path")
        ]
        main_spec = {"name": "main", **main_container(action.template)}
        container_run = pod.container_run(main_spec, self.namespace)

        try:
            pod.create_volumes(self.cluster, self.workflow)
            if "image" in main_spec:
                pod.working_directory = (
                    main_spec.get("workingDir")
                    or self.cluster.image(main_spec["image"]).directory
                    or "/"
                )
                pod.expand = lambda text: expand_variables(
                    text, make_environment(container_run, self.cluster)
                )

            load_calls = [
                partial(artifacts.load, artifact, pod.host_path(artifact["path"]), self._store)
                for artifact in input_artifacts
            ]
        except (ConfigError, OSError) as error:
            self._end(pod, "Error", str(error), None)
            return

        if load_calls:
            self._run_in_thread(
                pod, lambda: [load_artifact() for load_artifact in load_calls], self._on_loaded
            )
        else:
            self._spawn(pod)

    def wait(self, timeout: float | None) -> list[PodEvent]:
        """Wait for at most `timeout` seconds, or about one second, until something has happened.
        Return the new events, which may be none."""
        timeouts_s = [0.1 if self.resources.busy else 1.0]
        if self.deadline is not None:
            timeouts_s.append(self.deadline - time.time())
        if timeout is not None:
            timeouts_s.append(timeout)
        if self.waiting:
            timeouts_s.append(RESOURCE_POLL_S)

        with self.interrupts.allowed():
            ready_keys = self.selector.select(0 if self.events else max(0.0, min(timeouts_s)))

        for selector_key, _ in ready_keys:
            if selector_key.data is None:
                os.eventfd_read(self.wakeup)
                continue

            node_id, container_name = selector_key.data
            pod = self.running.get(node_id)
            # an error may have ended the pod in the meantime
            if pod:
                with self._end_node_on_error(node_id):
                    self._on_exit(pod, container_name)

        for pod in list(self.running.values()):
            if pod.work and pod.work[0].done():
                future, callback = pod.work
                pod.work = None
                with self._end_node_on_error(pod.action.id):
                    callback(pod, future)

        waiting_pods = self.waiting
        self.waiting = []
        for pod in waiting_pods:
            with self._end_node_on_error(pod.action.id):
                self._spawn(pod)

        self._record_progress()
        self._enforce_deadlines()
        # restart services of the cluster that have died
        self.cluster.poll()
        self.events += self.resources.poll()
        pending_events = self.events
        self.events = []

        return pending_events

    def kill(self, node_id: str, reason: str = "", grace_seconds: float | None = None) -> None:
        """Send SIGTERM to the pod of a node, and SIGKILL after `grace_seconds` seconds. The default
        of `grace_seconds` is terminationGracePeriodSeconds. `reason`: message of the node."""
        self.resources.forget(node_id)

        pod = self.running.get(node_id)
        if not pod or pod.kill_reason is not None:
            return
        if grace_seconds is None:
            grace_seconds = pod.template.get("terminationGracePeriodSeconds")
        if grace_seconds is None:
            grace_seconds = SIDECAR_GRACE_S

        pod.kill_reason = reason
        pod.kill_at = time.time() + grace_seconds
        for process in pod.processes:
            signal_group(process.pid, signal.SIGTERM)

        with self._end_node_on_error(node_id):
            if pod.template.keys() & {"http", "data"}:
                self._end(pod, "Failed", reason, None)
            elif pod.group and not pod.group.completed:
                pod.group.kill()
                self._advance(pod)

    def halt(self, grace_seconds: float) -> None:
        """Terminate all pods and wait for their end, without completing their nodes, so that the
        run can be resumed."""
        for node_id in list(self.running):
            self.kill(node_id, "", grace_seconds)

        self.resources.stop(grace_seconds)
        kill_at = time.monotonic() + grace_seconds

        for pod in self.running.values():
            if pod.sidecars:
                pod.sidecars.stop(grace_seconds)

            if pod.process:
                try:
                    pod.process.wait(max(0.0, kill_at - time.monotonic()))
                except subprocess.TimeoutExpired:
                    signal_group(pod.process.pid, signal.SIGKILL)
                    pod.process.wait()

                # kill the remaining processes of the pod
                signal_group(pod.process.pid, signal.SIGKILL)

            for container_name in list(pod.descriptors):
                self._unwatch(pod, container_name)

            artifacts.remove_directory(pod.volumes_folder)

            self.cluster.resources.release(pod.action.pod)

        self.running.clear()
        self.waiting.clear()

    def close(self) -> None:
        """Close the descriptors of this executor, except the eventfd if a thread may still write to
        it."""
        self.selector.close()
        if not any(thread.is_alive() for thread in self.threads):
            os.close(self.wakeup)

    @property
    def deadline(self) -> float | None:
        """The unix time of the next deadline or retry; `wait` may sleep until then. The time is
        None if no pod has a deadline or a retry."""
        wake_times: list[float | None] = []
        for pod in self.running.values():
            wake_times.append(pod.kill_at or pod.action.deadline)
            if pod.group:
                wake_times.append(pod.group.next_retry)

        return min(filter(None, wake_times), default=None)

    def _record_progress(self) -> None:
        """Report the progress of each pod that has changed, at most once in PROGRESS_INTERVAL_S."""
        now = time.monotonic()
        for pod in self.running.values():
            if now - pod.progress_time < PROGRESS_INTERVAL_S:
                continue
            progress = pod.find_new_progress()
            if progress:
                pod.progress_time = now
                self.events.append(PodProgressed(pod.action.id, progress))

    def _enforce_deadlines(self) -> None:
        """Kill the pods whose deadline or grace period is over, and start the retries that are
        due."""
        now = time.time()
        for pod in list(self.running.values()):
            if pod.kill_at and now >= pod.kill_at:
                pod.kill_at = now + 1
                for process in pod.processes:
                    signal_group(process.pid, signal.SIGKILL)
            elif pod.kill_reason is None and pod.action.deadline and now >= pod.action.deadline:
                self.kill(pod.action.id, DEADLINE_EXCEEDED)
            elif pod.group and pod.group.next_retry and now >= pod.group.next_retry:
                with self._end_node_on_error(pod.action.id):
                    self._advance(pod)

        for node_id in self.resources.overdue_nodes(now):
            self.events.append(PodEnded(node_id, "Failed", DEADLINE_EXCEEDED))
            self.resources.forget(node_id)

    @contextmanager
    def _end_node_on_error(self, node_id: str) -> Iterator[None]:
        """If the `with` block raises an unexpected exception, end the node `node_id` with Error
        instead of ending the run."""
        try:
            yield
        except StateError:  # the journal cannot be written, so let this error interrupt the run
            raise
        except Exception as error:
            if isinstance(error, OSError) and error.errno in DISK_FULL:
                raise make_write_error(error, self.files.root) from error
            self._fail(node_id, describe(error))

    def _fail(self, node_id: str, message: str) -> None:
        """Kill the processes of a node's pod, if it has any, and end the node with Error."""
        pod = self.running.get(node_id)
        if not pod:
            self.events.append(PodEnded(node_id, "Error", message))
            return

        for process in pod.processes:
            signal_group(process.pid, signal.SIGKILL)

        for container_name in list(pod.descriptors):
            self._unwatch(pod, container_name)

        try:
            if pod.sidecars:
                pod.sidecars.stop(0)
        finally:
            self._end(pod, "Error", message, None)

    def _run_in_thread(
        self,
        pod: PodRun,
        slow_call: Callable[[], Any],
        on_finished: Callable[[PodRun, Future[Any]], None],
    ) -> None:
        """Run `slow_call` in a daemon thread, because a daemon thread does not delay Ctrl-C.
        After the call has ended, call `on_finished` in the event loop."""
        future = Future[Any]()
        pod.work = future, on_finished

        def run() -> None:
            _resolve_future(future, slow_call)
            os.eventfd_write(self.wakeup, 1)

        self.threads = [thread for thread in self.threads if thread.is_alive()]
        self.threads.append(threading.Thread(target=run, daemon=True))
        self.threads[-1].start()

    def _store(self, s3_location: dict[str, Any]) -> ObjectStore:
        # one thread at a time may open the store, because the first call may import boto3 and start
        # a service
        with self.store_lock:
            return self.cluster.store(s3_location)

    def _on_loaded(self, pod: PodRun, future: Future[Any]) -> None:
        """Start a pod whose input artifacts have been loaded, or end the pod with the error of the
        loading."""
        try:
            future.result()
        except (ArtifactError, ArgolocalError, OSError, ValueError) as error:
            self._end(pod, "Error", f"init: Error (exit code 64): {error}", None)
        else:
            self._spawn(pod)

    def _on_collected(self, pod: PodRun, future: Future[Any]) -> None:
        """End a pod whose outputs have been collected."""
        if pod.template.keys() & {"http", "data"}:
            message_prefix = ""
        else:
            message_prefix = "wait: Error (exit code 64): "
        pod_result: tuple[str, str, Outputs | None]
        try:
            pod_result = future.result()
        except (ArgolocalError, OSError, ValueError) as error:
            pod_result = "Error", f"{message_prefix}{error}", None
        self._end(pod, *pod_result)

    def _on_probed(self, pod: PodRun, future: Future[Any]) -> None:
        """Report a daemon as started if its readiness probe has passed."""
        if future.result():
            self.events.append(PodStarted(pod.action.id, ContainerRun.ip))

    def _spawn(self, pod: PodRun) -> None:
        """Start the next containers of a pod whose inputs are loaded: the next init container, or
        else the sidecars and the main container. If other runs use the GPUs or the memory of the
        pod, put it into `waiting`."""
        if pod.kill_reason is not None:
            self._end(pod, "Failed", pod.kill_reason, None)
            return

        try:
            is_waiting = not pod.acquire_resources(self.cluster)
        except ValueError as error:
            self._end(pod, "Error", str(error), None)
            return
        if is_waiting:
            self.waiting.append(pod)
            return

        try:
            container_run = pod.prepare(self.cluster, self.namespace)
        except (ConfigError, OSError, ValueError) as error:
            self._end(pod, "Error", str(error), None)
            return

        if pod.group:
            self.events += [
                PodStarted(node_id, container_run.ip)
                for node_id in (pod.action.id, *pod.action.containers.values())
            ]
            self._advance(pod)
            return

        try:
            pod.process = pod.sidecars.start_next_init() if pod.sidecars else None
            if not pod.process:
                if pod.sidecars:
                    pod.sidecars.start_sidecars()

                pod.process = start_container(container_run, self.cluster)
        except (
            *START_ERRORS,
            ConfigError,
            OSError,
            ValueError,
            subprocess.SubprocessError,
        ) as error:
            self._end_unstarted(pod, error)
            return

        self._watch(pod, pod.process)
        if pod.sidecars and pod.sidecars.init_name:
            return

        if pod.template.get("daemon") and container_run.container.get("readinessProbe"):

            def is_running() -> bool:
                return bool(pod.descriptors)

            container_run = replace(container_run, root_pid=pod.process.pid)
            self._run_in_thread(
                pod,
                lambda: daemon.wait_until_ready(container_run, self.cluster, is_running),
                self._on_probed,
            )
        else:
            self.events.append(PodStarted(pod.action.id, container_run.ip))

    def _end_unstarted(self, pod: PodRun, error: Exception) -> None:
        """End a pod because one of its containers cannot start. As in Argo, the node gets an exit
        code only if it is the main container that cannot start."""
        init_name = pod.sidecars.init_name if pod.sidecars else ""
        if pod.sidecars:
            pod.sidecars.stop(0)

        if not isinstance(error, START_ERRORS):
            self._end(pod, "Error", str(error), None)
            return

        if isinstance(error, StartError):
            cause_text = str(error)
        else:
            cause_text = describe_missing_command(error)

        with pod.log.open("a") as log_file:
            log_file.write(f"{cause_text}\n")

        if init_name or isinstance(error, StartError):
            exit_code = START_ERROR_CODE
        else:
            exit_code = exit_codes.EXECUTOR_ERROR

        reason = "StartError" if exit_code == START_ERROR_CODE else "Error"
        outputs = None if init_name else {"exitCode": str(exit_code)}
        self._end(
            pod,
            "Failed",
            f"{init_name or 'main'}: {reason} (exit code {exit_code}): {cause_text}",
            outputs,
        )

    def _advance(self, pod: PodRun) -> None:
        """Start the ready containers of a containerSet, and report the containers that have
        ended."""
        container_set = pod.group
        assert container_set

        try:
            for container_name, process in container_set.start_ready(time.time()):
                self._watch(pod, process, container_name)
        except (ConfigError, OSError, ValueError, subprocess.SubprocessError) as error:
            container_set.stop(0)
            for container_name in list(pod.descriptors):
                self._unwatch(pod, container_name)

            self._end(pod, "Error", str(error), None)
            return

        for container_name, phase, message in container_set.events:
            self.events.append(PodEnded(pod.action.containers[container_name], phase, message))

        container_set.events.clear()
        if container_set.completed:
            pod.kill_at = None
            self._run_in_thread(
                pod, lambda: pod.collect(self.name, self._store), self._on_collected
            )

    def _watch(self, pod: PodRun, process: Process, container_name: str = "main") -> None:
        """Let `wait` notice the exit of a process, and record the process in the journal."""
        pod.descriptors[container_name] = os.pidfd_open(process.pid)
        self.selector.register(
            pod.descriptors[container_name], selectors.EVENT_READ, (pod.action.id, container_name)
        )
        process_record = [process.pid, read_start_ticks(process.pid) or 0]
        self.files.append({"pods": {pod.journal_key(container_name): process_record}})

    def _unwatch(self, pod: PodRun, container_name: str) -> None:
        process_descriptor = pod.descriptors.pop(container_name)
        self.selector.unregister(process_descriptor)
        os.close(process_descriptor)

    def _on_exit(self, pod: PodRun, container_name: str) -> None:
        """Handle the exit of a container's process: start the next containers of the pod, or
        collect its outputs."""
        process = pod.group.running[container_name] if pod.group else pod.process
        assert process
        process.wait()
        # as in Kubernetes, all processes of a container end with its first process
        signal_group(process.pid, signal.SIGKILL)
        self._unwatch(pod, container_name)

        if process.log_pipe.error:
            raise process.log_pipe.error

        if pod.group:
            pod.group.on_exit(container_name, time.time())
            self._advance(pod)
            return

        pod.kill_at = None
        if pod.sidecars and pod.sidecars.init_name:
            pod.process = None
            if process.code and pod.kill_reason is None:
                pod.sidecars.stop(0)
                # as in Argo, these exit codes mean that the container was terminated on request
                if process.code in TERMINATED_EXIT_CODES:
                    self._end(pod, "Error", INIT_FAILED_MESSAGE, None)
                else:
                    message = f"{pod.sidecars.init_name}: {process.failure}"
                    self._end(pod, "Failed", message, None)
            else:
                self._spawn(pod)

            return

        collect_outputs = lambda: pod.collect(self.name, self._store)  # noqa: E731
        if (
            pod.sidecars
            or pod.archived_logs
            or (pod.template.get("outputs") or {}).get("artifacts")
        ):
            self._run_in_thread(pod, collect_outputs, self._on_collected)
        else:
            self._on_collected(pod, _resolve_future(Future[Any](), collect_outputs))

    def _end(self, pod: PodRun, phase: str, message: str, outputs: Outputs | None) -> None:
        """Report the end of a pod, release its resources and delete its volumes. The files of a
        pod that has succeeded are deleted, too."""
        self.running.pop(pod.action.id)
        self.cluster.resources.release(pod.action.pod)
        progress = pod.find_new_progress()
        if phase == "Succeeded" and pod.progress:
            progress = complete_progress(pod.progress)
        if progress:
            self.events.append(PodProgressed(pod.action.id, progress))

        journal_keys = [
            pod.journal_key(container_name) for container_name in pod.action.containers or ("main",)
        ]
        self.files.append({"pods": dict.fromkeys(journal_keys)})
        # append the event first, because a failure of the clean-up must not change the result of
        # the pod
        self.events.append(PodEnded(pod.action.id, phase, message, outputs))
        # delete the volumes, because files of Secrets must not stay on disk
        artifacts.remove_directory(pod.volumes_folder)
        if phase == "Succeeded":
            artifacts.remove_directory(pod.root)
        elif pod.kill_reason is None:
            self.files.check_space()


def _resolve_future(future: Future[Any], slow_call: Callable[[], Any]) -> Future[Any]:
    """Set the result of `future` to the result of `slow_call`, or to its exception. Return the
    completed future."""
    try:
        future.set_result(slow_call())
    except BaseException as error:
        # `future.result` will raise this exception again in the event loop
        future.set_exception(error)
    return future
