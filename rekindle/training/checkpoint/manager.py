"""The checkpoints of a worker: frequent snapshots in shared memory, and durable checkpoints in the
object store.

Snapshots and checkpoints are needed only if all workers are lost, since every surviving worker
holds the complete state. Every worker calls `save_if_due` after each step, and takes snapshots by
its own clock. Rank 0 decides when a durable checkpoint is due, and sends this decision with the
gradients of the next step, so that all workers copy the same state. The training loop waits only
for the copy in memory; threads write the snapshot and upload the checkpoint (see snapshot_file.py,
durable.py).
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

from argolocal.common.files import describe_missing_space
from argolocal.common.json_text import to_json
from rekindle.errors import ConfigError, StorageError, say
from rekindle.storage import Store, retry_until
from rekindle.training.checkpoint import snapshot_file
from rekindle.training.checkpoint.checkpoint_retention import Retention
from rekindle.training.checkpoint.durable import Manifest, RankSize, RemoteCheckpoints, Upload
from rekindle.training.checkpoint.interval import CheckpointInterval
from rekindle.training.checkpoint.snapshot_file import SnapshotFile
from rekindle.training.checkpoint.snapshots import Snapshots
from rekindle.training.group.interruptible import GroupBroken, resolve_with_call
from rekindle.training.local_dataset import LoaderState
from rekindle.training.spec import Fingerprint
from rekindle.training.training_state import State, tensor_bytes

# maximum fraction of the training time that snapshots may take, if hot_seconds is not set
MAX_SNAPSHOT_SHARE = 0.01
MIN_SNAPSHOT_INTERVAL_S = 0.25  # minimum time between snapshots, if hot_seconds is not set
# time limit for reading the newest step in the object store, if shared memory has a snapshot
NEWEST_TIMEOUT_S = 3.0
T = TypeVar("T")
ReadRunner = Callable[[Callable[[], Manifest | None]], Manifest | None]


class Checkpoints:
    """The snapshots and checkpoints of one worker. The constructor loads the worker's newest
    snapshot."""

    def __init__(
        self,
        store: Store,
        prefix: str,
        identity: str,
        fingerprint: Fingerprint,
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

        layout_hash = _hash_json(state.layout)
        retention = Retention(store, prefix, config.keep_checkpoints, config.keep_hours)
        self.remote = RemoteCheckpoints(
            store, prefix, identity, layout_hash, fingerprint, retention
        )
        self.interval = CheckpointInterval(config.checkpoint_seconds, config.checkpoint_steps)
        # checksum of the snapshot that the state was loaded from, else 0: members with equal
        # checksums need no broadcast
        self.snapshot_crc = 0
        # events that `send_early_events` sends once a group has formed, since the coordinator may
        # be unavailable before then
        self._early_events: list[dict[str, Any]] = []

        run_name = snapshot_file.hash_run_name(identity, prefix)
        self.snapshots = Snapshots(
            state, self._load_snapshot(run_name, identity, layout_hash, _hash_json(fingerprint))
        )
        self._snapshot_due = 0.0

        # True if this worker was not rank 0 at the last durable checkpoint
        self._was_follower = False
        self._upload: Upload | None = None
        self._thread: threading.Thread | None = None
        self._disk_checked = False

    def is_due(self) -> bool:
        """Return True if a durable checkpoint is due after this step. Only rank 0 calls this
        method."""
        if not self.snapshots.ready.is_set() or self._is_uploading:
            return False
        return self._was_follower or self.interval.is_due(self.state.step + 1)

    def save_if_due(self, rank_size: RankSize, *, durable: bool) -> None:
        """Take a snapshot if one is due; if `durable`, upload this worker's share of the state
        instead.

        Call after each step.
        """
        self.loader.advance(self.state.step)
        self.snapshots.record_step(self.state.step)
        now = time.monotonic()

        if durable:
            # skip the snapshot, because computing its checksum would slow down the upload
            self._start_upload(rank_size, commit=False)
            self.interval.cost = time.monotonic() - now
        elif now >= self._snapshot_due and self.snapshots.is_idle:
            self.snapshots.copy_state(self.loader.dump())
            end = time.monotonic()
            automatic_interval = max(MIN_SNAPSHOT_INTERVAL_S, (end - now) / MAX_SNAPSHOT_SHARE)
            self._snapshot_due = end + (self.config.hot_seconds or automatic_interval)

    def send_early_events(self) -> None:
        """Send to the ledger the events that happened before the first group was formed. Call when
        a group has formed."""
        events = self._early_events
        self._early_events = []
        for event in events:
            self.note(**event)

    def record_loss(self) -> None:
        """Record that the loss of a worker interrupted the training, which makes checkpoints more
        frequent."""
        self.interval.record_loss()

    def upload_current_state(self, rank_size: RankSize, seconds_left: Callable[[], float]) -> bool:
        """Upload the current state, and wait until the checkpoint is complete or `seconds_left()`
        is 0. Return True if the checkpoint is complete."""
        self.snapshots.ready.wait(max(0.0, min(seconds_left(), 3600.0)))
        if self._upload and self._upload.step < self.state.step:
            self._upload.stop.set()

        self._wait_for_upload(seconds_left)
        if not self._is_uploading:
            self._start_upload(rank_size, commit=True)

        self._wait_for_upload(seconds_left)
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

    def _wait_for_upload(self, seconds_left: Callable[[], float]) -> None:
        if self._thread:
            self._thread.join(max(0.0, min(seconds_left(), 3600.0)))

    def _wait_for_rank_0(self, step: int, seconds_left: Callable[[], float]) -> bool:
        """Wait until rank 0 has published the checkpoint of `step`. Return False once
        `seconds_left()` is 0."""
        while seconds_left() > 0:
            with suppress(StorageError):
                if self.remote.newest_step() >= step:
                    return True
            time.sleep(0.2)
        return False

    def close(self, *, remove_snapshots: bool) -> None:
        """Stop the upload and close the snapshots. `remove_snapshots`: also delete them."""
        if self._upload:
            self._upload.stop.set()  # the daemon threads of the upload end with the process
        self.snapshots.close(remove=remove_snapshots)

    @property
    def _is_uploading(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _start_upload(self, rank_size: RankSize, *, commit: bool) -> None:
        self.interval.record_start(self.state.step)
        self._was_follower = rank_size.rank > 0
        # the previous upload is still running because the object store is slow: cancel it, and skip
        # this checkpoint
        if self._is_uploading and self._upload:
            self._upload.stop.set()
            return

        loader_state = self.loader.dump()
        slot = self.snapshots.copy_state(loader_state, pin=True, commit=commit)
        if slot is None:
            return

        upload = self._upload = Upload(
            self.state.step, self.snapshots.view_slot(slot), loader_state, self.interval.facts()
        )
        self._thread = threading.Thread(
            target=self._upload_state,
            args=(upload, rank_size, slot),
            name="checkpoint",
            daemon=True,
        )
        self._thread.start()

    def _upload_state(self, upload: Upload, rank_size: RankSize, slot: int) -> None:
        start_time = time.monotonic()
        try:
            if self.remote.write(upload, rank_size):
                upload.problem = ""
        except ConfigError as error:
            # another run uses the prefix now, so this run continues without checkpoints
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
        """Warn once if the disk of the object store is too small for train.keep_checkpoints."""
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
        run_read: ReadRunner = lambda read: read(),
        cancelled: Callable[[], bool] = lambda: False,
    ) -> None:
        """Load the newest durable checkpoint if its step is after `snapshot_step`, which is the
        step of the newest snapshot of any member.

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
        self, snapshot_step: int, run_read: ReadRunner, cancelled: Callable[[], bool]
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
        # a copy is used, because an abandoned read may continue to write for a while
        remote = copy(self.remote)

        def read() -> Manifest | None:
            try:
                return remote.restore(tensor_bytes(target), snapshot_step)
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
        """Load this worker's newest intact snapshot. Return the snapshot file if this process holds
        its lock. Raises ConfigError."""
        memory = self.state.memory
        path = snapshot_file.snapshot_path(run_name, snapshot_file.hash_worker_name())

        try:
            snapshot_file.remove_stale_files(run_name)
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
            # the ledger may lack the last steps if the coordinator was killed, too
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

            file.load(snapshot, tensor_bytes(target))
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
    """Return `call()`. Raises TimeoutError if the call takes more than `seconds`."""
    future = Future[T]()
    threading.Thread(
        target=resolve_with_call, args=(future, call), name="timeout", daemon=True
    ).start()
    if not wait([future], seconds).done:
        raise TimeoutError(f"no answer within {seconds:g} s")
    return future.result()


def _hash_json(value: object) -> str:
    return hashlib.sha256(to_json(value, sort_keys=True).encode()).hexdigest()
