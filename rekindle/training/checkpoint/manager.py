"""The checkpoints of a worker: frequent snapshots in shared memory, and durable checkpoints in the
object store.

Snapshots and checkpoints are needed only if all workers are lost, since every surviving worker
holds the complete state. Every worker calls `save_if_due` after each step, and takes snapshots by
its own clock. The worker with rank 0 decides when a durable checkpoint is due, and sends this
decision with the gradients of the next step, so that all workers copy the same state. The training
loop waits only for the copy in memory; threads write the snapshot and upload the checkpoint (see
snapshot_file.py, durable.py).
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
from rekindle.errors import ConfigError, StorageError, write_stderr
from rekindle.storage import Store, retry_until_stopped
from rekindle.training.checkpoint import snapshot_file
from rekindle.training.checkpoint.checkpoint_retention import CheckpointRetention
from rekindle.training.checkpoint.durable import (
    CheckpointUpload,
    Manifest,
    RankAndGroupSize,
    RemoteCheckpoints,
)
from rekindle.training.checkpoint.interval import CheckpointInterval
from rekindle.training.checkpoint.snapshot_file import SnapshotFile
from rekindle.training.checkpoint.snapshots import SnapshotSlots
from rekindle.training.group.interruptible import GroupBrokenError, resolve_with_function
from rekindle.training.local_dataset import LoaderState
from rekindle.training.spec import Fingerprint
from rekindle.training.training_state import TrainingState, view_tensor_bytes

# maximum fraction of the training time that snapshots may take, if hot_seconds is not set
MAX_SNAPSHOT_TIME_SHARE = 0.01
# minimum time between snapshots, if hot_seconds is not set
MIN_SNAPSHOT_INTERVAL_S = 0.25
# time limit for reading the newest step in the object store, if shared memory has a snapshot
NEWEST_TIMEOUT_S = 3.0
ResultT = TypeVar("ResultT")
ReadRunner = Callable[[Callable[[], Manifest | None]], Manifest | None]


class WorkerCheckpoints:
    """The snapshots and checkpoints of one worker. The constructor loads the worker's newest
    snapshot."""

    def __init__(
        self,
        store: Store,
        key_prefix: str,
        run_identity: str,
        fingerprint: Fingerprint,
        training_state: TrainingState,
        loader_state: LoaderState,
        record_event: Callable[..., None],
        leaving_event: threading.Event,
    ) -> None:
        self.state = training_state
        train_config = training_state.config
        self.config = train_config
        self.loader = loader_state
        self.note = record_event
        self.leaving = leaving_event

        layout_hash = _hash_json(training_state.layout)
        checkpoint_retention = CheckpointRetention(
            store, key_prefix, train_config.keep_checkpoints, train_config.keep_hours
        )
        self.remote = RemoteCheckpoints(
            store, key_prefix, run_identity, layout_hash, fingerprint, checkpoint_retention
        )
        self.interval = CheckpointInterval(
            train_config.checkpoint_seconds, train_config.checkpoint_steps
        )
        # checksum of the snapshot that the state was loaded from, else 0: members with equal
        # checksums need no broadcast
        self.snapshot_crc = 0
        # events that `send_early_events` sends once a group has formed, since the coordinator may
        # be unavailable before then
        self._early_events: list[dict[str, Any]] = []

        run_name = snapshot_file.hash_run_name(run_identity, key_prefix)
        self.snapshots = SnapshotSlots(
            training_state,
            self._load_snapshot(run_name, run_identity, layout_hash, _hash_json(fingerprint)),
        )
        self._next_snapshot_time = 0.0

        # True if this worker was not rank 0 at the last durable checkpoint
        self._was_follower = False
        self._upload: CheckpointUpload | None = None
        self._thread: threading.Thread | None = None
        self._has_checked_disk = False

    def is_due(self) -> bool:
        """Return True if a durable checkpoint is due after this step. Only rank 0 calls this
        method."""
        if not self.snapshots.ready.is_set() or self._is_uploading:
            return False
        return self._was_follower or self.interval.is_due(self.state.step + 1)

    def save_if_due(self, rank_and_group_size: RankAndGroupSize, *, is_durable: bool) -> None:
        """Take a snapshot if a snapshot is due; if `is_durable`, upload this worker's share of the
        state instead.

        Call this method after each step.
        """
        self.loader.advance(self.state.step)
        self.snapshots.record_step(self.state.step)
        start_s = time.monotonic()

        if is_durable:
            # skip the snapshot, because computing its checksum would slow down the upload
            self._start_upload(rank_and_group_size, should_commit=False)
            self.interval.cost = time.monotonic() - start_s
        elif start_s >= self._next_snapshot_time and self.snapshots.is_idle:
            self.snapshots.copy_state(self.loader.dump())
            end_s = time.monotonic()
            automatic_interval_s = max(
                MIN_SNAPSHOT_INTERVAL_S, (end_s - start_s) / MAX_SNAPSHOT_TIME_SHARE
            )
            self._next_snapshot_time = end_s + (self.config.hot_seconds or automatic_interval_s)

    def send_early_events(self) -> None:
        """Send to the ledger the events that happened before the first group was formed. Call this
        method when a group has formed."""
        early_events = self._early_events
        self._early_events = []
        for early_event in early_events:
            self.note(**early_event)

    def record_loss(self) -> None:
        """Record that the loss of a worker interrupted the training, which makes checkpoints more
        frequent."""
        self.interval.record_loss()

    def upload_current_state(
        self, rank_and_group_size: RankAndGroupSize, seconds_left: Callable[[], float]
    ) -> bool:
        """Upload the current state, and wait until the checkpoint is complete or `seconds_left()`
        is 0. Return True if the checkpoint is complete."""
        self.snapshots.ready.wait(max(0.0, min(seconds_left(), 3600.0)))
        if self._upload and self._upload.step < self.state.step:
            self._upload.stop.set()

        self._wait_for_upload(seconds_left)
        if not self._is_uploading:
            self._start_upload(rank_and_group_size, should_commit=True)

        self._wait_for_upload(seconds_left)
        current_upload = self._upload
        step = self.state.step

        is_written = current_upload and current_upload.step == step and not current_upload.problem
        if is_written and (
            rank_and_group_size.rank == 0 or self._wait_for_rank_0(step, seconds_left)
        ):
            return True

        if current_upload and current_upload.problem:
            problem = current_upload.problem
        else:
            problem = "rank 0 did not complete the checkpoint"

        if self.snapshots.file:
            remaining_copy_text = f" A copy remains in {self.snapshots.file.path}."
        else:
            remaining_copy_text = ""

        write_stderr(
            f"the state of step {step} is not in the object store: {problem}.{remaining_copy_text}"
        )
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
        """Stop the upload and close the snapshot files. `remove_snapshots`: True to also delete
        these files."""
        if self._upload:
            # the daemon threads of the upload end with the process
            self._upload.stop.set()
        self.snapshots.close(remove=remove_snapshots)

    @property
    def _is_uploading(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _start_upload(self, rank_and_group_size: RankAndGroupSize, *, should_commit: bool) -> None:
        self.interval.record_start(self.state.step)
        self._was_follower = rank_and_group_size.rank > 0
        # the previous upload is still running because the object store is slow: cancel it, and skip
        # this checkpoint
        if self._is_uploading and self._upload:
            self._upload.stop.set()
            return

        loader_state = self.loader.dump()
        slot_index = self.snapshots.copy_state(
            loader_state, should_pin=True, should_commit=should_commit
        )
        if slot_index is None:
            return

        checkpoint_upload = CheckpointUpload(
            self.state.step,
            self.snapshots.view_slot(slot_index),
            loader_state,
            self.interval.facts(),
        )
        self._upload = checkpoint_upload
        self._thread = threading.Thread(
            target=self._upload_state,
            args=(checkpoint_upload, rank_and_group_size, slot_index),
            name="checkpoint",
            daemon=True,
        )
        self._thread.start()

    def _upload_state(
        self,
        checkpoint_upload: CheckpointUpload,
        rank_and_group_size: RankAndGroupSize,
        slot_index: int,
    ) -> None:
        start_s = time.monotonic()
        try:
            if self.remote.write(checkpoint_upload, rank_and_group_size):
                checkpoint_upload.problem = ""
        except ConfigError as error:
            # another run now uses the key prefix of the checkpoints, so this run continues without
            # checkpoints
            checkpoint_upload.problem = str(error)
            write_stderr(f"cannot write the checkpoint of step {checkpoint_upload.step}: {error}")
        finally:
            self.snapshots.unpin(slot_index)

        if rank_and_group_size.rank == 0 and not checkpoint_upload.problem:
            self._warn_of_full_disk(len(checkpoint_upload.state))
            elapsed_seconds = time.monotonic() - start_s
            self.interval.cost = self.interval.cost + checkpoint_upload.cpu_seconds
            self.interval.duration = elapsed_seconds

            event_fields = {
                "seconds": round(elapsed_seconds, 3),
                "cost": round(self.interval.cost, 6),
                "bytes": len(checkpoint_upload.state),
                "uploaded": checkpoint_upload.uploaded_bytes,
            }

            self.note(
                "checkpoint",
                step=checkpoint_upload.step,
                name=snapshot_file.read_worker_name(),
                **event_fields,
            )

    def _warn_of_full_disk(self, checkpoint_bytes: int) -> None:
        """Warn once if the disk of the object store is too small for train.keep_checkpoints."""
        if self._has_checked_disk:
            return

        self._has_checked_disk = True
        with suppress(StorageError):
            checkpoint_count = self.config.keep_checkpoints
            free_bytes = self.remote.store.free_bytes()
            remedy_text = f"free space, or lower train.keep_checkpoints ({checkpoint_count})."

            warning_text = describe_missing_space(
                f"train.keep_checkpoints is {checkpoint_count}, and each checkpoint has"
                f" {checkpoint_bytes:,} bytes: keeping them",
                checkpoint_count * checkpoint_bytes,
                free_bytes,
                "the object store",
                remedy_text,
            )
            if warning_text:
                write_stderr(f"warning: {warning_text}")

    def restore(
        self,
        snapshot_step: int,
        run_read: ReadRunner = lambda read_function: read_function(),
        is_cancelled: Callable[[], bool] = lambda: False,
    ) -> None:
        """Load the newest durable checkpoint if its step is after `snapshot_step`, which is the
        step of the newest snapshot of any member.

        `run_read` calls the function that reads the checkpoint, and may raise GroupBrokenError at
        any moment. If `is_cancelled()` returns True, this method stops waiting for an unavailable
        object store, and raises GroupBrokenError.
        """
        was_restored = self._load_newer_checkpoint(snapshot_step, run_read, is_cancelled)
        while self.remote.damage:
            damaged_uri, reason = self.remote.damage.pop(0)
            self.note("torn", object=damaged_uri, why=reason)

        if was_restored:
            write_stderr(
                f"resuming from step {self.state.step}"
                f" ({self.remote.store.uri(self.remote.prefix)})"
            )
        elif snapshot_step < 0:
            self.state.step = 0

        if was_restored:
            storage_tier = "durable"
        else:
            storage_tier = "hot" if snapshot_step >= 0 else "none"

        self.note(
            "restored",
            step=max(snapshot_step, self.state.step),
            tier=storage_tier,
            name=snapshot_file.read_worker_name(),
        )

    def _load_newer_checkpoint(
        self, snapshot_step: int, run_read: ReadRunner, is_cancelled: Callable[[], bool]
    ) -> bool:
        """Load a durable checkpoint newer than the snapshot; return False if no newer checkpoint
        exists.

        Without a snapshot, this method waits until the object store is available.
        """
        try:
            if (
                snapshot_step >= 0
                and _call_with_timeout(NEWEST_TIMEOUT_S, copy(self.remote).newest_step)
                <= snapshot_step
            ):
                return False
        except (StorageError, TimeoutError) as error:
            write_stderr(
                f"resuming from step {snapshot_step} in shared memory; cannot check for a newer"
                f" checkpoint: {error}"
            )
            return False

        state_tensor = torch.empty_like(self.state.memory, device="cpu")
        abandoned_event = threading.Event()
        # use a copy, because an abandoned read may continue to write to the object for a while
        remote_checkpoints = copy(self.remote)

        def read() -> Manifest | None:
            try:
                return remote_checkpoints.restore(view_tensor_bytes(state_tensor), snapshot_step)
            except StorageError as error:
                if abandoned_event.is_set() or is_cancelled():
                    raise GroupBrokenError(
                        "the group is about to change: stopped waiting for the object store"
                    ) from error
                raise

        try:
            manifest = run_read(
                lambda: retry_until_stopped(read, self.leaving, "for the newest checkpoint")
            )
        finally:
            abandoned_event.set()

        if manifest:
            self.state.memory.copy_(state_tensor)
            self.loader.load(base64.b64decode(manifest["loader"]))
            self.state.step = manifest["step"]
            self.snapshot_crc = 0
            self.interval.resume(self.state.step, manifest["facts"])

        return manifest is not None

    def _load_snapshot(
        self, run_name: str, identity_hash: str, layout_hash: str, fingerprint_hash: str
    ) -> SnapshotFile | None:
        """Load this worker's newest intact snapshot. Return the snapshot file if this process holds
        the lock of the file. Raises ConfigError."""
        state_memory = self.state.memory
        snapshot_file_path = snapshot_file.make_snapshot_path(
            run_name, snapshot_file.hash_worker_name()
        )

        try:
            snapshot_file.remove_stale_files(run_name)
            opened_snapshot_file = snapshot_file.SnapshotFile(
                snapshot_file_path,
                identity_hash,
                layout_hash,
                fingerprint_hash,
                state_memory.numel() * state_memory.element_size(),
            )
        except OSError as error:
            write_stderr(f"no snapshots in shared memory: {error}.")
            return None

        newest_snapshot = next(opened_snapshot_file.read(), None)
        for damage_text in opened_snapshot_file.damage:
            write_stderr(f"{damage_text}: ignored.")
            self._early_events.append(
                {"event": "torn", "object": str(snapshot_file_path), "why": damage_text}
            )

        if opened_snapshot_file.last_step:
            # the ledger may lack the last steps if the coordinator was killed, too
            last_step, last_step_end_s = opened_snapshot_file.last_step
            age_s = max(0.0, time.time() - last_step_end_s)
            self._early_events.append(
                {"event": "step", "step": last_step, "last": True, "age_s": round(age_s, 6)}
            )

        if newest_snapshot:
            snapshot, loader_state = newest_snapshot
            if state_memory.device.type == "cpu":
                state_bytes = state_memory
            else:
                state_bytes = torch.empty_like(state_memory, device="cpu")

            opened_snapshot_file.load(snapshot, view_tensor_bytes(state_bytes))
            if state_bytes is not state_memory:
                state_memory.copy_(state_bytes)

            self.loader.load(loader_state)
            self.state.step = snapshot.step
            self.snapshot_crc = snapshot.crc
            write_stderr(f"step {snapshot.step} was found in shared memory ({snapshot_file_path})")

            if opened_snapshot_file.is_foreign:
                write_stderr(
                    "the snapshot is from a worker with another torch build, thread count, ...: the"
                    " bits may differ."
                )

        if opened_snapshot_file.is_locked:
            return opened_snapshot_file

        write_stderr(f"no snapshots in shared memory: another process holds {snapshot_file_path}.")
        opened_snapshot_file.close()
        return None


def _call_with_timeout(timeout_seconds: float, function: Callable[[], ResultT]) -> ResultT:
    """Return the result of `function`. Raises TimeoutError if the call takes more than
    `timeout_seconds`; the call then continues in its thread."""
    result_future = Future[ResultT]()
    threading.Thread(
        target=resolve_with_function, args=(result_future, function), name="timeout", daemon=True
    ).start()
    if not wait([result_future], timeout_seconds).done:
        raise TimeoutError(f"no answer within {timeout_seconds:g} s")
    return result_future.result()


def _hash_json(json_value: object) -> str:
    return hashlib.sha256(to_json(json_value, sort_keys=True).encode()).hexdigest()
