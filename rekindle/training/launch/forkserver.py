"""The process that workers are forked from: torch is loaded already, so that one is there in hundredths of a second.

    nursery = Nursery(berths, home)          # forks at once; loading torch takes it a second or two
    nursery.begin(inputs)                    # what every worker is given
    nursery.ask(slot)                        # a worker, please
    nursery.born()                           # (slot, pid) of new ones, whenever `nursery.line` is readable

A worker is made a child of the launcher, not of the nursery (by a fork in between, whose orphan it is): the launcher
sees how it ends, it is killed when the launcher dies, and the nursery's own end is none of its business.
"""

import faulthandler
import gc
import mmap
import os
import pickle
import signal
import socket
import sys
import traceback
from contextlib import suppress
from typing import TYPE_CHECKING, NoReturn

from rekindle.errors import GivenUp, RekindleError, StorageError, TrackingError
from rekindle.training.launch import signals

if TYPE_CHECKING:
    from rekindle.training.spec import TrainingSpec as Inputs

AWAY, VERDICT = 75, 70  # what a worker ends with, for its launcher: a service is away; the coordinator gave up the run
MESSAGE = 200_000  # bytes: what fits into one
WORDS = 64 << 10  # bytes of last words that are read


class Berth:
    """What the place of a worker keeps when the worker dies: its newest step and its last words."""

    def __init__(self) -> None:
        self.step = memoryview(mmap.mmap(-1, mmap.PAGESIZE)).cast("q")
        self.step[0] = -1
        self._words = os.memfd_create("words")

    def words(self) -> str:
        """Why the last worker ended, as far as it could tell."""
        return os.pread(self._words, WORDS, 0).decode(errors="replace").strip()

    def say(self, text: str) -> None:
        """Our last words."""
        os.pwrite(self._words, text.encode(errors="replace")[-WORDS:], 0)

    def settle(self) -> None:
        """Make it the berth of this process, where also a crash leaves its traceback."""
        os.ftruncate(self._words, 0)
        os.lseek(self._words, 0, os.SEEK_SET)
        signals.newest = self.step
        faulthandler.enable(self._words, all_threads=False)


class Nursery:
    """The launcher's end of it."""

    def __init__(self, berths: list[Berth], home: Berth) -> None:
        self.line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.asked: set[int] = set()
        launcher = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                self.line.close()
                _tend(theirs, berths, launcher)
            except BaseException:
                traceback.print_exc()
                home.say(traceback.format_exc())
            finally:
                os._exit(1)
        theirs.close()
        self.line.setblocking(False)

    def begin(self, inputs: "Inputs") -> None:
        """Say what all workers are given."""
        self._send(pickle.dumps(inputs))

    def ask(self, slot: int) -> None:
        """For a worker at `slot`."""
        self.asked.add(slot)
        self._send(b"%d" % slot)

    def born(self) -> list[tuple[int, int]]:
        """(slot, pid) of the workers that were started since the last call."""
        found = []
        with suppress(BlockingIOError, ConnectionError):
            while message := self.line.recv(64):
                slot, pid = map(int, message.split())
                self.asked.discard(slot)
                found.append((slot, pid))
        return found

    def end(self) -> None:
        """No more workers; it is still to be reaped."""
        os.kill(self.pid, signal.SIGKILL)

    def _send(self, message: bytes) -> None:
        with suppress(ConnectionError):  # it is dead, as we shall hear
            self.line.send(message)


def _tend(line: socket.socket, berths: list[Berth], launcher: int) -> None:
    """The life of the nursery."""
    os.setsid()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # a worker hears it once it listens
    signals.die_with_parent(launcher)
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy starts threads else, and we must have none
    gc.disable()  # nothing of what is loaded becomes garbage, and looking for it takes a quarter of the time
    from rekindle.training import loop  # noqa: F401  all that a worker imports

    inputs: Inputs = pickle.loads(line.recv(MESSAGE))
    _warm(inputs)
    gc.freeze()  # or a worker's collector would write to every page, and so copy it
    gc.enable()
    while request := line.recv(64):
        _bear(line, int(request), inputs, berths, launcher)


def _warm(inputs: "Inputs") -> None:
    """Do what else costs every worker time and can be inherited."""
    from rekindle.storage import Store
    from rekindle.workload import load

    with suppress(RekindleError):  # the worker meets it again, and says it
        load(inputs.workload)
        Store.from_env()


def _bear(line: socket.socket, slot: int, inputs: "Inputs", berths: list[Berth], launcher: int) -> None:
    """Fork a worker that is a child of the launcher."""
    held, go = os.pipe()
    between = os.fork()
    if between == 0:
        os.close(go)
        if worker := os.fork():
            line.send(b"%d %d" % (slot, worker))
            os._exit(0)
        line.close()
        if not os.read(held, 1):
            os._exit(143)  # the nursery is dead, by no fault of ours
        os.close(held)
        signals.die_with_parent(launcher)
        _live(inputs, slot, berths[slot])
    os.close(held)
    os.waitpid(between, 0)  # only now is the launcher its parent
    os.write(go, b".")
    os.close(go)


def _live(inputs: "Inputs", slot: int, berth: Berth) -> NoReturn:
    """The life of a worker."""
    from rekindle.step import fail
    from rekindle.training.worker import work

    os.setsid()
    os.environ["LOCAL_RANK"] = str(slot)
    if slot and (name := os.environ.get("POD_NAME")):
        os.environ["POD_NAME"] = f"{name}/{slot}"
    berth.settle()
    code = 1
    try:
        work(inputs)
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except RekindleError as error:
        fail(error)
        berth.say(str(error))
        code = _code(error)
    except BaseException:
        berth.say(traceback.format_exc())
        traceback.print_exc()
    finally:
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)  # our children end with us; waiting for them at exit could take for ever


def _code(error: RekindleError) -> int:
    if isinstance(error, StorageError | TrackingError):
        return AWAY
    return VERDICT if isinstance(error, GivenUp) and error.exit_code == 1 else error.exit_code
