"""The process that workers are forked from: it has torch loaded, so that a worker starts in hundredths of a second.

    forkserver = Forkserver(slots, own)      # forks at once; loading torch takes it a second or two
    forkserver.begin(spec)                   # what every worker is given
    forkserver.request(index)                # start a worker
    forkserver.started()                     # (index, pid) of new ones, whenever `forkserver.line` is readable

A worker becomes a child of the launcher, not of the forkserver (by a fork in between, which orphans it): the launcher
sees how it ends, it is killed when the launcher dies, and it does not depend on the forkserver's life.
"""

import faulthandler
import gc
import mmap
import os
import pickle  # nosec B403  # between a parent and its child
import signal
import socket
import sys
import traceback
from contextlib import suppress
from typing import TYPE_CHECKING, NoReturn

from argolocal.common.linux import die_with_parent
from rekindle.errors import CodeError, RekindleError, RunAborted, StorageError, TrackingError
from rekindle.training.launch import signals

if TYPE_CHECKING:
    from rekindle.training.spec import TrainingSpec

# exit codes for the launcher: a service is unavailable; the coordinator gave up the run; an exception of the workload
AWAY, VERDICT, RAISED = 75, 71, 76
MAX_MESSAGE = 200_000  # bytes that fit into one
MAX_LAST_WORDS = 64 << 10  # bytes


class WorkerSlot:
    """Memory that survives a worker's death: its newest step, and its last words (an error or a traceback)."""

    def __init__(self) -> None:
        self.step = memoryview(mmap.mmap(-1, mmap.PAGESIZE)).cast("q")
        self.step[0] = -1
        self._file = os.memfd_create("last-words")

    def last_words(self) -> str:
        """Why the last worker ended, as far as it could tell."""
        return os.pread(self._file, MAX_LAST_WORDS, 0).decode(errors="replace").strip()

    def write_last_words(self, text: str) -> None:
        """Say why this process ends."""
        os.pwrite(self._file, text.encode(errors="replace")[-MAX_LAST_WORDS:], 0)

    def attach(self) -> None:
        """Use this slot in the current process; a crash leaves its traceback in it, too."""
        os.ftruncate(self._file, 0)
        os.lseek(self._file, 0, os.SEEK_SET)
        signals.newest_step = self.step
        faulthandler.enable(self._file, all_threads=False)


class Forkserver:
    """The launcher's side."""

    def __init__(self, slots: list[WorkerSlot], own: WorkerSlot) -> None:
        """`slots`: of the workers, by index; `own`: for the forkserver's last words."""
        self.line, remote = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.requested: set[int] = set()
        launcher = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                self.line.close()
                _serve(remote, slots, launcher)
            except BaseException:
                traceback.print_exc()
                own.write_last_words(traceback.format_exc())
            finally:
                os._exit(1)
        remote.close()
        self.line.setblocking(False)

    def begin(self, spec: "TrainingSpec") -> None:
        """Send what all workers are given."""
        self._send(pickle.dumps(spec))

    def request(self, index: int) -> None:
        """Start a worker in slot `index`."""
        self.requested.add(index)
        self._send(b"%d" % index)

    def started(self) -> list[tuple[int, int]]:
        """(index, pid) of the workers that were started since the last call."""
        workers = []
        with suppress(BlockingIOError, ConnectionError):
            while message := self.line.recv(64):
                index, pid = map(int, message.split())
                self.requested.discard(index)
                workers.append((index, pid))
        return workers

    def end(self) -> None:
        """Start no more workers. The process still has to be reaped, unless it has been: it may end with a worker."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def _send(self, message: bytes) -> None:
        with suppress(ConnectionError):  # it is dead: the launcher will reap it
            self.line.send(message)


def _serve(line: socket.socket, slots: list[WorkerSlot], launcher: int) -> None:
    """The forkserver's main function."""
    os.setsid()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # a worker unblocks it once it has a handler
    die_with_parent(launcher)
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # otherwise numpy starts threads, and a fork needs none
    gc.disable()  # nothing that is loaded becomes garbage, and looking for it takes a quarter of the time
    from rekindle.training import loop  # noqa: F401  all that a worker imports

    spec: TrainingSpec = pickle.loads(line.recv(MAX_MESSAGE))  # nosec B301  # of our own parent
    _preload(spec)
    gc.freeze()  # otherwise a worker's collector would write to every page, and so copy it
    gc.enable()
    while request := line.recv(64):
        _fork_worker(line, int(request), spec, slots, launcher)


def _preload(spec: "TrainingSpec") -> None:
    """Do what else costs every worker time and can be inherited."""
    from rekindle.storage import Store
    from rekindle.workload import load

    with suppress(RekindleError):  # the worker runs into it again, and reports it
        workload = load(spec.workload)
        Store.from_env()
        if hasattr(workload, "optimizer"):
            import torch._dynamo  # noqa: F401  an optimizer of torch.optim imports it when it is made: a second


def _fork_worker(line: socket.socket, index: int, spec: "TrainingSpec", slots: list[WorkerSlot], launcher: int) -> None:
    """Fork a worker that is a child of the launcher."""
    reader, writer = os.pipe()
    intermediate = os.fork()
    if intermediate == 0:
        os.close(writer)
        if worker := os.fork():
            line.send(b"%d %d" % (index, worker))
            os._exit(0)
        line.close()
        if not os.read(reader, 1):
            os._exit(143)  # the forkserver is dead: not the worker's fault
        os.close(reader)
        die_with_parent(launcher)
        _run_worker(spec, index, slots[index])
    os.close(reader)
    os.waitpid(intermediate, 0)  # only now is the launcher its parent
    os.write(writer, b".")
    os.close(writer)


def _run_worker(spec: "TrainingSpec", index: int, slot: WorkerSlot) -> NoReturn:
    """A worker's main function."""
    from rekindle.step import fail
    from rekindle.training.worker import work

    os.setsid()
    os.environ["LOCAL_RANK"] = str(index)
    if index and (name := os.environ.get("POD_NAME")):
        os.environ["POD_NAME"] = f"{name}/{index}"
    slot.attach()
    code = 1
    try:
        work(spec)
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except RekindleError as error:
        fail(error)
        slot.write_last_words(str(error))
        code = VERDICT if isinstance(error, RunAborted) and error.exit_code == 1 else error.exit_code
        if isinstance(error, StorageError | TrackingError):
            code = AWAY
    except Exception as error:
        from rekindle import user_code

        traceback.print_exc()
        told = user_code.as_error(error)
        fail(told)
        slot.write_last_words(str(told))
        code = RAISED if isinstance(told, CodeError) else 1
    except BaseException:
        slot.write_last_words(traceback.format_exc())
        traceback.print_exc()
    finally:
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)  # our children end with us; waiting for them at exit could block for ever
