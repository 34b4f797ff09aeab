"""The process that forks the workers. The forkserver has already imported torch, so a worker starts
within hundredths of a second.

    forkserver = Forkserver(slots, slot)   # forks the process, which imports torch (1 to 2 s)
    forkserver.send_spec(spec)             # the settings of all workers
    forkserver.request(index)              # starts a worker
    forkserver.take_started()              # (index, pid) of new workers; call when
                                           # `forkserver.socket` is readable

A double fork makes each worker a child of the launcher, not of the forkserver: the launcher gets
the worker's exit code, and the worker is killed when the launcher dies, but survives the death of
the forkserver.
"""

import faulthandler
import gc
import mmap
import os
import pickle  # nosec B403  # used between a parent process and its child
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, NoReturn

from argolocal.common import exit_codes
from argolocal.common.linux import die_with_parent
from rekindle.errors import CodeError, RekindleError, RunAborted, StorageError, TrackingError
from rekindle.kubernetes_names import POD_NAME
from rekindle.training.launch import signals

if TYPE_CHECKING:
    from rekindle.training.spec import TrainingSpec

# of a worker if the coordinator has aborted the run
RUN_ABORTED_EXIT_CODE = 71
# of a worker if the workload has raised an exception
WORKLOAD_ERROR_EXIT_CODE = 76
MAX_MESSAGE_BYTES = 200_000
MAX_LAST_OUTPUT_BYTES = 64 << 10


class WorkerSlot:
    """Memory that survives the death of a worker: its newest step, and its last output (an error
    message or a traceback)."""

    def __init__(self) -> None:
        self.step = memoryview(mmap.mmap(-1, mmap.PAGESIZE)).cast("q")
        self.step[0] = -1
        self._file = os.memfd_create("last-words")

    def read_last_output(self) -> str:
        """Return the error message or traceback of the last worker in this slot, or ""."""
        return os.pread(self._file, MAX_LAST_OUTPUT_BYTES, 0).decode(errors="replace").strip()

    def write_last_output(self, error_text: str) -> None:
        os.pwrite(self._file, error_text.encode(errors="replace")[-MAX_LAST_OUTPUT_BYTES:], 0)

    def attach(self) -> None:
        """Let the current process write its newest step, and the traceback of a crash, to this
        slot."""
        os.ftruncate(self._file, 0)
        os.lseek(self._file, 0, os.SEEK_SET)
        signals.newest_step = self.step
        faulthandler.enable(self._file, all_threads=False)


class Forkserver:
    """The launcher's connection to the forkserver process."""

    def __init__(self, worker_slots: list[WorkerSlot], forkserver_slot: WorkerSlot) -> None:
        """Fork the forkserver process. `worker_slots`: the memory that survives the death of each
        worker, by index of the worker; `forkserver_slot`: the memory that survives the death of the
        forkserver."""
        self.socket, remote_socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.requested_indices: set[int] = set()
        launcher_pid = os.getpid()

        self.pid = os.fork()
        if self.pid == 0:
            try:
                self.socket.close()
                _run_forkserver(remote_socket, worker_slots, launcher_pid)
            except BaseException:
                traceback.print_exc()
                forkserver_slot.write_last_output(traceback.format_exc())
            finally:
                os._exit(1)

        remote_socket.close()
        self.socket.setblocking(False)

    def send_spec(self, training_spec: "TrainingSpec") -> None:
        """Send the settings of all workers to the forkserver."""
        self._send(pickle.dumps(training_spec))

    def request(self, worker_index: int) -> None:
        """Ask the forkserver to start a worker in slot `worker_index`."""
        self.requested_indices.add(worker_index)
        self._send(b"%d" % worker_index)

    def take_started(self) -> list[tuple[int, int]]:
        """Return (index, pid) of the workers that have started since the last call."""
        started_workers = []
        with suppress(BlockingIOError, ConnectionError):
            while message := self.socket.recv(64):
                worker_index, pid = map(int, message.split())
                self.requested_indices.discard(worker_index)
                started_workers.append((worker_index, pid))
        return started_workers

    def end(self) -> None:
        """Kill the forkserver process, which the launcher then reaps."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def _send(self, message: bytes) -> None:
        # an error means that the forkserver is dead; the launcher will reap it
        with suppress(ConnectionError):
            self.socket.send(message)


def _run_forkserver(
    launcher_socket: socket.socket, worker_slots: list[WorkerSlot], launcher_pid: int
) -> None:
    """Run the forkserver's main loop."""
    prepare_forkserver(launcher_pid)
    from rekindle.cache import loaded

    loaded.record_loaded_files()
    from rekindle.training import loop  # noqa: F401  imports all modules that a worker needs

    training_spec: TrainingSpec = pickle.loads(launcher_socket.recv(MAX_MESSAGE_BYTES))  # nosec B301  # our parent is the sender
    _preload_modules(training_spec)
    # without `freeze`, a worker's garbage collector would write to every memory page, which copies
    # the page
    gc.freeze()
    gc.enable()

    while worker_request := launcher_socket.recv(64):
        worker_index = int(worker_request)
        fork_for_launcher(
            launcher_socket,
            worker_index,
            launcher_pid,
            partial(_run_worker, training_spec, worker_index, worker_slots[worker_index]),
        )


def prepare_forkserver(launcher_pid: int) -> None:
    """Prepare this process for imports, and for forks that inherit the imported modules."""
    os.setsid()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # block SIGTERM in workers until they have installed a handler
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    die_with_parent(launcher_pid)
    # with several BLAS threads, numpy would start threads, which do not exist after a fork
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # disable garbage collection, which would take a quarter of the import time, although imports
    # create no garbage
    gc.disable()


def _preload_modules(training_spec: "TrainingSpec") -> None:
    """Import the workload's modules and open the object store, so that workers inherit the modules
    and the opened object store."""
    from rekindle.storage import Store
    from rekindle.workload import load

    # ignore errors, because the worker raises the same error, and reports it
    with suppress(RekindleError):
        workload = load(training_spec.workload)
        Store.from_env()
        if hasattr(workload, "optimizer"):
            # creating an optimizer of torch.optim imports torch._dynamo, which takes a second
            import torch._dynamo  # noqa: F401


def fork_for_launcher(
    launcher_socket: socket.socket,
    worker_index: int,
    launcher_pid: int,
    run_child: Callable[[], NoReturn],
) -> None:
    """Fork a child of the launcher that calls `run_child`, and send "INDEX PID" to the launcher."""
    read_descriptor, write_descriptor = os.pipe()

    intermediate_pid = os.fork()
    if intermediate_pid == 0:
        os.close(write_descriptor)
        worker_pid = os.fork()
        if worker_pid:
            launcher_socket.send(b"%d %d" % (worker_index, worker_pid))
            os._exit(0)

        launcher_socket.close()
        if not os.read(read_descriptor, 1):
            # the forkserver has died, which is not an error of the worker
            os._exit(exit_codes.TERMINATED)

        os.close(read_descriptor)
        die_with_parent(launcher_pid)
        run_child()

    os.close(read_descriptor)
    # tell the worker that the launcher is now its parent
    os.waitpid(intermediate_pid, 0)
    os.write(write_descriptor, b".")
    os.close(write_descriptor)


def _run_worker(
    training_spec: "TrainingSpec", worker_index: int, worker_slot: WorkerSlot
) -> NoReturn:
    from rekindle.cache.key import reason_not_covered
    from rekindle.step import fail
    from rekindle.training.worker import run_worker

    os.setsid()

    os.environ["LOCAL_RANK"] = str(worker_index)
    if worker_index and (pod_name := os.environ.get(POD_NAME)):
        os.environ[POD_NAME] = f"{pod_name}/{worker_index}"

    worker_slot.attach()
    exit_code = 1

    try:
        run_worker(
            training_spec, partial(reason_not_covered, "steps.train", training_spec.workload)
        )
        exit_code = 0
    except SystemExit as error:
        exit_code = error.code if isinstance(error.code, int) else 1
    except RekindleError as error:
        fail(error)
        worker_slot.write_last_output(str(error))
        if isinstance(error, RunAborted) and error.exit_code == 1:
            exit_code = RUN_ABORTED_EXIT_CODE
        else:
            exit_code = error.exit_code

        if isinstance(error, StorageError | TrackingError):
            exit_code = exit_codes.UNAVAILABLE
    except Exception as error:
        from rekindle.project import user_exceptions

        traceback.print_exc()
        reported_error = user_exceptions.convert_exception(error)
        fail(reported_error)
        worker_slot.write_last_output(str(reported_error))
        exit_code = WORKLOAD_ERROR_EXIT_CODE if isinstance(reported_error, CodeError) else 1
    except BaseException:
        worker_slot.write_last_output(traceback.format_exc())
        traceback.print_exc()
    finally:
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()

        # exit without waiting for child processes, which may never end; child processes are killed
        # when this process ends
        os._exit(exit_code)
