"""Two kinds of checkpoints: frequent snapshots in shared memory, and durable checkpoints in the
object store.

Survivors hold the state, so snapshots and checkpoints only matter if all workers are lost. Every
worker calls `keep` after each step and takes snapshots by its own clock. Rank 0 decides when a
durable checkpoint is due; this decision is sent with the gradients of the next step, so that all
workers copy the same state. The training loop only waits for the copy in memory; threads write the
snapshot and upload the checkpoint (see snapshot_file.py, durable.py).
"""

import base64
import hashlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from copy import copy
from typing import Any, TypeVar

import torch

from argolocal.common.disk import describe_missing_space
from argolocal.common.json_text import to_json
from rekindle.errors import ConfigError, StorageError, say
from rekindle.storage import Store, retry_until
from rekindle.training.checkpoint import snapshot_file
from rekindle.training.checkpoint.checkpoint_retention import Retention
from rekindle.training.checkpoint.durable import Manifest, RankSize, RemoteCheckpoints, Upload
from rekindle.training.checkpoint.interval import CheckpointInterval
from rekindle.training.checkpoint.snapshot_file import SnapshotFile
from rekindle.training.checkpoint.snapshots import Snapshots
from rekindle.training.group.interruptible import GroupBroken, fulfil
from rekindle.training.local_dataset import LoaderState
from rekindle.training.training_state import State, raw

MAX_SNAPSHOT_SHARE = 0.01  # share of the training time for snapshots, if hot_seconds is not set
MIN_SNAPSHOT_INTERVAL_S = 0.25  # minimum time between snapshots, if hot_seconds is not set
# time limit for reading the newest step in the object store, if shared memory has a snapshot
NEWEST_TIMEOUT_S = 3.0
T = TypeVar("T")
RunRead = Callable[[Callable[[], Manifest | None]], Manifest | None]


class Checkpoints:
    """The checkpoints of one worker. The constructor loads the worker's newest snapshot."""

    def __init__(
        self,
        store: Store,
        prefix: str,
        identity: str,
        fingerprint: dict[str, Any],
        state: State,
        loader: LoaderState,
        note: Callable[..., None],
        leaving: threading.Event,
    ) -> None:
        self.state = state
        self.config = config = state.config
        self.loader = loader
        self.note = note
        self.leaving = leaving

        layout_hash = _hash(state.layout)
        retention = Retention(store, prefix, config.keep_checkpoints, config.keep_hours)
        self.remote = RemoteCheckpoints(
            store, prefix, identity, layout_hash, fingerprint, retention
        )
        self.interval = CheckpointInterval(config.checkpoint_seconds, config.checkpoint_steps)
        # checksum of the state if it is from shared memory, else 0: equal states are not broadcast
        self.snapshot_crc = 0
        # events that `report` sends once a group has formed: earlier, no coordinator may be
        # connected
        self._early_events: list[dict[str, Any]] = []

        run_name = snapshot_file.run_name(identity, prefix)
        self.snapshots = Snapshots(
            state, self._load_snapshot(run_name, identity, layout_hash, _hash(fingerprint))
        )
        self._snapshot_due = 0.0

        # True if another worker was rank 0 at the last durable checkpoint
        self._was_follower = False
        self._upload: Upload | None = None
        self._thread: threading.Thread | None = None
        self._disk_checked = False

    def due(self) -> bool:
        """Return True if a durable checkpoint is due after this step. Only rank 0 asks."""
        if not self.snapshots.ready.is_set() or self._busy:
            return False
        return self._was_follower or self.interval.is_due(self.state.step + 1)

    def keep(self, rank_size: RankSize, *, durable: bool) -> None:
        """Take a snapshot if one is due, or upload our share of the state if `durable`.

        To be called after each step.
        """
        self.loader.advance(self.state.step)
        self.snapshots.record_step(self.state.step)
        now = time.monotonic()

        if durable:
            # no snapshot during an upload, which the checksum of a snapshot would slow
            self._save(rank_size, commit=False)
            self.interval.cost = time.monotonic() - now
        elif now >= self._snapshot_due and self.snapshots.is_idle:
            self.snapshots.take(self.loader.dump())
            end = time.monotonic()
            automatic_interval = max(MIN_SNAPSHOT_INTERVAL_S, (end - now) / MAX_SNAPSHOT_SHARE)
            self._snapshot_due = end + (self.config.hot_seconds or automatic_interval)

    def report(self) -> None:
        """Send the events about this worker's previous process to the ledger. Call when a group has
        formed."""
        events = self._early_events
        self._early_events = []
        for event in events:
            self.note(**event)

    def record_loss(self) -> None:
        """Record the loss of a worker that interrupted the training: the more losses, the more
        checkpoints."""
        self.interval.record_loss()

    def flush(self, rank_size: RankSize, seconds_left: Callable[[], float]) -> bool:
        """Upload the current state, which no survivor holds; wait until this is done or
        `seconds_left()` is 0."""
        self.snapshots.ready.wait(max(0.0, min(seconds_left(), 3600.0)))
        if self._upload and self._upload.step < self.state.step:
            self._upload.stop.set()

        self._join(seconds_left)
        if not self._busy:
            self._save(rank_size, commit=True)

        self._join(seconds_left)
        upload = self._upload
        step = self.state.step

        is_written = upload and upload.step == step and not upload.problem
        if is_written and (rank_size.rank == 0 or self._wait_for_rank_0(step, seconds_left)):
            return True

        if upload and upload.problem:
            problem = upload.problem
        else:
            problem = "rank 0 did not complete the checkpoint"

        if self.snapshots.file:
            remaining_copy = f" A copy remains in {self.snapshots.file.path}."
        else:
            remaining_copy = ""

        say(f"the state of step {step} is not in the object store: {problem}.{remaining_copy}")
        return False

    def _join(self, seconds_left: Callable[[], float]) -> None:
        if self._thread:
            self._thread.join(max(0.0, min(seconds_left(), 3600.0)))

    def _wait_for_rank_0(self, step: int, seconds_left: Callable[[], float]) -> bool:
        """Return True when rank 0 has completed the checkpoint of `step`, False when
        `seconds_left()` is 0."""
        while seconds_left() > 0:
            with suppress(StorageError):
                if self.remote.newest_step() >= step:
                    return True
            time.sleep(0.2)
        return False

    def close(self, *, remove: bool) -> None:
        """Stop the upload and close the snapshots. `remove`: also delete the snapshots, because
        they are obsolete."""
        if self._upload:
            self._upload.stop.set()  # the upload's threads end with the process at the latest
        self.snapshots.close(remove=remove)

    @property
    def _busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _save(self, rank_size: RankSize, *, commit: bool) -> None:
        self.interval.record_start(self.state.step)
        self._was_follower = rank_size.rank > 0
        if self._busy and self._upload:  # a slow object store must not delay training
            self._upload.stop.set()
            return

        loader_state = self.loader.dump()
        slot = self.snapshots.take(loader_state, pin=True, commit=commit)
        if slot is None:
            return

        upload = self._upload = Upload(
            self.state.step, self.snapshots.view(slot), loader_state, self.interval.facts()
        )
        self._thread = threading.Thread(
            target=self._write, args=(upload, rank_size, slot), name="checkpoint", daemon=True
        )
        self._thread.start()

    def _write(self, upload: Upload, rank_size: RankSize, slot: int) -> None:
        start_time = time.monotonic()
        try:
            if self.remote.write(upload, rank_size):
                upload.problem = ""
        except ConfigError as error:
            # another run uses the prefix now; this run continues without checkpoints
            upload.problem = str(error)
            say(f"cannot write the checkpoint of step {upload.step}: {error}")
        finally:
            self.snapshots.unpin(slot)

        if rank_size.rank == 0 and not upload.problem:
            self._warn_of_full_disk(len(upload.state))
            seconds = time.monotonic() - start_time
            self.interval.cost = self.interval.cost + upload.cpu_seconds
            self.interval.duration = seconds

            figures = {
                "seconds": round(seconds, 3),
                "cost": round(self.interval.cost, 6),
                "bytes": len(upload.state),
                "uploaded": upload.uploaded_bytes,
            }

            self.note("checkpoint", step=upload.step, name=snapshot_file.worker_name(), **figures)

    def _warn_of_full_disk(self, size: int) -> None:
        """Warn once if the disk of the object store is too small for the checkpoints that are
        kept."""
        if self._disk_checked:
            return

        self._disk_checked = True
        with suppress(StorageError):
            count = self.config.keep_checkpoints
            free = self.remote.store.free_bytes()
            remedy = f"free space, or lower train.keep_checkpoints ({count})."

            message = describe_missing_space(
                f"train.keep_checkpoints is {count}, and each checkpoint has {size:,} bytes:"
                " keeping them",
                count * size,
                free,
                "the object store",
                remedy,
            )
            if message:
                say(f"warning: {message}")

    def restore(
        self,
        snapshot_step: int,
        run_read: RunRead = lambda read: read(),
        cancelled: Callable[[], bool] = lambda: False,
    ) -> None:
        """Load the newest durable checkpoint if it is newer than the snapshot. Called if no worker
        holds a newer state.

        `run_read` calls the function that reads the checkpoint, and may raise GroupBroken at any
        moment. `cancelled()` returns True to stop waiting for an unavailable object store.
        """
        was_restored = self._load_newer(snapshot_step, run_read, cancelled)
        while self.remote.damage:
            uri, reason = self.remote.damage.pop(0)
            self.note("torn", object=uri, why=reason)

        if was_restored:
            say(
                f"resuming from step {self.state.step}"
                f" ({self.remote.store.uri(self.remote.prefix)})"
            )
        elif snapshot_step < 0:
            self.state.step = 0

        if was_restored:
            tier = "durable"
        else:
            tier = "hot" if snapshot_step >= 0 else "none"

        self.note(
            "restored",
            step=max(snapshot_step, self.state.step),
            tier=tier,
            name=snapshot_file.worker_name(),
        )

    def _load_newer(
        self, snapshot_step: int, run_read: RunRead, cancelled: Callable[[], bool]
    ) -> bool:
        """Load a durable checkpoint newer than the snapshot; return False if none exists.

        Without a snapshot, waits until the object store is available.
        """
        try:
            if (
                snapshot_step >= 0
                and _call_with_timeout(NEWEST_TIMEOUT_S, copy(self.remote).newest_step)
                <= snapshot_step
            ):
                return False
        except (StorageError, TimeoutError) as error:
            say(
                f"resuming from step {snapshot_step} in shared memory; cannot check for a newer"
                f" checkpoint: {error}"
            )
            return False

        target = torch.empty_like(self.state.memory, device="cpu")
        read_abandoned = threading.Event()
        remote = copy(self.remote)  # an abandoned read may still use the copy for a while

        def read() -> Manifest | None:
            try:
                return remote.restore(raw(target), snapshot_step)
            except StorageError as error:
                if read_abandoned.is_set() or cancelled():
                    raise GroupBroken(
                        "the group is about to change: stopped waiting for the object store"
                    ) from error
                raise

        try:
            manifest = run_read(
                lambda: retry_until(read, self.leaving, "for the newest checkpoint")
            )
        finally:
            read_abandoned.set()

        if manifest:
            self.state.memory.copy_(target)
            self.loader.load(base64.b64decode(manifest["loader"]))
            self.state.step = manifest["step"]
            self.snapshot_crc = 0
            self.interval.resume(self.state.step, manifest["facts"])

        return manifest is not None

    def _load_snapshot(
        self, run_name: str, identity: str, layout: str, fingerprint: str
    ) -> SnapshotFile | None:
        """Load this worker's newest intact snapshot; return the file if we hold its lock. Raises
        ConfigError."""
        memory = self.state.memory
        path = snapshot_file.path(run_name, snapshot_file.node_name())

        try:
            snapshot_file.sweep(run_name)
            file = snapshot_file.SnapshotFile(
                path, identity, layout, fingerprint, memory.numel() * memory.element_size()
            )
        except OSError as error:
            say(f"no snapshots in shared memory: {error}.")
            return None

        newest_snapshot = next(file.read(), None)
        for text in file.damage:
            say(f"{text}: ignored.")
            self._early_events.append({"event": "torn", "object": str(path), "why": text})

        if file.last_step:
            # the ledger may lack the last steps of a process that was killed together with its
            # coordinator
            step, end_time = file.last_step
            age_s = max(0.0, time.time() - end_time)
            self._early_events.append(
                {"event": "step", "step": step, "last": True, "age_s": round(age_s, 6)}
            )

        if newest_snapshot:
            snapshot, loader_state = newest_snapshot
            if memory.device.type == "cpu":
                target = memory
            else:
                target = torch.empty_like(memory, device="cpu")

            file.load(snapshot, raw(target))
            if target is not memory:
                memory.copy_(target)

            self.loader.load(loader_state)
            self.state.step = snapshot.step
            self.snapshot_crc = snapshot.crc
            say(f"step {snapshot.step} was found in shared memory ({path})")

            if file.is_foreign:
                say(
                    "the snapshot is from a worker with another torch build, thread count, ...: the"
                    " bits may differ."
                )

        if file.is_locked:
            return file

        say(f"no snapshots in shared memory: another process holds {path}.")
        file.close()
        return None


def _call_with_timeout(seconds: float, call: Callable[[], T]) -> T:
    """Return `call()`. Raises TimeoutError if it takes more than `seconds`."""
    future = Future[T]()
    threading.Thread(target=fulfil, args=(future, call), name="timeout", daemon=True).start()
    if not wait([future], seconds).done:
        raise TimeoutError(f"no answer within {seconds:g} s")
    return future.result()


def _hash(value: Any) -> str:
    return hashlib.sha256(to_json(value, sort_keys=True).encode()).hexdigest()
