"""The training loop, which `rekindle step steps.train` runs."""

import math
import threading
import time

import torch
from safetensors.torch import save

from argolocal.common import exit_codes
from argolocal.common.json_text import replace_nan, to_json
from rekindle.content.weights import WEIGHTS_FILE
from rekindle.documents import MODEL_FILE, describe_model
from rekindle.errors import RekindleError, StorageError, TrackingError, say
from rekindle.keys import CURVE
from rekindle.project import user_exceptions
from rekindle.storage import Store, retry_until
from rekindle.training.checkpoint import snapshot_file
from rekindle.training.checkpoint.manager import Checkpoints
from rekindle.training.computation import (
    StepComputation,
    build_model,
    make_training_state,
    open_samples,
)
from rekindle.training.group import elastic
from rekindle.training.group.interface import Membership
from rekindle.training.group.training_group import TrainingGroup
from rekindle.training.launch import signals
from rekindle.training.local_dataset import LoaderState, fetch_dataset
from rekindle.training.membership.completion import read_completed_model
from rekindle.training.metrics import Curve, Metrics
from rekindle.training.numerics import compute_fingerprint, prepare_device
from rekindle.training.spec import TrainingSpec, check_supported_settings
from rekindle.training.training_state import load_weights, weights_sha256
from rekindle.workload import dataset_facts, load

# time that the other ranks wait until rank 0 has completed the checkpoint of a pause
PAUSE_CHECKPOINT_TIMEOUT_S = 30.0


def train(spec: TrainingSpec, leaving: threading.Event) -> None:
    """Train until the run is complete. Raises ConfigError, DataError, and SystemExit(143) once
    `leaving` is set."""
    if not retry_until(
        lambda: read_completed_model(spec), leaving, "to check if the run is complete"
    ):
        _train_as_member(spec, leaving)
    # remove the snapshots that workers have left if they were killed during shutdown
    snapshot_file.remove_run_files(
        snapshot_file.hash_run_name(spec.identity_hash(), spec.checkpoints)
    )


def _train_as_member(spec: TrainingSpec, leaving: threading.Event) -> None:
    membership = None
    try:
        device = prepare_device(spec)
        membership = elastic.create_membership(spec, compute_fingerprint(spec, device), device)
        Training(spec, device, membership, leaving).run()
    except Exception as error:
        if isinstance(error, RekindleError):
            text = str(error)
        else:
            text = user_exceptions.describe(error)

        exit_code = getattr(error, "exit_code", 1)
        temporary = isinstance(error, (StorageError, TrackingError))
        if membership:
            report = membership.report_error
        else:
            report = elastic.report_early_error

        report(text, exit_code, temporary=temporary)
        raise


class Training:
    """One worker process of a run."""

    def __init__(
        self,
        spec: TrainingSpec,
        device: torch.device,
        membership: Membership,
        leaving: threading.Event,
    ) -> None:
        self.spec = spec
        self.store = Store.from_env()
        self.membership = membership
        self.fingerprint = compute_fingerprint(spec, device)

        # the computation
        workload = load(spec.workload)
        check_supported_settings(spec, workload)
        path = retry_until(
            lambda: fetch_dataset(self.store, spec.dataset, spec.digest), leaving, "for the dataset"
        )
        samples, held_out = open_samples(spec, workload, path)
        model = build_model(spec, workload, dataset_facts(path))

        if spec.start:
            retry_until(
                lambda: load_weights(model, self.store, spec.start),
                leaving,
                "for the initial weights",
            )

        self.state = make_training_state(spec, workload, model, device)
        self.computation = StepComputation(
            spec, workload, self.state, samples, held_out, membership.aborted
        )
        self.total = spec.total_steps(len(samples))
        self.pause = spec.pause_step(len(samples))

        # recovery
        loader = LoaderState(samples.data)

        self.checkpoints = Checkpoints(
            self.store.short_retries(),
            spec.checkpoints,
            spec.identity_hash(),
            self.fingerprint,
            self.state,
            loader,
            membership.note,
            leaving,
        )

        self.group = TrainingGroup(membership, self.state, loader, self.checkpoints, leaving)

        # metrics
        plan = {
            "device": self.fingerprint["device"],
            "workers": spec.workers,
            "steps": self.total,
            "virtual_workers": spec.virtual_workers,
            "samples": len(samples),
        }

        samples_per_step = spec.batch_size * spec.virtual_workers
        self.metrics = Metrics(
            spec.run_id, self.total, samples_per_step, spec.part, membership.note, plan
        )
        self.curve = Curve(self.total)

    def run(self) -> None:
        """Train, write the model, and wait until the run is complete."""
        is_complete = False
        while not (is_complete or self.group.stopped):
            self.run_steps()
            try:
                if self.pause and not self.group.stopped:
                    self.save_paused_state()

                is_complete = not self.group.stopped and self.group.finish(self.export_model)
            # after SIGTERM, waiting for the object store raises SystemExit
            except SystemExit:
                self.group.leave_without_agreement()

        if self.group.stopped and not self.membership.is_complete:
            self.leave()

        self.checkpoints.close(remove_snapshots=True)
        self.metrics.close()

    @property
    def is_paused(self) -> bool:
        """True at the step at which this process pauses the training; the process that later
        resumes the training executes this step again."""
        return self.state.step == self.pause > 0 and not self.state.is_finished(self.total)

    def save_paused_state(self) -> None:
        """Write the training state at the pause to the object store. Rank 0 waits without a time
        limit until the state is written, the other ranks at most PAUSE_CHECKPOINT_TIMEOUT_S."""
        timeout_s = PAUSE_CHECKPOINT_TIMEOUT_S if self.group.rank else math.inf
        deadline = time.monotonic() + timeout_s

        def seconds_left() -> float:
            return min(signals.seconds_left() - 1, deadline - time.monotonic())

        self.membership.report_busy(True)
        self.checkpoints.upload_current_state(self.group.last_place, seconds_left)
        self.membership.report_busy(False)

    def run_steps(self) -> None:
        """Run training steps until training ends or pauses, or until this process must leave;
        `group` handles failures."""
        group = self.group
        state = self.state
        computation = self.computation
        validation = computation.validation

        while group.start_step(self.total):
            step = state.step
            for virtual_worker in group.virtual_workers:
                if group.is_broken:
                    break

                group.add(virtual_worker, *computation.compute_summands(step, virtual_worker))

            # the gradients are summed along one fixed tree, so the number of workers does not
            # change the bits of the sum
            total = group.reduce()
            if total is None:
                continue  # a member was lost: the survivors repeat the step

            result = validation.compute_means(total) if validation.is_due(step) else None
            if result and group.rank == 0:
                self.metrics.record_validation(step, result)
                if self.spec.until:
                    self.write_file(
                        "validation.json", to_json(replace_nan({"step": step, **result})).encode()
                    )

            if result and self.is_paused:
                return group.restore_loader()

            stops_early = result and state.record_validation(
                result["loss"], is_last=step == self.total
            )
            if not stops_early:
                norm, rate = computation.update(step, total)
                self.curve.record(state.step, group.loss)
                if group.rank == 0:
                    self.metrics.record(state.step, group.loss, norm, rate)

            signals.newest_step[0] = state.step
            self.checkpoints.save_if_due(group.last_place, durable=group.saving)

    def export_model(self) -> str:
        """Write the weights, the loss curve, and finally `model.json`, which marks the run as
        complete.

        Returns the sha256 of the weights.
        """
        spec = self.spec
        tensors = self.state.copy_released_tensors()
        sha256 = weights_sha256(tensors)

        if not self.is_paused:
            self.write_file(WEIGHTS_FILE, save(tensors))
            self.write_file(CURVE, self.curve.dump())

        # the metrics are closed before model.json is written, because the processes may be killed
        # at any moment once it exists
        self.metrics.close()

        description = {
            **spec.identity(),
            "sha256": sha256,
            "step": self.state.update_count,
            "fingerprint": self.fingerprint,
            "identity": spec.identity_hash(),
        }
        if self.is_paused:
            description["paused"] = True

        if self.state.best:
            best_step, best_loss = self.state.best
            description["best"] = {
                "step": best_step,
                "validation_loss": best_loss,
                "released": spec.keep_best,
            }
            if not self.is_paused:
                if spec.keep_best:
                    released = "released"
                else:
                    released = "the last weights are released"

                say(f"lowest validation loss {best_loss:.5f} after step {best_step}: {released}")

        self.write_file(MODEL_FILE, describe_model(description))

        action = "paused after" if self.is_paused else "trained"
        say(f"{action} {self.state.update_count} steps: model {sha256}")

        return sha256

    def write_file(self, name: str, data: bytes) -> None:
        """Write one file of the model, and retry while the object store is unavailable."""
        key = f"{self.spec.out}/{name}"
        retry_until(lambda: self.store.put_large(key, data), self.group.leaving, f"to write {key}")

    def leave(self) -> None:
        """Leave the run before its last step, and exit with 143.

        Writes the state to the object store if this process may hold the only copy. If other
        members do not know that this process leaves, they must not wait for the write, so this
        process reports its departure first. If all members have agreed, this process reports its
        departure after the write, because a worker that replaces this process must find the state
        in the object store.
        """
        if self.group.others_may_wait:
            self.membership.leave()

        is_safe = True
        if self.group.last_copy and self.state.step > 0:
            is_safe = self.checkpoints.upload_current_state(
                self.group.last_place, lambda: signals.seconds_left() - 1
            )

        if not self.group.others_may_wait:
            self.membership.leave()

        self.checkpoints.close(remove_snapshots=is_safe)
        self.metrics.close()
        say(f"left after step {self.state.step}, after SIGTERM")
        raise SystemExit(exit_codes.TERMINATED)
