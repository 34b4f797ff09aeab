"""The training loop, which `rekindle step steps.train` runs."""

import math
import threading
import time

import torch
from safetensors.torch import save

from argolocal.common import exit_codes
from argolocal.common.json_text import replace_nan, to_json
from rekindle.content.weights import WEIGHTS
from rekindle.documents import MODEL_FILE, describe_model
from rekindle.errors import RekindleError, StorageError, TrackingError, say
from rekindle.keys import CURVE
from rekindle.project import user_exceptions
from rekindle.storage import Store, retry_until
from rekindle.training.checkpoint import snapshot_file
from rekindle.training.checkpoint.manager import Checkpoints
from rekindle.training.computation import Computation, build_model, make_state, open_samples
from rekindle.training.group import elastic
from rekindle.training.group.interface import Membership
from rekindle.training.group.training_group import TrainingGroup
from rekindle.training.launch import signals
from rekindle.training.local_dataset import LoaderState, local_dataset
from rekindle.training.membership.completion import completed_model
from rekindle.training.metrics import Curve, Metrics
from rekindle.training.numerics import fingerprint, pick_device
from rekindle.training.spec import TrainingSpec, check_training
from rekindle.training.training_state import load_weights, weights_sha256
from rekindle.workload import dataset_facts, load

# time limit of the other ranks for the checkpoint of a pause, which rank 0 completes
PAUSE_CHECKPOINT_TIMEOUT_S = 30.0


def train(spec: TrainingSpec, leaving: threading.Event) -> None:
    """Train until the run is complete. Raises ConfigError, DataError; SystemExit(143) if `leaving`
    is set."""
    if not retry_until(lambda: completed_model(spec), leaving, "to check if the run is complete"):
        _train_as_member(spec, leaving)
    # remove snapshots of workers that were killed during shutdown
    snapshot_file.discard(snapshot_file.run_name(spec.identity_hash(), spec.checkpoints))


def _train_as_member(spec: TrainingSpec, leaving: threading.Event) -> None:
    membership = None
    try:
        device = pick_device(spec)
        membership = elastic.discover(spec, fingerprint(spec, device), device)
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
        self.fingerprint = fingerprint(spec, device)

        # the computation
        workload = load(spec.workload)
        check_training(spec, workload)
        path = retry_until(
            lambda: local_dataset(self.store, spec.dataset, spec.digest), leaving, "for the dataset"
        )
        samples, held_out = open_samples(spec, workload, path)
        model = build_model(spec, workload, dataset_facts(path))

        if spec.start:
            retry_until(
                lambda: load_weights(model, self.store, spec.start),
                leaving,
                "for the initial weights",
            )

        self.state = make_state(spec, workload, model, device)
        self.computation = Computation(
            spec, workload, self.state, samples, held_out, membership.aborted
        )
        self.total = spec.total_steps(len(samples))
        self.pause = spec.pause(len(samples))

        # what makes it survive
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

        # what it records
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
        """Train, write the model, wait until the run is complete."""
        is_complete = False
        while not (is_complete or self.group.stopped):
            self.steps()
            try:
                if self.pause and not self.group.stopped:
                    self.save()

                is_complete = not self.group.stopped and self.group.finish(self.export)
            except SystemExit:  # SIGTERM while the object store was unavailable
                self.group.abandon()

        if self.group.stopped and not self.membership.is_complete:
            self.leave()

        self.checkpoints.close(remove=True)
        self.metrics.close()

    @property
    def paused(self) -> bool:
        """True at the pause step; the resuming process repeats that step."""
        return self.state.step == self.pause > 0 and not self.state.finished(self.total)

    def save(self) -> None:
        """Wait until the state is in the object store; only rank 0 waits without a time limit."""
        timeout_s = PAUSE_CHECKPOINT_TIMEOUT_S if self.group.rank else math.inf
        deadline = time.monotonic() + timeout_s

        def seconds_left() -> float:
            return min(signals.seconds_left() - 1, deadline - time.monotonic())

        self.membership.report_busy(True)
        self.checkpoints.flush(self.group.last_place, seconds_left)
        self.membership.report_busy(False)

    def steps(self) -> None:
        """Run the training steps. `group` handles all failures."""
        group = self.group
        state = self.state
        computation = self.computation
        validation = computation.validation

        while group.start_step(self.total):
            step = state.step
            for virtual_worker in group.virtual_workers:
                if group.is_broken:
                    break

                group.add(virtual_worker, *computation.compute(step, virtual_worker))

            # the same bits for any number of workers: one fixed tree over all virtual workers
            total = group.reduce()
            if total is None:
                continue  # a member was lost: the survivors repeat the step

            result = validation.result(total) if validation.due(step) else None
            if result and group.rank == 0:
                self.metrics.validated(step, result)
                if self.spec.until:
                    self.put(
                        "validation.json", to_json(replace_nan({"step": step, **result})).encode()
                    )

            if result and self.paused:
                return group.undo()

            stops_early = result and state.judge(result["loss"], last=step == self.total)
            if not stops_early:
                norm, rate = computation.update(step, total)
                self.curve.record(state.step, group.loss)
                if group.rank == 0:
                    self.metrics.record(state.step, group.loss, norm, rate)

            signals.newest_step[0] = state.step
            self.checkpoints.keep(group.last_place, durable=group.saving)

    def export(self) -> str:
        """Write the weights and the curve, then `model.json`, which marks the run as complete;
        return the sha256."""
        spec = self.spec
        tensors = self.state.trained()
        sha256 = weights_sha256(tensors)

        if not self.paused:
            self.put(WEIGHTS, save(tensors))
            self.put(CURVE, self.curve.dump())

        # closed before model.json exists: afterwards the processes may be killed at any moment
        self.metrics.close()

        description = {
            **spec.identity(),
            "sha256": sha256,
            "step": self.state.updates,
            "fingerprint": self.fingerprint,
            "identity": spec.identity_hash(),
        }
        if self.paused:
            description["paused"] = True

        if self.state.best:
            best_step, best_loss = self.state.best
            description["best"] = {
                "step": best_step,
                "validation_loss": best_loss,
                "released": spec.keep_best,
            }
            if not self.paused:
                if spec.keep_best:
                    released = "released"
                else:
                    released = "the last weights are released"

                say(f"lowest validation loss {best_loss:.5f} after step {best_step}: {released}")

        self.put(MODEL_FILE, describe_model(description))

        action = "paused after" if self.paused else "trained"
        say(f"{action} {self.state.updates} steps: model {sha256}")

        return sha256

    def put(self, name: str, data: bytes) -> None:
        """Write one file of the model; retries until the object store is available."""
        key = f"{self.spec.out}/{name}"
        retry_until(lambda: self.store.put(key, data), self.group.leaving, f"to write {key}")

    def leave(self) -> None:
        """Leave before the last step. Write the state to the object store if no surviving member
        has it.

        Other members do not wait until the state is written. But if all members have agreed that we
        leave, report the departure only after the write: a worker that replaces us must find the
        state in the object store.
        """
        if self.group.others_may_wait:
            self.membership.leave()

        is_safe = True
        if self.group.last_copy and self.state.step > 0:
            is_safe = self.checkpoints.flush(
                self.group.last_place, lambda: signals.seconds_left() - 1
            )

        if not self.group.others_may_wait:
            self.membership.leave()

        self.checkpoints.close(remove=is_safe)
        self.metrics.close()
        say(f"left after step {self.state.step}, after SIGTERM")
        raise SystemExit(exit_codes.TERMINATED)
