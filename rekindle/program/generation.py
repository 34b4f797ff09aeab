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
from rekindle.errors import CodeError, RekindleError, StorageError, say
from rekindle.kubernetes_names import REKINDLE_CHECKPOINTS, REKINDLE_SECRET
from rekindle.program.checkpoints.program_checkpoints import Generation as Start
from rekindle.program.checkpoints.program_checkpoints import Restored
from rekindle.program.checkpoints.restore import UnusableCheckpoint, describe_disk_error
from rekindle.program.exchange import (
    Choice,
    Exchange,
    Failure,
    Finished,
    Leaving,
    NodeReport,
    Restarting,
)
from rekindle.program.pod import POLL_INTERVAL_S, Pod
from rekindle.program.processes.commands import (
    knows_processes,
    make_command,
    make_environments,
    placeholder_values,
    uses_dataset,
)
from rekindle.program.processes.environment import (
    Layout,
    default_threads,
    find_free_port,
    node_variables,
)
from rekindle.program.processes.node_processes import NodeProcesses, describe_exit
from rekindle.program.processes.process_parent import NOT_EXECUTABLE, NOT_FOUND
from rekindle.program.result import find_result, publish_result
from rekindle.training.launch import signals
from rekindle.training.launch.launcher import send_signal
from rekindle.training.membership.client import report_error
from rekindle.training.membership.completion import open_store
from rekindle.training.membership.protocol import Members

# a node counts as active for this time after output or a change of a checkpoint
ACTIVITY_S = 1.0
# fraction of the time until SIGKILL that is reserved for the upload after the program's end
UPLOAD_SHARE = 0.4
UPLOAD_TIMEOUT_S = 60.0  # time limit of the upload before the next generation, in seconds
# seconds that a program may take to exit after it has written a checkpoint on SIGTERM
EXIT_TIMEOUT_S = 5.0
MIN_UNSAVED_S = 1.0  # minimum number of seconds of repeated work that is recorded
RETRY_INTERVAL_S = 1.0  # time between attempts to reach the object store
COMPLETION_TIMEOUT_S = 60.0
MAX_SAME_ERRORS = 10
# exit codes of a process that was ended by a signal from outside the program
ENDED_FROM_OUTSIDE = {-signal.SIGKILL, -signal.SIGTERM, exit_codes.TERMINATED}


T = TypeVar("T")


class GenerationOver(Exception):
    """Raised if the group changed before the program was started."""


class Generation:
    """One run of the program's processes, in one group."""

    def __init__(self, pod: Pod, exchange: Exchange, members: Members) -> None:
        self.pod = pod
        self.spec = pod.spec
        self.client = pod.client
        self.checkpoints = pod.checkpoints
        self.exchange = exchange
        self.members = members
        self.number = exchange.generation
        self.node_rank = -1
        self.processes = NodeProcesses(pod.parent)
        self.finished = False
        self.ending_nodes = len(members)
        self.join_time: float | None = None
        self.saves_at_join = 0
        self.stop_time: float | None = None  # time of the SIGTERM to the processes

    def run(self) -> None:
        """Run the processes until the generation ends. Raises GenerationOver if the generation ends
        before the processes start."""
        self.client.is_busy = True
        try:
            self.layout, restored = self._prepare()
            self._start(self.layout, restored.path)
        except RuntimeError as error:
            if not self._is_over():
                say(f"generation {self.number} cannot start: {error}")
                self.client.report_failure(self.number)
            raise GenerationOver from None

        succeeded = False
        try:
            succeeded = self._watch()
        finally:
            # report this node as busy, so that a long shutdown or upload does not count as a hang
            self.client.is_busy = True
            self.pod.kill_all(self.processes)
            self.checkpoints.end(succeeded=succeeded)
            if succeeded:
                # the last checkpoint may contain progress that was not reported yet that was not
                # reported yet
                self.pod.report_progress()
            self._note_run()

        if self.stop_time is not None and self.node_rank == 0:
            self._report_unsaved_work(self.stop_time)

        if succeeded:
            self._complete()
        else:
            self._upload()

    def _prepare(self) -> tuple[Layout, Restored]:
        """Agree with the other nodes on the port and the checkpoints, and restore this node's
        files. Raises RuntimeError if the group changes, or a checkpoint is damaged."""
        position = self.pod.position
        report = NodeReport(
            processes=self.pod.process_count,
            rank=position.rank if position else None,
            is_server=bool(position and position.is_server),
            port=find_free_port(self.client.address),
            last_generation=self.pod.last_generation,
            damaged=self.pod.damaged,
        )
        self.exchange.send("node", report)
        nodes = self._order(self.exchange.wait_for_all("node", NodeReport))

        if self.node_rank == 0:
            choice = Choice(
                keys=self._choose(nodes),
                restarts=self.pod.restarts + 1,
                time_ns=self._retry(self.checkpoints.read_clock),
            )
            self.exchange.send("choice", choice, shared=True)
        else:
            choice = self.exchange.wait_for("choice", Choice)

        self.checkpoints.set_clock(choice.time_ns)
        self.pod.restarts = choice.restarts
        layout = Layout(
            node_rank=self.node_rank,
            process_counts=tuple(node.processes for node in nodes),
            master_address=self.members[0][1],
            master_port=nodes[0].port,
            restarts=choice.restarts,
            torchrun=position is None,
        )
        return layout, self._restore(layout, choice.keys)

    def _order(self, nodes: list[NodeReport]) -> list[NodeReport]:
        """Sort the members by the ranks that the job prescribes, if any; return their reports in
        this order."""
        pairs = list(zip(self.members, nodes, strict=True))
        pairs.sort(key=lambda pair: pair[1].rank or 0)
        self.members = [member for member, _ in pairs]
        self.node_rank = [id for id, _ in self.members].index(self.client.id)
        self.ending_nodes = sum(not node.is_server for _, node in pairs)
        return [node for _, node in pairs]

    def _choose(self, nodes: list[NodeReport]) -> list[str]:
        generations = [node.last_generation for node in nodes if node.last_generation]
        damaged = {key for node in nodes for key in node.damaged}
        return self._retry(lambda: self.checkpoints.choose(generations, damaged))

    def _restore(self, layout: Layout, keys: list[str]) -> Restored:
        start = Start(
            self.number,
            layout.node_rank,
            layout.nodes,
            layout.world_size if knows_processes(self.spec.program) else 0,
            hash_members(self.members),
        )
        try:
            with self._report_local_errors():
                restored = self._retry(lambda: self.checkpoints.restore(start, keys))
        except UnusableCheckpoint as error:
            self.pod.damaged.append(error.key)
            raise RuntimeError(f"the checkpoint {error} Trying the previous one.") from error

        self.pod.last_generation = start.key
        if restored.path and self.node_rank == 0:
            tier = "durable" if restored.fetched_bytes else "disk"
            step = self.checkpoints.saves if restored.step is None else restored.step
            self.client.note("restored", step=step, tier=tier)
        return restored

    @contextmanager
    def _report_local_errors(self) -> Iterator[None]:
        """Report an error of this pod to the coordinator, such as a full disk, and raise
        RuntimeError."""
        try:
            yield
        except OSError as error:
            text = describe_disk_error(Path(error.filename or self.checkpoints.folder), error)
            self._report_error(f"the program cannot be started: {text}")
            raise RuntimeError(text) from error
        except RekindleError as error:
            self._report_error(f"the program cannot be started: {error}", error.exit_code)
            raise RuntimeError(str(error)) from error

    def _retry(self, call: Callable[[], T]) -> T:
        """Repeat `call` until the object store answers. Raises RuntimeError if the generation is
        over."""
        while True:
            try:
                return call()
            except StorageError as error:
                if error.exit_code in exit_codes.PERMANENT:
                    raise
                say(f"{error} Trying again.")
                time.sleep(RETRY_INTERVAL_S)
            if self._is_over() or self.pod.leaving.is_set():
                raise RuntimeError("the group has changed")

    def _start(self, layout: Layout, checkpoint: Path | None) -> None:
        program = self.spec.program
        with self._report_local_errors():
            values = self._retry(lambda: self._placeholder_values(layout, checkpoint))
        inherited = {name: value for name, value in os.environ.items() if name != REKINDLE_SECRET}
        variables = {
            **inherited,
            **default_threads(inherited, layout.processes),
            **node_variables(layout, self.spec.identity_hash()[:12]),
            **self.pod.progress.variables(),
        }
        variables[REKINDLE_CHECKPOINTS] = str(self.checkpoints.folder)
        if self.spec.run_id:
            variables["MLFLOW_RUN_ID"] = self.spec.run_id

        self._note_run()
        self.pod.processes = self.processes
        with self._report_local_errors():
            self.checkpoints.begin()
        self.processes.start(
            make_command(program, values), make_environments(program, layout, values, variables)
        )

    def _note_run(self) -> None:
        """Record the event `run` in the ledger. Called again at the end, because only a save shows
        the unit of the steps."""
        counts_saves = self.checkpoints.counts_saves and not self.pod.progress.has_reports
        if self.node_rank == 0:
            self.client.note(
                "run",
                program=True,
                device="cpu",
                workers=self.layout.world_size,
                unit="checkpoints" if counts_saves else "steps",
            )

    def _placeholder_values(self, layout: Layout, checkpoint: Path | None) -> dict[str, object]:
        values = placeholder_values(layout, self.checkpoints.folder, checkpoint, self.spec.model)
        values["run_id"] = self.spec.run_id
        if uses_dataset(self.spec.program):
            from rekindle.training.local_dataset import fetch_dataset

            values["dataset"] = fetch_dataset(open_store(), self.spec.dataset, self.spec.digest)
        return values

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
            # checked before failures, because a server may fail when the other processes end
            if self._have_all_finished():
                return True
            if self.processes.failures:
                self._handle_failure()
                return False

    def _report_activity(self) -> None:
        self.pod.report_progress()
        changed = self._last_activity_time()
        self.client.is_busy = time.monotonic() - changed < ACTIVITY_S
        self.client.step = max(self.client.step, self.checkpoints.newest_step)

    def _last_activity_time(self) -> float:
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
        """Return True if any node must leave. If this node must leave, tell the others."""
        if self.pod.leaving.is_set():
            self.exchange.send("leaving", Leaving(seconds=signals.seconds_left()))
            return True
        return bool(self.exchange.received("leaving", Leaving))

    def _seconds_until_leave(self) -> float:
        """Return the seconds that the program has for its last save."""
        seconds = [leaving.seconds for leaving in self.exchange.received("leaving", Leaving)]
        if self.pod.leaving.is_set():
            seconds.append(signals.seconds_left())
        return (1 - UPLOAD_SHARE) * min(seconds)

    def _must_restart(self) -> bool:
        """Return True if a node has joined and the program has saved since then (or
        `restart_seconds` are over) on any node. Tell the other nodes."""
        if self.client.open_generation <= self.number:
            return False
        if self.exchange.received("restarting", Restarting):
            return True

        now = time.monotonic()
        if self.join_time is None:
            self.join_time = now
            self.saves_at_join = self.checkpoints.saves

        has_saved = self.checkpoints.saves > self.saves_at_join
        if has_saved or now - self.join_time > self.spec.program.restart_seconds:
            self.exchange.send("restarting", Restarting())
            return True
        return False

    def _stop(self, seconds: float) -> None:
        """Send SIGTERM to the program, and wait at most `seconds` for its end; after a new
        checkpoint, at most EXIT_TIMEOUT_S."""
        saves = self.checkpoints.saves
        self.stop_time = time.monotonic()
        deadline = self.stop_time + seconds
        self.processes.send_signal(signal.SIGTERM)

        has_saved = False
        signalled: set[int] = set()
        while time.monotonic() < deadline and not self._is_aborted():
            orphans = self.processes.find_orphans()
            if not (self.processes.running or orphans):
                break

            for pid in orphans - signalled:
                send_signal(pid, signal.SIGTERM)
            signalled |= orphans
            self.processes.wait(POLL_INTERVAL_S)
            self.pod.reap(self.processes)
            self.client.is_busy = True
            if self.checkpoints.saves > saves and not has_saved:
                has_saved = True
                deadline = min(deadline, time.monotonic() + EXIT_TIMEOUT_S)

    def _report_unsaved_work(self, stop_time: float) -> None:
        """Record how many seconds of work must be repeated, because the program did not save before
        it stopped."""
        unsaved = stop_time - self.checkpoints.last_save_s
        if unsaved >= MIN_UNSAVED_S:
            self.client.note("unsaved", seconds=round(unsaved, 3))

    def _have_all_finished(self) -> bool:
        """Return True once the processes of all nodes have ended, except servers."""
        position = self.pod.position
        if (
            not self.finished
            and self.processes.has_finished
            and not (position and position.is_server)
        ):
            self.finished = True
            self.exchange.send("finished", Finished())
        return len(self.exchange.received("finished", Finished)) == self.ending_nodes

    def _report_hang(self) -> None:
        """If the group was aborted because the program hangs, report this error."""
        changed = self._last_activity_time()
        seconds = self.spec.hung_seconds
        if self.node_rank or time.monotonic() - changed < seconds:
            return

        has_ended = any(process.exit_code == 0 for process in self.processes.processes)
        if has_ended or self.exchange.received("finished", Finished):
            reason = (
                "some of its processes ended with exit code 0, and the others had no output,"
                f" progress or checkpoint for {seconds:g} s"
            )
        else:
            reason = f"it had no output, progress or checkpoint for {seconds:g} s"
        self._report_error(f"the program hangs: {reason}")

    def _report_error(self, text: str, code: int = 1) -> None:
        """Report an error of the program. The coordinator ends the run after three errors without a
        newer step. The agent ends the run after MAX_SAME_ERRORS equal errors, in case the program
        makes steps but always starts from step 0."""
        errors = self.pod.errors
        errors[text] += 1
        if errors[text] >= MAX_SAME_ERRORS:
            text = f"({errors[text]} times) {text}"
            code = CodeError.exit_code
        report_error(self.client.coordinator, self.client.name, text, code)

    def _handle_failure(self) -> None:
        """Find out whether the program failed by itself, and report the process that failed
        first."""
        first = self.processes.failures[0]
        killed_for_memory = self.pod.has_new_oom_kill()
        self.processes.kill()

        if first.exit_code in ENDED_FROM_OUTSIDE and not killed_for_memory:
            say(f"a process of the program {describe_exit(first, Path.cwd())}: starting all again")
            self.client.note("killed")
            self.client.report_failure(self.number)
            return

        reason = describe_exit(first, Path.cwd())
        if killed_for_memory:
            reason = (
                f"was OOM-killed: its pod may use {self.pod.cgroup.format_limit()}. Raise"
                " cluster.pods.train.memory"
            )
        if self.checkpoints.is_disk_full():
            reason += f". The disk of {self.checkpoints.folder} is full"
        rank = self.layout.first_rank + first.index
        exit_time = self.checkpoints.to_store_time(int(first.exit_time * 1e9))
        failure = Failure(time=exit_time, rank=rank, reason=reason)
        self.exchange.send("failed", failure)

        # a lost node makes the processes of other nodes fail, so wait until the coordinator could
        # notice a loss
        deadline = time.monotonic() + self.spec.silence_seconds + 0.5
        while time.monotonic() < deadline:
            if self._is_aborted():
                return
            time.sleep(POLL_INTERVAL_S)

        failures = [failure, *self.exchange.received("failed", Failure)]
        earliest = min(failures, key=lambda failed: failed.time)
        if earliest.rank == rank:
            is_launcher = self.spec.program.starts_processes
            text = (
                f"the program {reason}" if is_launcher else f"rank {rank} of the program {reason}"
            )
            say(text)
            is_started = first.exit_code not in (NOT_FOUND, NOT_EXECUTABLE)
            self._report_error(text, 1 if is_started else CodeError.exit_code)
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
            # keep the checkpoints, since the training has no other result
            self._upload()
            raise

        if is_complete:
            self.checkpoints.flush(0)
        else:
            self._upload()

    def _publish_result(self) -> None:
        values = self._placeholder_values(self.layout, None)
        path = find_result(self.spec, values, self.checkpoints)
        sha256 = publish_result(self.spec, path, self.checkpoints.newest_step)
        self.client.send({"done": sha256})

    def _upload(self) -> None:
        """Upload the newest checkpoints, because this pod may have the only copy."""
        self.client.is_busy = True
        self.checkpoints.flush(min(UPLOAD_TIMEOUT_S, signals.seconds_left()))


def hash_members(members: Members) -> str:
    """Return a short hash of the ids of a group."""
    return hashlib.sha256(" ".join(id for id, _ in members).encode()).hexdigest()[:8]
