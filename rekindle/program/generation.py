"""One run of a training program's processes, in one group of pods (agent.py)."""

import hashlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from argolocal.common import exit_codes
from rekindle.errors import CodeError, RekindleError, StorageError, write_stderr
from rekindle.kubernetes_names import REKINDLE_CHECKPOINTS, REKINDLE_SECRET
from rekindle.program.checkpoints.records import Generation
from rekindle.program.checkpoints.restore import (
    RestoredCheckpoint,
    UnusableCheckpoint,
    describe_disk_error,
)
from rekindle.program.exchange import (
    FailureReport,
    FinishedReport,
    LeavingReport,
    NodeReport,
    ReportExchange,
    RestartingReport,
    RestoreChoice,
)
from rekindle.program.pod import POLL_INTERVAL_S, Pod
from rekindle.program.processes.commands import (
    is_process_count_known,
    make_command,
    make_environments,
    make_placeholder_values,
    uses_dataset,
)
from rekindle.program.processes.environment import (
    ProcessLayout,
    find_free_port,
    make_node_variables,
    make_thread_defaults,
)
from rekindle.program.processes.node_processes import NodeProcesses, describe_exit
from rekindle.program.processes.process_parent import NOT_EXECUTABLE_EXIT_CODE, NOT_FOUND_EXIT_CODE
from rekindle.program.result import find_result, publish_result
from rekindle.training.launch import signals
from rekindle.training.launch.launcher import send_signal
from rekindle.training.membership.client import report_error
from rekindle.training.membership.completion import open_store
from rekindle.training.membership.protocol import Members

# a node counts as active for this time after output or a change of a checkpoint
ACTIVITY_INTERVAL_S = 1.0
# fraction of the time until SIGKILL that is reserved for the upload after the program's end
UPLOAD_TIME_SHARE = 0.4
# time limit of the upload before the next generation, in seconds
UPLOAD_TIMEOUT_S = 60.0
# seconds that a program may take to exit after it has written a checkpoint on SIGTERM
EXIT_TIMEOUT_S = 5.0
# minimum number of seconds of repeated work that is recorded
MIN_UNSAVED_S = 1.0
# time between attempts to reach the object store
RETRY_INTERVAL_S = 1.0
COMPLETION_TIMEOUT_S = 60.0
MAX_SAME_ERRORS = 10
# exit codes of a process that was ended by a signal from outside the program
EXTERNAL_EXIT_CODES = {-signal.SIGKILL, -signal.SIGTERM, exit_codes.TERMINATED}


ResultT = TypeVar("ResultT")


class GenerationOver(Exception):
    """Raised if the group of pods changed before the program was started."""


class ProgramGeneration:
    """One run of the program's processes, in one group of pods."""

    def __init__(self, pod: Pod, exchange: ReportExchange, members: Members) -> None:
        self.pod = pod
        self.spec = pod.spec
        self.client = pod.client
        self.checkpoints = pod.checkpoints
        self.exchange = exchange
        self.members = members
        self.number = exchange.generation
        self.node_rank = -1
        self.processes = NodeProcesses(pod.parent)
        # True once the processes of this node have ended
        self.finished = False
        # number of nodes whose processes end by themselves
        self.ending_nodes = len(members)
        # time when a new node joined the group
        self.join_time: float | None = None
        # number of saves when the new node joined
        self.saves_at_join = 0
        # time of the SIGTERM to the processes
        self.stop_time: float | None = None

    def run(self) -> None:
        """Run the processes until the generation ends. Raises GenerationOver if the generation ends
        before the processes start."""
        self.client.is_busy = True
        try:
            self.layout, restored_checkpoint = self._prepare_start()
            self._start(self.layout, restored_checkpoint.path)
        except RuntimeError as error:
            if not self._is_over():
                write_stderr(f"generation {self.number} cannot start: {error}")
                self.client.report_failure(self.number)
            raise GenerationOver from None

        has_succeeded = False
        try:
            has_succeeded = self._watch()
        finally:
            # report this node as busy, so that a long shutdown or upload does not count as a hang
            self.client.is_busy = True
            self.pod.kill_all(self.processes)
            self.checkpoints.end(has_succeeded=has_succeeded)
            if has_succeeded:
                # the last checkpoint may contain progress that was not reported yet
                self.pod.report_progress()
            self._record_plan()

        if self.stop_time is not None and self.node_rank == 0:
            self._report_unsaved_work(self.stop_time)

        if has_succeeded:
            self._complete()
        else:
            self._upload()

    def _prepare_start(self) -> tuple[ProcessLayout, RestoredCheckpoint]:
        """Agree with the other nodes on the port and the checkpoints, and restore this node's
        files. Raises RuntimeError if the group changes, or a checkpoint is damaged."""
        pod_position = self.pod.position
        node_report = NodeReport(
            processes=self.pod.process_count,
            rank=pod_position.rank if pod_position else None,
            is_server=bool(pod_position and pod_position.is_server),
            port=find_free_port(self.client.address),
            last_generation=self.pod.last_generation,
            damaged=self.pod.damaged,
        )
        self.exchange.send("node", node_report)
        node_reports = self._order_members(self.exchange.wait_for_all("node", NodeReport))

        if self.node_rank == 0:
            restore_choice = RestoreChoice(
                keys=self._choose_checkpoint_keys(node_reports),
                restarts=self.pod.restarts + 1,
                time_ns=self._retry(self.checkpoints.read_clock),
            )
            self.exchange.send("choice", restore_choice, is_shared=True)
        else:
            restore_choice = self.exchange.wait_for("choice", RestoreChoice)

        self.checkpoints.set_clock(restore_choice.time_ns)
        self.pod.restarts = restore_choice.restarts
        process_layout = ProcessLayout(
            node_rank=self.node_rank,
            process_counts=tuple(peer_report.processes for peer_report in node_reports),
            master_address=self.members[0][1],
            master_port=node_reports[0].port,
            restarts=restore_choice.restarts,
            torchrun=pod_position is None,
        )
        return process_layout, self._restore(process_layout, restore_choice.keys)

    def _order_members(self, node_reports: list[NodeReport]) -> list[NodeReport]:
        """Sort the members by the ranks that the job prescribes, if any; return their reports in
        this order."""
        member_reports = list(zip(self.members, node_reports, strict=True))
        member_reports.sort(key=lambda member_report: member_report[1].rank or 0)
        self.members = [member for member, _ in member_reports]
        self.node_rank = [member_id for member_id, _ in self.members].index(self.client.id)
        self.ending_nodes = sum(not node_report.is_server for _, node_report in member_reports)
        return [node_report for _, node_report in member_reports]

    def _choose_checkpoint_keys(self, node_reports: list[NodeReport]) -> list[str]:
        last_generations = [
            node_report.last_generation
            for node_report in node_reports
            if node_report.last_generation
        ]
        damaged_keys = {key for node_report in node_reports for key in node_report.damaged}
        return self._retry(lambda: self.checkpoints.choose(last_generations, damaged_keys))

    def _restore(
        self, process_layout: ProcessLayout, checkpoint_keys: list[str]
    ) -> RestoredCheckpoint:
        generation = Generation(
            self.number,
            process_layout.node_rank,
            process_layout.nodes,
            process_layout.world_size if is_process_count_known(self.spec.program) else 0,
            hash_member_ids(self.members),
        )
        try:
            with self._report_local_errors():
                restored_checkpoint = self._retry(
                    lambda: self.checkpoints.restore(generation, checkpoint_keys)
                )
        except UnusableCheckpoint as error:
            self.pod.damaged.append(error.key)
            raise RuntimeError(f"the checkpoint {error} Trying the previous one.") from error

        self.pod.last_generation = generation.key
        if restored_checkpoint.path and self.node_rank == 0:
            storage_tier = "durable" if restored_checkpoint.fetched_bytes else "disk"
            step = (
                self.checkpoints.saves
                if restored_checkpoint.step is None
                else restored_checkpoint.step
            )
            self.client.note("restored", step=step, tier=storage_tier)
        return restored_checkpoint

    @contextmanager
    def _report_local_errors(self) -> Iterator[None]:
        """Report an error of this pod to the coordinator, such as a full disk, and raise
        RuntimeError."""
        try:
            yield
        except OSError as error:
            error_text = describe_disk_error(Path(error.filename or self.checkpoints.folder), error)
            self._report_error(f"the program cannot be started: {error_text}")
            raise RuntimeError(error_text) from error
        except RekindleError as error:
            self._report_error(f"the program cannot be started: {error}", error.exit_code)
            raise RuntimeError(str(error)) from error

    def _retry(self, storage_call: Callable[[], ResultT]) -> ResultT:
        """Repeat `storage_call` until the object store answers. Raises RuntimeError if the group of
        pods has changed."""
        while True:
            try:
                return storage_call()
            except StorageError as error:
                if error.exit_code in exit_codes.PERMANENT_ERRORS:
                    raise
                write_stderr(f"{error} Trying again.")
                time.sleep(RETRY_INTERVAL_S)
            if self._is_over() or self.pod.leaving.is_set():
                raise RuntimeError("the group has changed")

    def _start(self, process_layout: ProcessLayout, checkpoint_path: Path | None) -> None:
        program_config = self.spec.program
        with self._report_local_errors():
            values_by_placeholder = self._retry(
                lambda: self._make_placeholder_values(process_layout, checkpoint_path)
            )
        inherited_variables = {
            variable_name: variable_value
            for variable_name, variable_value in os.environ.items()
            if variable_name != REKINDLE_SECRET
        }
        process_variables = {
            **inherited_variables,
            **make_thread_defaults(inherited_variables, process_layout.processes),
            **make_node_variables(process_layout, self.spec.identity_hash()[:12]),
            **self.pod.progress.variables(),
        }
        process_variables[REKINDLE_CHECKPOINTS] = str(self.checkpoints.folder)
        if self.spec.run_id:
            process_variables["MLFLOW_RUN_ID"] = self.spec.run_id

        self._record_plan()
        self.pod.processes = self.processes
        with self._report_local_errors():
            self.checkpoints.begin()
        self.processes.start(
            make_command(program_config, values_by_placeholder),
            make_environments(
                program_config, process_layout, values_by_placeholder, process_variables
            ),
        )

    def _record_plan(self) -> None:
        """Record the event `run` in the ledger. The method is called again at the end, because only
        a save shows whether the program counts steps or saves."""
        counts_saves = self.checkpoints.is_counting_saves and not self.pod.progress.has_reports
        if self.node_rank == 0:
            self.client.note(
                "run",
                program=True,
                device="cpu",
                workers=self.layout.world_size,
                unit="checkpoints" if counts_saves else "steps",
            )

    def _make_placeholder_values(
        self, process_layout: ProcessLayout, checkpoint_path: Path | None
    ) -> dict[str, object]:
        values_by_placeholder = make_placeholder_values(
            process_layout, self.checkpoints.folder, checkpoint_path, self.spec.model
        )
        values_by_placeholder["run_id"] = self.spec.run_id
        if uses_dataset(self.spec.program):
            from rekindle.training.local_dataset import fetch_dataset

            values_by_placeholder["dataset"] = fetch_dataset(
                open_store(), self.spec.dataset, self.spec.digest
            )
        return values_by_placeholder

    def _watch(self) -> bool:
        """Watch the processes until the generation ends. Return True if the program has finished on
        all nodes."""
        while True:
            self.processes.wait(POLL_INTERVAL_S)
            self.pod.reap(self.processes)
            self._report_activity()

            if self._is_aborted():
                self._report_hang()
                return False
            if self._must_leave():
                self._stop(self._seconds_until_leave())
                return False
            if self._must_restart():
                self._stop(self.spec.program.stop_seconds)
                return False
            # check the end before failures, because a server may fail when the other processes end
            if self._have_all_finished():
                return True
            if self.processes.failures:
                self._handle_failure()
                return False

    def _report_activity(self) -> None:
        """Report the program's progress, and tell the coordinator whether the program is active."""
        self.pod.report_progress()
        last_activity_s = self._find_last_activity_s()
        self.client.is_busy = time.monotonic() - last_activity_s < ACTIVITY_INTERVAL_S
        self.client.step = max(self.client.step, self.checkpoints.newest_step)

    def _find_last_activity_s(self) -> float:
        """Return the time when the program last wrote output, reported progress or changed a
        checkpoint."""
        return max(
            self.processes.last_output_time,
            self.checkpoints.last_change_s,
            self.pod.last_progress_time,
        )

    def _is_aborted(self) -> bool:
        client = self.client
        return client.abort_generation > self.number or client.must_exit or client.is_complete

    def _is_over(self) -> bool:
        return self._is_aborted() or self.client.open_generation > self.number

    def _must_leave(self) -> bool:
        """Return True if any node must leave. If this node must leave, send this to the other
        nodes."""
        if self.pod.leaving.is_set():
            self.exchange.send("leaving", LeavingReport(seconds=signals.compute_seconds_left()))
            return True
        return bool(self.exchange.received("leaving", LeavingReport))

    def _seconds_until_leave(self) -> float:
        """Return the seconds that the program has for its last save."""
        leave_seconds = [
            leaving_report.seconds
            for leaving_report in self.exchange.received("leaving", LeavingReport)
        ]
        if self.pod.leaving.is_set():
            leave_seconds.append(signals.compute_seconds_left())
        return (1 - UPLOAD_TIME_SHARE) * min(leave_seconds)

    def _must_restart(self) -> bool:
        """Return True if a node has joined and the program has saved since then (or
        `restart_seconds` are over) on any node. The other nodes get a message about the restart."""
        if self.client.open_generation <= self.number:
            return False
        if self.exchange.received("restarting", RestartingReport):
            return True

        now_s = time.monotonic()
        if self.join_time is None:
            self.join_time = now_s
            self.saves_at_join = self.checkpoints.saves

        has_saved = self.checkpoints.saves > self.saves_at_join
        if has_saved or now_s - self.join_time > self.spec.program.restart_seconds:
            self.exchange.send("restarting", RestartingReport())
            return True
        return False

    def _stop(self, timeout_seconds: float) -> None:
        """Send SIGTERM to the program, and wait at most `timeout_seconds` for its end; after a new
        checkpoint, at most EXIT_TIMEOUT_S."""
        earlier_saves = self.checkpoints.saves
        self.stop_time = time.monotonic()
        deadline_s = self.stop_time + timeout_seconds
        self.processes.send_signal(signal.SIGTERM)

        has_saved = False
        signalled_pids: set[int] = set()
        while time.monotonic() < deadline_s and not self._is_aborted():
            orphan_pids = self.processes.find_orphans()
            if not (self.processes.running or orphan_pids):
                break

            for pid in orphan_pids - signalled_pids:
                send_signal(pid, signal.SIGTERM)
            signalled_pids |= orphan_pids
            self.processes.wait(POLL_INTERVAL_S)
            self.pod.reap(self.processes)
            self.client.is_busy = True
            if self.checkpoints.saves > earlier_saves and not has_saved:
                has_saved = True
                deadline_s = min(deadline_s, time.monotonic() + EXIT_TIMEOUT_S)

    def _report_unsaved_work(self, stop_time_s: float) -> None:
        """Record the seconds of work that must be repeated, because the program did not save
        directly before it stopped."""
        unsaved_seconds = stop_time_s - self.checkpoints.last_save_s
        if unsaved_seconds >= MIN_UNSAVED_S:
            self.client.note("unsaved", seconds=round(unsaved_seconds, 3))

    def _have_all_finished(self) -> bool:
        """Return True once the processes of all nodes have ended, except servers. When the
        processes of this node have ended, the other nodes get a message."""
        pod_position = self.pod.position
        if (
            not self.finished
            and self.processes.has_finished
            and not (pod_position and pod_position.is_server)
        ):
            self.finished = True
            self.exchange.send("finished", FinishedReport())
        return len(self.exchange.received("finished", FinishedReport)) == self.ending_nodes

    def _report_hang(self) -> None:
        """If the group was aborted because the program hangs, report this error."""
        last_activity_s = self._find_last_activity_s()
        hung_seconds = self.spec.hung_seconds
        if self.node_rank or time.monotonic() - last_activity_s < hung_seconds:
            return

        has_ended = any(process.exit_code == 0 for process in self.processes.processes)
        if has_ended or self.exchange.received("finished", FinishedReport):
            reason = (
                "some of its processes ended with exit code 0, and the others had no output,"
                f" progress or checkpoint for {hung_seconds:g} s"
            )
        else:
            reason = f"it had no output, progress or checkpoint for {hung_seconds:g} s"
        self._report_error(f"the program hangs: {reason}")

    def _report_error(self, error_text: str, exit_code: int = 1) -> None:
        """Report an error of the program. The coordinator ends the run after three errors without a
        newer step. The agent ends the run after MAX_SAME_ERRORS equal errors, in case the program
        makes steps but always starts from step 0."""
        counts_by_error = self.pod.errors
        counts_by_error[error_text] += 1
        if counts_by_error[error_text] >= MAX_SAME_ERRORS:
            error_text = f"({counts_by_error[error_text]} times) {error_text}"
            exit_code = CodeError.exit_code
        report_error(self.client.coordinator, self.client.name, error_text, exit_code)

    def _handle_failure(self) -> None:
        """Find out whether the program failed by itself, and report the process that failed
        first."""
        first_failure = self.processes.failures[0]
        was_oom_killed = self.pod.has_new_oom_kill()
        self.processes.kill()

        if first_failure.exit_code in EXTERNAL_EXIT_CODES and not was_oom_killed:
            write_stderr(
                f"a process of the program {describe_exit(first_failure, Path.cwd())}: starting"
                " all processes again"
            )
            self.client.note("killed")
            self.client.report_failure(self.number)
            return

        reason = describe_exit(first_failure, Path.cwd())
        if was_oom_killed:
            reason = (
                f"was OOM-killed: its pod may use {self.pod.cgroup.format_limit()}. Raise"
                " cluster.pods.train.memory"
            )
        if self.checkpoints.is_disk_full():
            reason += f". The disk of {self.checkpoints.folder} is full"
        rank = self.layout.first_rank + first_failure.index
        exit_time_ns = self.checkpoints.to_store_time(int(first_failure.exit_time * 1e9))
        own_failure = FailureReport(time=exit_time_ns, rank=rank, reason=reason)
        self.exchange.send("failed", own_failure)

        # the loss of a node makes the processes of other nodes fail, so wait until the coordinator
        # would have noticed such a loss
        deadline_s = time.monotonic() + self.spec.silence_seconds + 0.5
        while time.monotonic() < deadline_s:
            if self._is_aborted():
                return
            time.sleep(POLL_INTERVAL_S)

        node_failures = [own_failure, *self.exchange.received("failed", FailureReport)]
        earliest_failure = min(node_failures, key=lambda node_failure: node_failure.time)
        if earliest_failure.rank == rank:
            is_launcher = self.spec.program.starts_processes
            error_text = (
                f"the program {reason}" if is_launcher else f"rank {rank} of the program {reason}"
            )
            write_stderr(error_text)
            is_started = first_failure.exit_code not in (
                NOT_FOUND_EXIT_CODE,
                NOT_EXECUTABLE_EXIT_CODE,
            )
            self._report_error(error_text, 1 if is_started else CodeError.exit_code)
        self.client.report_failure(self.number)

    def _complete(self) -> None:
        """Upload the result, and wait until the coordinator reports the run as complete. Raises
        RekindleError if the result is missing."""
        self.client.is_busy = True
        try:
            if self.node_rank == 0:
                self._publish_result()
            is_complete = self.client.wait_until_complete(self.number, COMPLETION_TIMEOUT_S)
        except RekindleError:
            # upload and keep the checkpoints, since the training has no other result
            self._upload()
            raise

        if is_complete:
            self.checkpoints.flush(0)
        else:
            self._upload()

    def _publish_result(self) -> None:
        values_by_placeholder = self._make_placeholder_values(self.layout, None)
        result_path = find_result(self.spec, values_by_placeholder, self.checkpoints)
        sha256 = publish_result(self.spec, result_path, self.checkpoints.newest_step)
        self.client.send({"done": sha256})

    def _upload(self) -> None:
        """Upload the newest checkpoints, because this pod may have the only copy of them."""
        self.client.is_busy = True
        self.checkpoints.flush(min(UPLOAD_TIMEOUT_S, signals.compute_seconds_left()))


def hash_member_ids(members: Members) -> str:
    """Return a short hash of the ids of a group's members."""
    return hashlib.sha256(" ".join(member_id for member_id, _ in members).encode()).hexdigest()[:8]
