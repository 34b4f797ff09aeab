"""The training loop. `rekindle step steps.train` runs it."""

import json
import math
import threading
import time
from collections.abc import Callable
from functools import partial

import torch
from safetensors.torch import save
from torch import Tensor

from rekindle import project
from rekindle.errors import ConfigError, DataError, RekindleError, StorageError, TrackingError, say
from rekindle.sections import parse_section
from rekindle.storage import Store, retry_until
from rekindle.training.checkpoint import snapshot_file
from rekindle.training.checkpoint.manager import Checkpoints
from rekindle.training.data import LoaderState, local_dataset
from rekindle.training.group import elastic
from rekindle.training.group.static import StaticGroup
from rekindle.training.group.training_group import TrainingGroup
from rekindle.training.launch import signals
from rekindle.training.membership.completion import completed_model
from rekindle.training.metrics import Metrics
from rekindle.training.numerics import autocast, fingerprint, pick_device
from rekindle.training.sampler import Sampler, mix
from rekindle.training.spec import TrainingSpec, check_training
from rekindle.training.state import State, load_weights, weights_sha256
from rekindle.training.validation import Subset, Validation, split
from rekindle.workload import Workload, dataset_facts, load, training_function

PAUSE_CHECKPOINT_TIMEOUT_S = 30.0  # of the other ranks, until rank 0 has written the checkpoint of a pause


def train(spec: TrainingSpec, leaving: threading.Event) -> None:
    """Train until the run is complete. Raises ConfigError, DataError; SystemExit(143) if `leaving` is set."""
    if not retry_until(lambda: completed_model(spec), leaving, "to check if the run is complete"):
        _train_as_member(spec, leaving)
    # snapshots of workers killed during shutdown
    snapshot_file.discard(snapshot_file.run_name(spec.identity_hash(), spec.checkpoints))


def _train_as_member(spec: TrainingSpec, leaving: threading.Event) -> None:
    members = None
    try:
        device = pick_device(spec)
        members = elastic.discover(spec, fingerprint(spec, device), device)
        Training(spec, device, members, leaving).run()
    except Exception as error:
        text = str(error) if isinstance(error, RekindleError) else project.describe(error)
        temporary = isinstance(error, (StorageError, TrackingError))
        report = members.report_error if members else elastic.report_early_error
        report(text, getattr(error, "exit_code", 1), temporary=temporary)
        raise


class Training:
    """One worker process of a run."""

    def __init__(
        self, spec: TrainingSpec, device: torch.device, members: StaticGroup, leaving: threading.Event
    ) -> None:
        self.spec, self.device = spec, device
        self.workload: Workload = load(spec.workload)
        check_training(spec, self.workload)
        section = parse_section(self.workload.Model, spec.model, "model")
        self.store = Store.from_env()
        path = retry_until(lambda: local_dataset(self.store, spec.dataset, spec.digest), leaving, "for the dataset")
        self.data = self.workload.dataset(path, "train")
        if missing := [name for name in ("__len__", "batch") if not hasattr(self.data, name)]:
            raise ConfigError(f"dataset(path, split) returned {self.data!r}: it must have {' and '.join(missing)}.")
        if not len(self.data):
            raise DataError("the training split of the dataset is empty: use more data or fewer test weeks.")
        self.samples, held_out = split(spec, self.workload, self.data, path)
        torch.manual_seed(mix(spec.seed, 0, 0))
        self.model = self.workload.model(section, dataset_facts(path))
        if not isinstance(self.model, torch.nn.Module):
            raise ConfigError(f"model(section, facts) returned {self.model!r}: it must return a torch.nn.Module.")
        if spec.start:
            retry_until(lambda: load_weights(self.model, self.store, spec.start), leaving, "for the initial weights")
        self.make_optimizer = training_function(self.workload, "optimizer", section)
        self.state = State(self.model, spec, device, self.make_optimizer)
        # torch.manual_seed costs 0.1 ms and some memory per call, for devices that this machine lacks
        self.generators = [torch.default_generator]
        if device.type == "cuda":
            self.generators.append(torch.cuda.default_generators[device.index])
        self.sampler = Sampler(len(self.samples), spec.batch_size, spec.virtual_workers, spec.seed)
        self.total, self.pause = spec.total_steps(len(self.samples)), spec.pause(len(self.samples))
        self.schedule: Callable[[int, int], float] | None = training_function(self.workload, "schedule", section)
        self.precision = autocast(spec, device)
        self.validation = Validation(
            spec, self.workload, self.state, held_out, len(self.samples), self.fetch, members.aborted
        )
        self.fingerprint = fingerprint(spec, device)
        self.checkpoints = Checkpoints(
            self.store.short_retries(),
            spec.checkpoints,
            spec.identity_hash(),
            self.fingerprint,
            self.state,
            LoaderState(self.data),
            members.note,
            leaving,
        )
        plan = {"device": self.fingerprint["device"], "workers": spec.workers, "steps": self.total}
        plan["virtual_workers"] = spec.virtual_workers
        samples = spec.batch_size * spec.virtual_workers
        self.metrics = Metrics(spec.run_id, self.total, samples, spec.part, members.note, plan)
        self.group = TrainingGroup(members, self.state, self.checkpoints, leaving)

    def run(self) -> None:
        """Train, write the model, wait until the run is complete."""
        complete = False
        while not (complete or self.group.stopped):
            self.steps()
            try:
                if self.pause and not self.group.stopped:
                    self.save()
                complete = not self.group.stopped and self.group.finish(self.export)
            except SystemExit:  # SIGTERM while the object store was unavailable
                self.group.abandon()
        if self.group.stopped and not self.group.members.complete:
            self.leave()
        self.checkpoints.close(remove=True)
        self.metrics.close()

    @property
    def paused(self) -> bool:
        """True at the pause step; the resuming process repeats that step."""
        return self.state.step == self.pause > 0 and not self.state.finished(self.total)

    def save(self) -> None:
        """Wait until the state is in the object store: rank 0 without a limit."""
        members = self.group.members
        deadline = time.monotonic() + (PAUSE_CHECKPOINT_TIMEOUT_S if self.group.rank else math.inf)
        members.busy(True)
        self.checkpoints.flush(
            self.group.rank_size, lambda: min(signals.seconds_left() - 1, deadline - time.monotonic())
        )
        members.busy(False)

    def steps(self) -> None:
        """Run the training steps. `group` handles all failures."""
        group, state, validation = self.group, self.state, self.validation
        for step in group.steps(self.total):
            for virtual_worker in group.virtual_workers():  # assigned to this worker for this step
                group.add(virtual_worker, *self.compute(step, virtual_worker))
            total = group.reduced()  # exact: one fixed tree over all virtual workers
            if total is None:
                continue  # a member was lost: the survivors repeat the step
            result = validation.result(total) if validation.due(step) else None
            if result and group.rank == 0:
                self.metrics.validated(step, result)
                if self.spec.until:
                    self.put("validation.json", json.dumps({"step": step, **result}).encode())
            if result and self.paused:
                return group.undo()
            if not result or not state.judge(result["loss"], last=step == self.total):
                rate = partial(self.rate, step)
                if self.make_optimizer:  # it may draw random numbers
                    self.seed(self.sampler.randomness(step, self.spec.virtual_workers))
                norm = state.update(total, self.spec.virtual_workers, rate)
                if group.rank == 0:
                    self.metrics.record(state.step, group.loss, norm, rate(self.spec.learning_rate))
            signals.newest_step[0] = state.step
            self.checkpoints.keep(group.rank_size, durable=group.saving)

    def compute(self, step: int, virtual_worker: int) -> tuple[Tensor, list[Tensor]]:
        """Return the loss of one micro-batch, and its summands: gradients, changes of buffers, validation sums.

        They depend on the state, the seed, the step and the virtual worker, and on nothing else.
        """
        indices = self.sampler.indices(step, virtual_worker)
        batch = self.fetch(self.samples, indices, self.sampler.randomness(step, virtual_worker))
        state = self.state
        state.buffers.load()
        with self.precision:
            loss = self.workload.loss(self.model, batch)
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            result = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
            raise ConfigError(
                f"loss(model, batch) returned {result:.200}: it must return a tensor with one element that depends on "
                "the model's weights, such as the mean over the batch."
            )
        gradients = torch.autograd.grad(loss, state.parameters, allow_unused=True, materialize_grads=True)
        changes = state.buffers.changes()
        return loss, [*gradients, *changes, *self.validation.sums(step, virtual_worker)]

    def fetch(self, samples: Subset, indices: Tensor, seed: int) -> tuple[Tensor, ...]:
        """Return the samples on the device, and seed all randomness of the micro-batch."""
        batch = samples.batch(indices)
        if self.device.type != "cpu":
            batch = tuple(tensor.to(self.device) for tensor in batch)
        self.seed(seed)
        return batch

    def seed(self, seed: int) -> None:
        for generator in self.generators:
            generator.manual_seed(seed)

    def rate(self, step: int, highest: float) -> float:
        """Return the learning rate of update `step`, by the workload's schedule if it has one."""
        return highest * self.schedule(step, self.total) if self.schedule else self.spec.rate(step, self.total, highest)

    def export(self) -> str:
        """Write `model.safetensors`, then `model.json`, which marks the run as complete; returns the sha256."""
        spec, tensors = self.spec, self.state.trained()
        sha256 = weights_sha256(tensors)
        if not self.paused:
            self.put("model.safetensors", save(tensors))
        self.metrics.close()  # before model.json exists: afterwards the processes may be killed at any moment
        description = spec.identity() | {
            "sha256": sha256,
            "step": self.state.updates,
            "fingerprint": self.fingerprint,
            "identity": spec.identity_hash(),
        }
        if self.paused:
            description["paused"] = True
        if best := self.state.best:
            description["best"] = {"step": best[0], "validation_loss": best[1], "released": spec.keep_best}
            released = "released" if spec.keep_best else "the last weights are released"
            if not self.paused:
                say(f"lowest validation loss {best[1]:.5f} after step {best[0]}: {released}")
        self.put("model.json", json.dumps(description, indent=1).encode())
        say(f"{'paused after' if self.paused else 'trained'} {self.state.updates} steps: model {sha256}")
        return sha256

    def put(self, name: str, data: bytes) -> None:
        """Write one file of the model; retries until the object store is available."""
        key = f"{self.spec.out}/{name}"
        retry_until(lambda: self.store.put(key, data), self.group.leaving, f"to write {key}")

    def leave(self) -> None:
        """Leave before the last step. Write the state to the object store if no surviving member has it.

        Other members do not wait for that write. But if all members have agreed that we leave, report the departure
        only after the write: a worker that replaces us must find the state in the object store.
        """
        safe, unagreed = True, self.group.unagreed
        if unagreed:
            self.group.members.leave()
        if self.group.last_copy and self.state.step > 0:
            safe = self.checkpoints.flush(self.group.rank_size, lambda: signals.seconds_left() - 1)
        if not unagreed:
            self.group.members.leave()
        self.checkpoints.close(remove=safe)
        self.metrics.close()
        say(f"left after step {self.state.step}, after SIGTERM")
        raise SystemExit(143)
