"""`rekindle demo chaos`: train a model twice, undisturbed and under attack, and compare the sha256
of the weights.

    code = run(Path(".rekindle"), Plan(workers=3), as_json=False)     # 0: equal, 1: different

The local controller runs both trainings as the PyTorchJob of one rendered manifest, with a
coordinator and launchers as real processes. An attack sends a signal to some of these processes,
and Rekindle recovers.
"""

import hashlib
import os
import random
import secrets
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from argolocal.common import exit_codes, homes
from argolocal.common.interrupts import StopSignals
from argolocal.common.json_text import to_json
from argolocal.language.substitute import substitute
from rekindle import project
from rekindle.blocks.manifest.config import load_config
from rekindle.blocks.manifest.render import render_manifest
from rekindle.content.dataset import FILE_LIST
from rekindle.demo.screen import AttackRecord, Recording, Run, View, live_view
from rekindle.demo.watched_training import COORDINATOR, DemoCluster, Training
from rekindle.errors import NotFound
from rekindle.keys import CACHED, DATASET, REUSE
from rekindle.workload import load, prepare

RESUME_AFTER_S = 3.0  # seconds after which a process that was stopped by SIGSTOP gets SIGCONT
UNDISTURBED = "undisturbed"
DISTURBED = "under attack"


@dataclass(frozen=True)
class Plan:
    """Options of the command."""

    workers: int = 3
    seconds: float = 3.0  # time in seconds between two attacks
    steps: int = 1500
    seed: int = 0  # seed for the random choice of the attacked processes


@dataclass(frozen=True)
class Attack:
    """A signal that is sent to one or more victims. `target` is "trainer" (the training process),
    "launcher", "coordinator" or "all"."""

    signal_number: signal.Signals
    target: str
    victims: int = 1

    def describe(self, names: Sequence[str]) -> str:
        victims = "everything at once" if self.target == "all" else " and ".join(names)
        if self.target == "launcher" and self.signal_number == signal.SIGKILL:
            victims = f"the launcher of {victims}"

        return f"{self.signal_number.name} {victims}"


ATTACKS = (
    Attack(signal.SIGKILL, "trainer"),
    Attack(signal.SIGKILL, COORDINATOR),
    Attack(signal.SIGKILL, "trainer", 2),
    # like the preemption of a node, after which the worker leaves at the end of its current step
    Attack(signal.SIGTERM, "launcher"),
    Attack(signal.SIGSTOP, "trainer"),
    Attack(signal.SIGKILL, "launcher"),
    Attack(signal.SIGKILL, "trainer"),
    Attack(signal.SIGKILL, "all"),
)


def run(home: Path, plan: Plan, as_json: bool) -> int:
    """Run both trainings and return the exit code. Raises RekindleError if a training stalls,
    without deleting its logs."""
    cluster = DemoCluster(home)
    name = f"chaos-{secrets.token_hex(3)}"
    folder = cluster.home / "demo" / name
    homes.make(cluster.home)
    folder.mkdir(parents=True)

    recording = Recording(Run(UNDISTURBED, 1, plan.steps), Run(DISTURBED, plan.workers, plan.steps))
    out = sys.stderr if as_json else sys.stdout
    with _stop_on_signals(folder), live_view(recording, out) as view:
        recording.activity = "preparing the data"
        view.tick()
        config = configure(plan)
        data = prepare_dataset(cluster, config)

        recording.activity = f"training {plan.steps} steps with one worker, undisturbed"
        job = training_job(config, f"{name}-calm", 1, *data)
        with Training(cluster, folder, job) as training:
            train_undisturbed(training, recording, view)

        recording.activity = f"training the same with {plan.workers} workers, under attack"
        job = training_job(config, f"{name}-storm", plan.workers, *data)
        with Training(cluster, folder, job) as training:
            train_under_attack(training, recording, view, plan)

        recording.equal = recording.undisturbed.sha256 == recording.disturbed.sha256

    if recording.equal:
        shutil.rmtree(folder)
        cluster.store().delete([entry.key for entry in cluster.store().list(f"{name}-")])
    else:
        sys.stderr.write(f"the logs of all processes are in {folder / 'logs'}\n")

    if as_json:
        print(to_json(as_object(recording)), flush=True)

    if recording.equal:
        return 0
    return 1


def configure(plan: Plan) -> Any:
    train = {"workers": plan.workers, "virtual_workers": 2 * plan.workers, "steps": plan.steps}
    settings = [f"train.{name}={value}" for name, value in train.items()]
    return load_config(project.REFERENCE / "configs/chaos.yaml", settings, environment={}).config


def prepare_dataset(cluster: DemoCluster, config: Any) -> tuple[str, str]:
    """Prepare the dataset unless it exists, and return its key and its digest. The key contains a
    hash of the workload's name and the config section `data`, so another workload or section gets
    its own dataset."""
    cluster.services.start("s3")
    store = cluster.store()

    definition = {
        "workload": config.workload,
        "data": config.data.model_dump(mode="json"),
        # the file's name is part of the hash, because earlier versions of Rekindle wrote datasets
        # without this list of files
        "list": FILE_LIST,
    }
    sha256 = hashlib.sha256(to_json(definition, sort_keys=True).encode()).hexdigest()
    prefix = f"demo/{sha256[:12]}"

    with suppress(NotFound):
        return f"{prefix}/dataset", store.get(f"{prefix}/digest").decode()

    with tempfile.TemporaryDirectory(dir=cluster.home) as folder:
        _, dataset_digest = prepare(load(config.workload), config.data, Path(folder) / "dataset")
        store.upload(Path(folder) / "dataset", f"{prefix}/dataset")

    store.put(f"{prefix}/digest", dataset_digest.encode())
    return f"{prefix}/dataset", dataset_digest


def training_job(config: Any, name: str, workers: int, dataset: str, digest: str) -> dict[str, Any]:
    """Return the PyTorchJob of the rendered manifest, with the values that Argo would substitute in
    the workflow `name`."""
    train = config.train.model_copy(update={"workers": workers, "max_workers": workers})
    templates = render_manifest(config.model_copy(update={"train": train}))["spec"]["templates"]
    (text,) = [
        template["resource"]["manifest"] for template in templates if template["name"] == "train"
    ]

    # with an empty REUSE, no model is reused
    cached = {"prepare": {"at": dataset.removesuffix(f"/{DATASET}")}, REUSE: ""}
    scope = {
        "workflow.name": name,
        f"workflow.parameters.{CACHED}": to_json(cached),
        "inputs.parameters.digest": digest,
        "inputs.parameters.run_id": "",
    }
    return yaml.safe_load(substitute(text, scope))


def train_undisturbed(training: Training, recording: Recording, view: View) -> None:
    for _ in training.poll_until_done():
        recording.undisturbed.record_step(training.step)
        view.tick()
    recording.undisturbed.finish(training.sha256())


def train_under_attack(training: Training, recording: Recording, view: View, plan: Plan) -> None:
    """Train, and start the next attack whenever all processes have recovered."""
    rng = random.Random(plan.seed)
    pending_attacks = list(ATTACKS)
    last_attack_time = time.monotonic()

    for _ in training.poll_until_done():
        recording.disturbed.record_step(training.step)
        for name in training.names:
            state = training.state(name) if training.step < plan.steps else "done"
            recording.record_state(name, state)

        for record in recording.attacks:
            update_record(record, training, recording)

        if recording.attacks and training.repeated_steps:
            last = recording.attacks[-1]
            last.lost_steps = max(last.lost_steps, training.step - min(training.repeated_steps))
            training.repeated_steps.clear()

        # count the time until the first attack from the moment when all processes have started
        if not (recording.attacks or recording.healthy):
            last_attack_time = time.monotonic()

        # on a fast machine, an attack is also due once a fixed share of the steps is done, so that
        # all attacks happen before the training ends
        share = (len(recording.attacks) + 1) / (len(ATTACKS) + 1)
        is_late = training.step >= share * plan.steps and recording.training
        is_due = recording.healthy and time.monotonic() - last_attack_time >= plan.seconds

        if pending_attacks and 0 < training.step < plan.steps and (is_due or is_late):
            last_attack_time = time.monotonic()
            attack = pending_attacks.pop(0)
            recording.attacks.append(signal_processes(attack, training, recording, rng))

        view.tick()

    recording.disturbed.finish(training.sha256())


def signal_processes(
    attack: Attack, training: Training, recording: Recording, rng: random.Random
) -> AttackRecord:
    """Send the signal of an attack, and return the record of the attack."""
    workers = [name for name in training.names if training.state(name) == "training"]
    rng.shuffle(workers)
    # prefer workers with few recent restarts, because they restart without a delay
    workers.sort(key=lambda name: training.pods[name].recent_restarts)

    names = {"all": training.names, COORDINATOR: [COORDINATOR]}.get(
        attack.target, workers[: attack.victims]
    )
    pids = {pid for name in names for pid in find_target_pids(attack, training, name)}
    seconds = recording.disturbed.seconds
    progress = training.step, training.group_count, len(training.resumed_steps)

    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, attack.signal_number)

    return AttackRecord(
        seconds, attack.describe(names), tuple(names), attack.signal_number, pids, *progress
    )


def find_target_pids(attack: Attack, training: Training, name: str) -> list[int]:
    """Return the pids of the processes of a pod that receive the signal of an attack."""
    if attack.target == "all":
        return training.processes(name)

    if attack.target == "trainer":
        pid = training.trainer(name)
    else:
        pid = training.launcher(name)
    if pid:
        return [pid]
    return []


def update_record(record: AttackRecord, training: Training, recording: Recording) -> None:
    """Update the record of an attack with its consequences that have been observed so far."""
    if record.settled:
        return

    elapsed_s = recording.disturbed.seconds - record.seconds
    if record.signal_number == signal.SIGSTOP and elapsed_s >= RESUME_AFTER_S and record.pids:
        for pid in record.pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

        record.pids = set()

    # wait for two more steps, because one step may have been in progress during the attack
    if record.next_step_after_s is None and training.step >= record.step + 2:
        record.next_step_after_s = elapsed_s
        restored = training.resumed_steps[record.resume_count :]
        survived = len(record.victims) < len(training.names)
        if restored and not survived:
            record.lost_steps = max(record.lost_steps, record.step - max(restored))

    if record.back_after_s is None and all(
        _is_back(name, record, training) for name in record.victims
    ):
        record.back_after_s = elapsed_s


def _is_back(name: str, record: AttackRecord, training: Training) -> bool:
    if name == COORDINATOR:
        return training.launcher(name) not in record.pids and training.accepts_connections()

    if training.trainer(name) in record.pids or training.state(name) != "training":
        return False
    return record.signal_number == signal.SIGSTOP or training.group_count > record.group_count


def as_object(recording: Recording) -> dict[str, Any]:
    """Return the object that `-o json` prints."""
    times = recording.recoveries
    recovery = {}
    if times:
        recovery = {"median": round(statistics.median(times), 3), "longest": round(max(times), 3)}

    return {
        "equal": recording.equal,
        "sha256": recording.disturbed.sha256,
        "sha256_undisturbed": recording.undisturbed.sha256,
        "attacks": [attack.as_object() for attack in recording.attacks],
        "recovery_seconds": recovery,
        "steps_lost": recording.lost_steps,
    }


@contextmanager
def _stop_on_signals(folder: Path) -> Iterator[None]:
    """Stop the demo cleanly on Ctrl-C, SIGTERM and SIGHUP, and ignore further signals while it
    stops."""
    with StopSignals() as signals:
        try:
            yield
        except KeyboardInterrupt:
            shutil.rmtree(folder, ignore_errors=True)
            sys.stderr.write("\nstopped: all processes of the demo have ended\n")
            raise SystemExit(exit_codes.SIGNALLED + (signals.caught or signal.SIGINT)) from None
