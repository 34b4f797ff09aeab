"""`rekindle demo chaos`: train a model twice, undisturbed and under attack, and compare the sha256
of the weights.

    exit_code = run_demo(Path(".rekindle"), DemoOptions(workers=3), as_json=False)

The exit code is 0 if the weights are equal, and 1 if they differ.

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
from rekindle.demo.screen import AttackRecord, DemoRecording, DemoRun, View, live_view
from rekindle.demo.watched_training import COORDINATOR, DemoCluster, WatchedTraining
from rekindle.errors import NotFound
from rekindle.keys import CACHED_PARAMETER, DATASET, REUSE_FIELD
from rekindle.workload import load, prepare

# seconds after which a process that was stopped by SIGSTOP gets SIGCONT
RESUME_AFTER_S = 3.0
UNDISTURBED = "undisturbed"
DISTURBED = "under attack"


@dataclass(frozen=True)
class DemoOptions:
    """Options of the command `rekindle demo chaos`."""

    workers: int = 3
    # time in seconds between two attacks
    seconds: float = 3.0
    steps: int = 1500
    # seed for the random choice of the attacked processes
    seed: int = 0


@dataclass(frozen=True)
class Attack:
    """A signal that is sent to one or more victims. The target of the signal is "trainer" (the
    training process), "launcher", "coordinator" or "all"."""

    signal_number: signal.Signals
    target: str
    victims: int = 1

    def describe(self, victim_names: Sequence[str]) -> str:
        victims_text = "everything at once" if self.target == "all" else " and ".join(victim_names)
        if self.target == "launcher" and self.signal_number == signal.SIGKILL:
            victims_text = f"the launcher of {victims_text}"

        return f"{self.signal_number.name} {victims_text}"


ATTACKS = (
    Attack(signal.SIGKILL, "trainer"),
    Attack(signal.SIGKILL, COORDINATOR),
    Attack(signal.SIGKILL, "trainer", 2),
    # this attack is like the preemption of a node, after which the worker leaves at the end of its
    # current step
    Attack(signal.SIGTERM, "launcher"),
    Attack(signal.SIGSTOP, "trainer"),
    Attack(signal.SIGKILL, "launcher"),
    Attack(signal.SIGKILL, "trainer"),
    Attack(signal.SIGKILL, "all"),
)


def run_demo(home: Path, demo_options: DemoOptions, as_json: bool) -> int:
    """Run both trainings of the demo and return the exit code. Raises RekindleError if a training
    stalls; the logs of this training are kept."""
    cluster = DemoCluster(home)
    name = f"chaos-{secrets.token_hex(3)}"
    demo_folder = cluster.home / "demo" / name
    homes.create_home(cluster.home)
    demo_folder.mkdir(parents=True)

    recording = DemoRecording(
        DemoRun(UNDISTURBED, 1, demo_options.steps),
        DemoRun(DISTURBED, demo_options.workers, demo_options.steps),
    )
    output_stream = sys.stderr if as_json else sys.stdout
    with _stop_on_signals(demo_folder), live_view(recording, output_stream) as recording_view:
        recording.activity = "preparing the data"
        recording_view.tick()
        demo_config = load_demo_config(demo_options)
        dataset_key_and_digest = prepare_dataset(cluster, demo_config)

        recording.activity = f"training {demo_options.steps} steps with one worker, undisturbed"
        undisturbed_job = build_demo_job(demo_config, f"{name}-calm", 1, *dataset_key_and_digest)
        with WatchedTraining(cluster, demo_folder, undisturbed_job) as current_training:
            train_undisturbed(current_training, recording, recording_view)

        recording.activity = f"training the same with {demo_options.workers} workers, under attack"
        attacked_job = build_demo_job(
            demo_config, f"{name}-storm", demo_options.workers, *dataset_key_and_digest
        )
        with WatchedTraining(cluster, demo_folder, attacked_job) as current_training:
            train_under_attack(current_training, recording, recording_view, demo_options)

        recording.equal = recording.undisturbed.sha256 == recording.disturbed.sha256

    if recording.equal:
        shutil.rmtree(demo_folder)
        cluster.store().delete(
            [stored_object.key for stored_object in cluster.store().list(f"{name}-")]
        )
    else:
        sys.stderr.write(f"the logs of all processes are in {demo_folder / 'logs'}\n")

    if as_json:
        print(to_json(recording_as_object(recording)), flush=True)

    if recording.equal:
        return 0
    return 1


def load_demo_config(demo_options: DemoOptions) -> Any:
    """Return the config configs/chaos.yaml of the reference project with the options of the
    demo."""
    train_settings = {
        "workers": demo_options.workers,
        "virtual_workers": 2 * demo_options.workers,
        "steps": demo_options.steps,
    }
    set_flags = [f"train.{name}={value}" for name, value in train_settings.items()]
    return load_config(project.REFERENCE / "configs/chaos.yaml", set_flags, environment={}).config


def prepare_dataset(cluster: DemoCluster, demo_config: Any) -> tuple[str, str]:
    """Prepare the dataset unless it exists, and return its key and its digest. The key contains a
    hash of the workload's name and the config section `data`, so another workload or section gets
    its own dataset."""
    cluster.services.start("s3")
    object_store = cluster.store()

    dataset_definition = {
        "workload": demo_config.workload,
        "data": demo_config.data.model_dump(mode="json"),
        # FILE_LIST is part of the hash, because earlier versions of Rekindle wrote datasets without
        # the file FILE_LIST
        "list": FILE_LIST,
    }
    definition_sha256 = hashlib.sha256(
        to_json(dataset_definition, sort_keys=True).encode()
    ).hexdigest()
    key_prefix = f"demo/{definition_sha256[:12]}"

    with suppress(NotFound):
        return f"{key_prefix}/dataset", object_store.get(f"{key_prefix}/digest").decode()

    with tempfile.TemporaryDirectory(dir=cluster.home) as temporary_folder:
        _, dataset_digest = prepare(
            load(demo_config.workload), demo_config.data, Path(temporary_folder) / "dataset"
        )
        object_store.upload(Path(temporary_folder) / "dataset", f"{key_prefix}/dataset")

    object_store.put(f"{key_prefix}/digest", dataset_digest.encode())
    return f"{key_prefix}/dataset", dataset_digest


def build_demo_job(
    demo_config: Any, job_name: str, worker_count: int, dataset_key: str, dataset_digest: str
) -> dict[str, Any]:
    """Return the PyTorchJob of the rendered manifest, with the values that Argo would substitute in
    the workflow `job_name`."""
    train_config = demo_config.train.model_copy(
        update={"workers": worker_count, "max_workers": worker_count}
    )
    templates = render_manifest(demo_config.model_copy(update={"train": train_config}))["spec"][
        "templates"
    ]
    [job_text] = [
        template["resource"]["manifest"] for template in templates if template["name"] == "train"
    ]

    # the field REUSE_FIELD is not "yes", so the training does not reuse a cached model
    cached_rows = {"prepare": {"at": dataset_key.removesuffix(f"/{DATASET}")}, REUSE_FIELD: ""}
    tag_values = {
        "workflow.name": job_name,
        f"workflow.parameters.{CACHED_PARAMETER}": to_json(cached_rows),
        "inputs.parameters.digest": dataset_digest,
        "inputs.parameters.run_id": "",
    }
    return yaml.safe_load(substitute(job_text, tag_values))


def train_undisturbed(
    training: WatchedTraining, recording: DemoRecording, recording_view: View
) -> None:
    """Train without attacks, and record the steps of the training."""
    for _ in training.poll_until_done():
        recording.undisturbed.record_step(training.step)
        recording_view.tick()
    recording.undisturbed.finish(training.sha256())


def train_under_attack(
    training: WatchedTraining,
    recording: DemoRecording,
    recording_view: View,
    demo_options: DemoOptions,
) -> None:
    """Train, and start the next attack whenever all processes have recovered."""
    random_generator = random.Random(demo_options.seed)
    pending_attacks = list(ATTACKS)
    last_attack_time = time.monotonic()

    for _ in training.poll_until_done():
        recording.disturbed.record_step(training.step)
        for name in training.names:
            pod_state = training.state(name) if training.step < demo_options.steps else "done"
            recording.record_state(name, pod_state)

        for attack_record in recording.attacks:
            update_record(attack_record, training, recording)

        if recording.attacks and training.repeated_steps:
            last_attack = recording.attacks[-1]
            last_attack.lost_steps = max(
                last_attack.lost_steps, training.step - min(training.repeated_steps)
            )
            training.repeated_steps.clear()

        # count the time until the first attack from the moment when all processes have started
        if not (recording.attacks or recording.healthy):
            last_attack_time = time.monotonic()

        # on a fast machine, an attack is also due once a fixed share of the steps is done, so that
        # all attacks happen before the training ends
        progress_share = (len(recording.attacks) + 1) / (len(ATTACKS) + 1)
        is_step_reached = (
            training.step >= progress_share * demo_options.steps and recording.training
        )
        is_attack_due = (
            recording.healthy and time.monotonic() - last_attack_time >= demo_options.seconds
        )

        if (
            pending_attacks
            and 0 < training.step < demo_options.steps
            and (is_attack_due or is_step_reached)
        ):
            last_attack_time = time.monotonic()
            next_attack = pending_attacks.pop(0)
            recording.attacks.append(
                signal_processes(next_attack, training, recording, random_generator)
            )

        recording_view.tick()

    recording.disturbed.finish(training.sha256())


def signal_processes(
    attack: Attack,
    training: WatchedTraining,
    recording: DemoRecording,
    random_generator: random.Random,
) -> AttackRecord:
    """Send the signal of an attack, and return the record of the attack."""
    training_workers = [name for name in training.names if training.state(name) == "training"]
    random_generator.shuffle(training_workers)
    # prefer workers with few recent restarts, because they restart without a delay
    training_workers.sort(key=lambda name: training.pods[name].recent_restarts)

    target_names = {"all": training.names, COORDINATOR: [COORDINATOR]}.get(
        attack.target, training_workers[: attack.victims]
    )
    target_pids = {pid for name in target_names for pid in find_target_pids(attack, training, name)}
    attack_seconds = recording.disturbed.seconds
    training_progress = training.step, training.group_count, len(training.resumed_steps)

    for pid in target_pids:
        with suppress(ProcessLookupError):
            os.kill(pid, attack.signal_number)

    return AttackRecord(
        attack_seconds,
        attack.describe(target_names),
        tuple(target_names),
        attack.signal_number,
        target_pids,
        *training_progress,
    )


def find_target_pids(attack: Attack, training: WatchedTraining, worker_name: str) -> list[int]:
    """Return the pids of the processes of a pod that receive the signal of an attack."""
    if attack.target == "all":
        return training.list_pids(worker_name)

    if attack.target == "trainer":
        target_pid = training.find_trainer_pid(worker_name)
    else:
        target_pid = training.find_launcher_pid(worker_name)

    if target_pid:
        return [target_pid]
    return []


def update_record(
    attack_record: AttackRecord, training: WatchedTraining, recording: DemoRecording
) -> None:
    """Update the record of an attack with the consequences that were observed so far."""
    if attack_record.settled:
        return

    elapsed_s = recording.disturbed.seconds - attack_record.seconds
    if (
        attack_record.signal_number == signal.SIGSTOP
        and elapsed_s >= RESUME_AFTER_S
        and attack_record.pids
    ):
        for pid in attack_record.pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

        attack_record.pids = set()

    # the training has continued once two more steps are done, because one step may have been in
    # progress during the attack
    if attack_record.next_step_after_s is None and training.step >= attack_record.step + 2:
        attack_record.next_step_after_s = elapsed_s
        resumed_steps = training.resumed_steps[attack_record.resume_count :]
        has_survivors = len(attack_record.victims) < len(training.names)
        if resumed_steps and not has_survivors:
            attack_record.lost_steps = max(
                attack_record.lost_steps, attack_record.step - max(resumed_steps)
            )

    if attack_record.back_after_s is None and all(
        _is_back(name, attack_record, training) for name in attack_record.victims
    ):
        attack_record.back_after_s = elapsed_s


def _is_back(worker_name: str, attack_record: AttackRecord, training: WatchedTraining) -> bool:
    if worker_name == COORDINATOR:
        launcher_pid = training.find_launcher_pid(worker_name)
        return launcher_pid not in attack_record.pids and training.accepts_connections()

    trainer_pid = training.find_trainer_pid(worker_name)
    if trainer_pid in attack_record.pids or training.state(worker_name) != "training":
        return False
    return (
        attack_record.signal_number == signal.SIGSTOP
        or training.group_count > attack_record.group_count
    )


def recording_as_object(recording: DemoRecording) -> dict[str, Any]:
    """Return the object that `-o json` prints."""
    recovery_times = recording.recoveries
    recovery_facts = {}
    if recovery_times:
        recovery_facts = {
            "median": round(statistics.median(recovery_times), 3),
            "longest": round(max(recovery_times), 3),
        }

    return {
        "equal": recording.equal,
        "sha256": recording.disturbed.sha256,
        "sha256_undisturbed": recording.undisturbed.sha256,
        "attacks": [attack.as_object() for attack in recording.attacks],
        "recovery_seconds": recovery_facts,
        "steps_lost": recording.lost_steps,
    }


@contextmanager
def _stop_on_signals(demo_folder: Path) -> Iterator[None]:
    """Stop the demo cleanly on Ctrl-C, SIGTERM and SIGHUP, and ignore further signals while it
    stops."""
    with StopSignals() as stop_signals:
        try:
            yield
        except KeyboardInterrupt:
            shutil.rmtree(demo_folder, ignore_errors=True)
            sys.stderr.write("\nstopped: all processes of the demo have ended\n")
            raise SystemExit(
                exit_codes.SIGNAL_OFFSET + (stop_signals.caught or signal.SIGINT)
            ) from None
