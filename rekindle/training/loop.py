"""The training loop, and the parts it is made of. `rekindle step steps.train` runs it."""

import ctypes
import json
import os
import platform
import threading
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from rekindle.errors import ConfigError, DataError, RekindleError, StorageError, TrackingError, say
from rekindle.sections import checked
from rekindle.storage import Store, retry_until
from rekindle.training.checkpoint import snapshot_file
from rekindle.training.checkpoint.manager import Checkpoints
from rekindle.training.data import LoaderState, local_dataset
from rekindle.training.group import elastic as peering
from rekindle.training.group.group import Group
from rekindle.training.launch import signals
from rekindle.training.membership.server import finished
from rekindle.training.metrics import Metrics
from rekindle.training.sampler import Sampler, mix
from rekindle.training.spec import TrainingSpec as Inputs
from rekindle.training.state import State, weights_sha256
from rekindle.workload import Workload, load

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of mallopt(3)


def train(inputs: Inputs, leaving: threading.Event) -> None:
    """Make all steps together with whoever is there. Raises ConfigError, DataError; SystemExit(143) when told to go."""
    if not retry_until(lambda: finished(inputs), leaving, "to see whether the run is complete"):
        _take_part(inputs, leaving)
    snapshot_file.discard(
        snapshot_file.run_name(inputs.identity_hash(), inputs.checkpoints)
    )  # of those who were killed as it ended


def _take_part(inputs: Inputs, leaving: threading.Event) -> None:
    peers = None
    try:
        device = pick_device(inputs)
        peers = peering.find(inputs, fingerprint(inputs, device), device)
        Training(inputs, device, peers, leaving).run()
    except Exception as error:
        text = str(error) if isinstance(error, RekindleError) else f"{type(error).__name__}: {error}"
        temporary = isinstance(error, (StorageError, TrackingError))
        failed = peers.failed if peers else peering.failed
        failed(text, getattr(error, "exit_code", 1), temporary=temporary)
        raise


class Training:
    """One process's part in a run."""

    def __init__(self, inputs: Inputs, device: torch.device, peers: peering.Peers, leaving: threading.Event) -> None:
        self.inputs, self.device = inputs, device
        self.workload, section = open_workload(inputs)
        self.store = Store.from_env()
        path = retry_until(lambda: local_dataset(self.store, inputs.dataset, inputs.digest), leaving, "for the dataset")
        self.data = self.workload.dataset(path, "train")
        if not len(self.data):
            raise DataError("the dataset has no training samples: give more data, or fewer test weeks.")
        torch.manual_seed(mix(inputs.seed, 0, 0))
        self.model = self.workload.model(section, self.data.facts)
        self.state = State(self.model, inputs, device)
        # torch.manual_seed itself takes 0.1 ms, and some memory each time, for devices that are not there
        self.generators = [torch.default_generator]
        if device.type == "cuda":
            self.generators.append(torch.cuda.default_generators[device.index])
        self.sampler = Sampler(len(self.data), inputs.batch_size, inputs.virtual_workers, inputs.seed)
        self.total = inputs.total_steps(len(self.data))
        self.fingerprint = fingerprint(inputs, device)
        self.checkpoints = Checkpoints(
            self.store.short_retries(),
            inputs.checkpoints,
            inputs.identity_hash(),
            self.fingerprint,
            self.state,
            LoaderState(self.data),
            peers.note,
            leaving,
        )
        plan = {"device": self.fingerprint["device"], "workers": inputs.workers, "steps": self.total}
        plan["virtual_workers"] = inputs.virtual_workers
        samples = inputs.batch_size * inputs.virtual_workers
        self.metrics = Metrics(inputs.run_id, self.total, samples, lambda: peers.note("run", **plan))
        self.group = Group(peers, self.state, self.checkpoints, leaving)

    def run(self) -> None:
        """Train, write the model, wait until the run is over."""
        over = False
        while not (over or self.group.left):
            self.steps()
            try:
                over = not self.group.left and self.group.finish(self.export)
            except SystemExit:  # told to go while the object store was away
                self.group.desert()
        if self.group.left and not self.group.peers.complete:
            self.leave()
        self.checkpoints.close(remove=True)
        self.metrics.close()

    def steps(self) -> None:
        """The recipe. Everything that makes it survive lives behind `group`."""
        group, state, config = self.group, self.state, self.inputs
        for step in group.steps(self.total):
            for leaf in group.leaves():  # the virtual workers that are ours now
                group.add(leaf, *self.gradient(step, leaf))
            total = group.reduced()  # exact: one fixed tree over all leaves
            if total is None:
                continue  # somebody was lost: whoever is left does this step again
            rate = config.rate(step, self.total)
            norm = state.update(total, config.virtual_workers, rate)
            signals.newest[0] = state.step
            if step == 0:
                state.check_buffers()  # not only after hours, in `export`
            self.checkpoints.keep(group.place, durable=group.saving)
            if group.rank == 0:
                self.metrics.record(state.step, group.loss, norm, rate)

    def gradient(self, step: int, leaf: int) -> tuple[Tensor, list[Tensor]]:
        """Loss and gradients of one virtual worker's micro-batch, as a function of weights, seed, step and leaf."""
        batch = self.data.batch(self.sampler.indices(step, leaf))
        if self.device.type != "cpu":
            batch = tuple(part.to(self.device) for part in batch)
        seed = self.sampler.randomness(step, leaf)
        for generator in self.generators:
            generator.manual_seed(seed)
        loss = self.workload.loss(self.model, batch)
        gradients = torch.autograd.grad(loss, self.state.parameters, allow_unused=True, materialize_grads=True)
        return loss, list(gradients)

    def export(self) -> str:
        """Write `model.safetensors`, then `model.json`, which says that the run is complete; gives the sha256."""
        self.state.check_buffers()
        inputs, tensors = self.inputs, self.state.trained()
        sha256 = weights_sha256(tensors)
        self.put("model.safetensors", save(tensors))
        self.metrics.close()  # once model.json is there, all processes may be ended at any moment
        about = inputs.identity() | {
            "sha256": sha256,
            "step": self.state.step,
            "fingerprint": self.fingerprint,
            "identity": inputs.identity_hash(),
        }
        self.put("model.json", json.dumps(about, indent=1).encode())
        say(f"trained {self.state.step} steps: model {sha256}")
        return sha256

    def put(self, name: str, data: bytes) -> None:
        """Write one file of the model, however long the object store is away."""
        key = f"{self.inputs.out}/{name}"
        retry_until(lambda: self.store.put(key, data), self.group.leaving, f"to write {key}")

    def leave(self) -> None:
        """Go before the end, as told: if nobody else carries the state on, the object store must.

        Nobody waits for that; but who joins instead of us must find it there, unless others are there to ask.
        """
        safe, awaited = True, self.group.awaited
        if awaited:
            self.group.peers.leave()
        if self.group.deserted and self.state.step > 0:
            safe = self.checkpoints.flush(self.group.place, lambda: signals.left() - 1)
        if not awaited:
            self.group.peers.leave()
        self.checkpoints.close(remove=safe)
        self.metrics.close()
        say(f"left after step {self.state.step}, as told by SIGTERM")
        raise SystemExit(143)


def open_workload(inputs: Inputs) -> tuple[Workload, Any]:
    """The workload and its checked `model` section. Raises ConfigError."""
    workload = load(inputs.workload)
    return workload, checked(workload.Model, inputs.model, "model")


def pick_device(inputs: Inputs) -> torch.device:
    """Where to compute; torch is set to give the same bits each time. Raises ConfigError if there is no such device."""
    _keep_memory()
    torch.set_num_threads(inputs.threads)
    # what torch.use_deterministic_algorithms does, without its 1.8 s for importing the compiler
    torch._C._set_deterministic_algorithms(True, warn_only=False)
    settings: Any = torch.utils.deterministic
    settings.fill_uninitialized_memory = False  # we read none: no need to pay for filling it
    found = torch.cuda.is_available() if inputs.device != "cpu" else False
    if inputs.device == "cuda" and not found:
        raise ConfigError('train.device is "cuda": this machine has no usable GPU. Use "auto", or another machine.')
    if not found:
        return torch.device("cpu")
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    return torch.device("cuda", torch.cuda.current_device())


def _keep_memory() -> None:
    """Have malloc keep what is freed: some heaps give their top back each step, and pay for the same pages again."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # glibc's
        libc.mallopt(M_MMAP_THRESHOLD, 32 << 20)
        libc.mallopt(M_TRIM_THRESHOLD, 1 << 30)


def fingerprint(inputs: Inputs, device: torch.device) -> dict[str, Any]:
    """What must be equal in all workers, because the bits depend on it."""
    return {
        "torch": f"{torch.__version__} ({torch.version.git_version[:8]})",
        "instruction set": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "threads": inputs.threads,
        "config": inputs.identity_hash(),
        "data": inputs.digest,
    }
