"""The training loop, which `rekindle step steps.train` runs."""

import math
import threading
import time
from collections.abc import Callable

import torch
from safetensors.torch import save

from argolocal.common import exit_codes
from argolocal.common.json_text import replace_nan, to_json
from rekindle.cache.uncovered import write_uncovered_reason
from rekindle.content.weights import WEIGHTS_FILE
from rekindle.documents import MODEL_FILE, encode_model_description
from rekindle.errors import RekindleError, StorageError, TrackingError, write_stderr
from rekindle.keys import CURVE, MODEL
from rekindle.project import user_exceptions
from rekindle.storage import Store, retry_until_stopped
from rekindle.training.checkpoint import snapshot_file
from rekindle.training.checkpoint.manager import WorkerCheckpoints
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
from rekindle.training.metrics import LossCurve, TrainingMetrics
from rekindle.training.numerics import compute_fingerprint, prepare_device
from rekindle.training.spec import TrainingSpec, check_supported_settings
from rekindle.training.training_state import load_weights, weights_sha256
from rekindle.workload import load, read_dataset_facts

# time that the other ranks wait until rank 0 has completed the checkpoint of a pause
PAUSE_CHECKPOINT_TIMEOUT_S = 30.0


def train(
    training_spec: TrainingSpec,
    leaving_event: threading.Event,
    find_uncovered_code: Callable[[], str] = str,
) -> None:
    """Train until the run is complete.

    `find_uncovered_code`: function that returns the reason why the cache key does not cover the
    code that this process has loaded; "" if the key covers all loaded code. Raises ConfigError,
    DataError, and SystemExit(143) once `leaving_event` is set.
    """
    if not retry_until_stopped(
        lambda: read_completed_model(training_spec),
        leaving_event,
        "to check if the run is complete",
    ):
        _train_as_member(training_spec, leaving_event, find_uncovered_code)
    # remove the snapshots that workers have left if they were killed during shutdown
    snapshot_file.remove_run_files(
        snapshot_file.hash_run_name(training_spec.identity_hash(), training_spec.checkpoints)
    )


def _train_as_member(
    training_spec: TrainingSpec,
    leaving_event: threading.Event,
    find_uncovered_code: Callable[[], str],
) -> None:
    membership = None
    try:
        device = prepare_device(training_spec)
        membership = elastic.create_membership(
            training_spec, compute_fingerprint(training_spec, device), device
        )
        TrainingProcess(training_spec, device, membership, leaving_event, find_uncovered_code).run()
    except Exception as error:
        if isinstance(error, RekindleError):
            error_text = str(error)
        else:
            error_text = user_exceptions.describe_exception(error)

        exit_code = getattr(error, "exit_code", 1)
        is_temporary = isinstance(error, (StorageError, TrackingError))
        if membership:
            report_error_function = membership.report_error
        else:
            report_error_function = elastic.report_early_error

        report_error_function(error_text, exit_code, is_temporary=is_temporary)
        raise


class TrainingProcess:
    """One worker process of a run."""

    def __init__(
        self,
        training_spec: TrainingSpec,
        device: torch.device,
        membership: Membership,
        leaving_event: threading.Event,
        find_uncovered_code: Callable[[], str],
    ) -> None:
        self.spec = training_spec
        self.find_uncovered_code = find_uncovered_code
        self.store = Store.from_env()
        self.membership = membership
        self.fingerprint = compute_fingerprint(training_spec, device)

        # the computation
        workload = load(training_spec.workload)
        check_supported_settings(training_spec, workload)
        dataset_path = retry_until_stopped(
            lambda: fetch_dataset(self.store, training_spec.dataset, training_spec.digest),
            leaving_event,
            "for the dataset",
        )
        samples, held_out = open_samples(training_spec, workload, dataset_path)
        model = build_model(training_spec, workload, read_dataset_facts(dataset_path))

        if training_spec.start:
            retry_until_stopped(
                lambda: load_weights(model, self.store, training_spec.start),
                leaving_event,
                "for the initial weights",
            )

        self.state = make_training_state(training_spec, workload, model, device)
        self.computation = StepComputation(
            training_spec, workload, self.state, samples, held_out, membership.aborted
        )
        self.total = training_spec.total_steps(len(samples))
        self.pause = training_spec.compute_pause_step(len(samples))

        # recovery
        loader_state = LoaderState(samples.data)

        self.checkpoints = WorkerCheckpoints(
            self.store.short_retries(),
            training_spec.checkpoints,
            training_spec.identity_hash(),
            self.fingerprint,
            self.state,
            loader_state,
            membership.note,
            leaving_event,
        )

        self.group = TrainingGroup(
            membership, self.state, loader_state, self.checkpoints, leaving_event
        )

        # metrics
        run_plan = {
            "device": self.fingerprint["device"],
            "workers": training_spec.workers,
            "steps": self.total,
            "virtual_workers": training_spec.virtual_workers,
            "samples": len(samples),
        }

        samples_per_step = training_spec.batch_size * training_spec.virtual_workers
        self.metrics = TrainingMetrics(
            training_spec.run_id,
            self.total,
            samples_per_step,
            training_spec.part,
            membership.note,
            run_plan,
        )
        self.curve = LossCurve(self.total)

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
        """Write the training state at the pause of the training to the object store. Rank 0 waits
        without a time limit until the state is written, the other ranks at most
        PAUSE_CHECKPOINT_TIMEOUT_S."""
        timeout_s = PAUSE_CHECKPOINT_TIMEOUT_S if self.group.rank else math.inf
        deadline_s = time.monotonic() + timeout_s

        def seconds_left() -> float:
            return min(signals.compute_seconds_left() - 1, deadline_s - time.monotonic())

        self.membership.report_busy(True)
        self.checkpoints.upload_current_state(self.group.last_rank_and_size, seconds_left)
        self.membership.report_busy(False)

    def run_steps(self) -> None:
        """Run training steps until training ends or pauses, or until this process must leave;
        `group` handles failures."""
        training_group = self.group
        training_state = self.state
        computation = self.computation
        validation = computation.validation

        while training_group.start_step(self.total):
            step_number = training_state.step
            for virtual_worker in training_group.virtual_workers:
                if training_group.is_broken:
                    break

                training_group.add(
                    virtual_worker, *computation.compute_summands(step_number, virtual_worker)
                )

            # the gradients are summed along one fixed tree, so the number of workers does not
            # change the bits of the sum
            summed_summands = training_group.reduce()
            if summed_summands is None:
                # a member of the group was lost, so the remaining members repeat the step
                continue

            validation_means = (
                validation.compute_means(summed_summands)
                if validation.is_due(step_number)
                else None
            )
            if validation_means and training_group.rank == 0:
                self.metrics.record_validation(step_number, validation_means)
                if self.spec.until:
                    self.write_model_file(
                        "validation.json",
                        to_json(replace_nan({"step": step_number, **validation_means})).encode(),
                    )

            if validation_means and self.is_paused:
                return training_group.restore_loader()

            stops_early = validation_means and training_state.record_validation(
                validation_means["loss"], is_last=step_number == self.total
            )
            if not stops_early:
                gradient_norm, learning_rate = computation.update(step_number, summed_summands)
                self.curve.record(training_state.step, training_group.loss)
                if training_group.rank == 0:
                    self.metrics.record(
                        training_state.step, training_group.loss, gradient_norm, learning_rate
                    )

            signals.newest_step[0] = training_state.step
            self.checkpoints.save_if_due(
                training_group.last_rank_and_size, is_durable=training_group.saving
            )

    def export_model(self) -> str:
        """Write the weights, the loss curve, and finally `model.json`, which marks the run as
        complete.

        Returns the sha256 of the weights.
        """
        training_spec = self.spec
        released_tensors = self.state.copy_released_tensors()
        sha256 = weights_sha256(released_tensors)

        if not self.is_paused:
            self.write_model_file(WEIGHTS_FILE, save(released_tensors))
            self.write_model_file(CURVE, self.curve.dump())

        self.report_uncovered_code()

        # close the metrics before model.json is written, because the processes may be killed at any
        # moment once model.json exists
        self.metrics.close()

        model_description = {
            **training_spec.identity(),
            "sha256": sha256,
            "step": self.state.update_count,
            "fingerprint": self.fingerprint,
            "identity": training_spec.identity_hash(),
        }
        if self.is_paused:
            model_description["paused"] = True

        if self.state.best:
            best_step, best_loss = self.state.best
            model_description["best"] = {
                "step": best_step,
                "validation_loss": best_loss,
                "released": training_spec.keep_best,
            }
            if not self.is_paused:
                if training_spec.keep_best:
                    released_text = "released"
                else:
                    released_text = "the last weights are released"

                write_stderr(
                    f"lowest validation loss {best_loss:.5f} after step {best_step}:"
                    f" {released_text}"
                )

        self.write_model_file(MODEL_FILE, encode_model_description(model_description))

        action_text = "paused after" if self.is_paused else "trained"
        write_stderr(f"{action_text} {self.state.update_count} steps: model {sha256}")

        return sha256

    def report_uncovered_code(self) -> None:
        """Write the reason why no later run may reuse the model, if this process has loaded code
        that the cache key does not cover."""
        training_spec = self.spec
        if not training_spec.reuse:
            return

        reason = self.find_uncovered_code()
        if reason:
            write_stderr(reason)
            task_prefix = training_spec.out.removesuffix(f"/{MODEL}")
            retry_until_stopped(
                lambda: write_uncovered_reason(self.store, task_prefix, reason),
                self.group.leaving,
                "to write that the model is not reused",
            )

    def write_model_file(self, file_name: str, file_bytes: bytes) -> None:
        """Write one file of the model to the object store; retry while the object store is
        unavailable."""
        object_key = f"{self.spec.out}/{file_name}"
        retry_until_stopped(
            lambda: self.store.put_large(object_key, file_bytes),
            self.group.leaving,
            f"to write {object_key}",
        )

    def leave(self) -> None:
        """Leave the run before its last step, and exit with 143.

        The training state is written to the object store if this process may hold the only copy. If
        other members do not know that this process leaves, they must not wait until the state is
        written, so this process reports its departure first. If all members have agreed to the
        departure, this process reports its departure after the state is written, because a worker
        that replaces this process must find the state in the object store.
        """
        if self.group.others_may_wait:
            self.membership.leave()

        is_state_saved = True
        if self.group.last_copy and self.state.step > 0:
            is_state_saved = self.checkpoints.upload_current_state(
                self.group.last_rank_and_size, lambda: signals.compute_seconds_left() - 1
            )

        if not self.group.others_may_wait:
            self.membership.leave()

        self.checkpoints.close(remove_snapshots=is_state_saved)
        self.metrics.close()
        write_stderr(f"left after step {self.state.step}, after SIGTERM")
        raise SystemExit(exit_codes.TERMINATED)
