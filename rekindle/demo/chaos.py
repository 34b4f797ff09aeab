"""`rekindle demo chaos`: the same training twice, in peace and under attack, and the sha256 of both models.

    code = run(Path(".rekindle"), Plan(workers=3), as_json=False)     # 0: equal, 1: not

Both are the PyTorchJob of one rendered manifest, run by the local controller: a coordinator and launchers as real
processes. The attacks are signals to those processes; whatever happens then, happens by itself.
"""

import hashlib
import json
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

from rekindle.demo.recording import COORDINATOR, Stage, Training
from rekindle.demo.screen import Run, Show, Strike, View, on_screen
from rekindle.local.processes import on_ending

THAW = 3.0  # seconds after which a stopped process may go on
CALM, STORM = "undisturbed", "under attack"


@dataclass(frozen=True)
class Plan:
    """What is asked for."""

    workers: int = 3
    seconds: float = 3.0  # between attacks
    steps: int = 1500
    seed: int = 0  # of the choice of victims


@dataclass(frozen=True)
class Attack:
    """A signal to some victims of a kind: the process that trains, its launcher, the coordinator, or all there is."""

    number: signal.Signals
    target: str
    victims: int = 1

    def words(self, names: Sequence[str]) -> str:
        of = "the launcher of " if self.target == "launcher" and self.number == signal.SIGKILL else ""
        return f"{self.number.name} {of}{'everything at once' if self.target == 'all' else ' and '.join(names)}"


ATTACKS = (
    Attack(signal.SIGKILL, "trainer"),
    Attack(signal.SIGKILL, COORDINATOR),
    Attack(signal.SIGKILL, "trainer", 2),
    Attack(signal.SIGTERM, "launcher"),  # as when a node is taken back: its worker leaves in order
    Attack(signal.SIGSTOP, "trainer"),
    Attack(signal.SIGKILL, "launcher"),
    Attack(signal.SIGKILL, "trainer"),
    Attack(signal.SIGKILL, "all"),
)


def run(home: Path, plan: Plan, as_json: bool) -> int:
    """The whole show; gives the exit code. Raises RekindleError if a training cannot go on; its logs stay then."""
    stage, name = Stage(home), f"chaos-{secrets.token_hex(3)}"
    folder = stage.home / "demo" / name
    told = Show(Run(CALM, 1, plan.steps), Run(STORM, plan.workers, plan.steps))
    with _ends_once_told(folder), on_screen(told, sys.stderr if as_json else sys.stdout) as view:
        told.doing = "preparing three months of card payments"
        view.tick()
        config = configured(folder, plan)
        data = prepared(stage, config)
        told.doing = f"training {plan.steps} steps with one worker, which nobody disturbs"
        with Training(stage, folder, job(config, f"{name}-calm", 1, *data)) as training:
            undisturbed(training, told, view)
        told.doing = f"training the same with {plan.workers} workers, and killing them"
        with Training(stage, folder, job(config, f"{name}-storm", plan.workers, *data)) as training:
            attacked(training, told, view, plan)
        told.equal = told.calm.sha256 == told.storm.sha256
    if told.equal:
        shutil.rmtree(folder)
        stage.store().delete([entry.key for entry in stage.store().list(f"{name}-")])
    else:
        sys.stderr.write(f"the logs of all processes are in {folder / 'logs'}\n")
    if as_json:
        print(json.dumps(as_object(told)), flush=True)
    return 0 if told.equal else 1


# -- what is trained --------------------------------------------------------------------------------------------------


def configured(folder: Path, plan: Plan) -> Any:
    """The config of both trainings, as a user would write it."""
    from rekindle.config import load_config

    values = {
        "name": "chaos",
        "data": {"source": "simulate://7?cards=150&terminals=300&days=70"},
        "model": {"width": 16, "hidden": 32, "layers": 1},
        "train": {
            "workers": plan.workers,
            "virtual_workers": 2 * plan.workers,
            "batch_size": 16,
            "steps": plan.steps,
            "seed": 1,
            "hot_seconds": 0.001,  # every step is in shared memory: so it can be seen, and none is lost with everybody
        },
    }
    folder.mkdir(parents=True)
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(values, sort_keys=False))
    return load_config(file, environment={}).config


def prepared(stage: Stage, config: Any) -> tuple[str, str]:
    """Key prefix and digest of the dataset; made once for ever, for its name is the hash of what defines it."""
    from rekindle.storage import NotFound
    from rekindle.workload import load

    stage.services.start("s3")
    store, what = stage.store(), {"workload": config.workload, "data": config.data.model_dump(mode="json")}
    prefix = f"demo/{hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:12]}"
    with suppress(NotFound):
        return f"{prefix}/dataset", store.get(f"{prefix}/digest").decode()
    with tempfile.TemporaryDirectory(dir=stage.home) as folder:
        made = load(config.workload).prepare(config.data, Path(folder) / "dataset")
        store.upload(Path(folder) / "dataset", f"{prefix}/dataset")
    store.put(f"{prefix}/digest", made.digest.encode())
    return f"{prefix}/dataset", made.digest


def job(config: Any, name: str, workers: int, dataset: str, digest: str) -> dict[str, Any]:
    """The PyTorchJob of the rendered manifest, filled in as Argo would for the workflow `name`."""
    from rekindle.render import render_manifest

    train = config.train.model_copy(update={"workers": workers, "max_workers": workers})
    templates = render_manifest(config.model_copy(update={"train": train}))["spec"]["templates"]
    (text,) = [each["resource"]["manifest"] for each in templates if each["name"] == "train"]
    filled = {"workflow.name}}/dataset": dataset, "workflow.name}}": name, "inputs.parameters.digest}}": digest}
    for variable, value in (filled | {"inputs.parameters.run_id}}": ""}).items():
        text = text.replace("{{" + variable, value)
    return yaml.safe_load(text)


# -- what happens to it -----------------------------------------------------------------------------------------------


def undisturbed(training: Training, told: Show, view: View) -> None:
    """Train in peace."""
    for _ in training.going_on():
        told.calm.saw(training.step)
        view.tick()
    told.calm.over(training.sha256())


def attacked(training: Training, told: Show, view: View, plan: Plan) -> None:
    """Strike whenever all is well again and it is time to, until the attacks are used up."""
    luck, attacks, struck = random.Random(plan.seed), list(ATTACKS), time.monotonic()
    for _ in training.going_on():
        told.storm.saw(training.step)
        for name in training.names:
            told.saw(name, training.state(name) if training.step < plan.steps else "done")
        for each in told.strikes:
            follow(each, training, told)
        if told.strikes and training.repeated:
            told.strikes[-1].lost = max(told.strikes[-1].lost, training.step - min(training.repeated))
            training.repeated.clear()
        if not (told.strikes or told.well):
            struck = time.monotonic()  # until all are there
        share = (len(told.strikes) + 1) / (len(ATTACKS) + 1)  # all attacks come, however fast this machine is
        late = training.step >= share * plan.steps
        due = told.well and time.monotonic() - struck >= plan.seconds
        if attacks and 0 < training.step < plan.steps and (due or (late and told.going)):
            struck = time.monotonic()
            told.strikes.append(strike(attacks.pop(0), training, told, luck))
        view.tick()
    told.storm.over(training.sha256())


def strike(attack: Attack, training: Training, told: Show, luck: random.Random) -> Strike:
    """Send the signal; gives what is to be watched from now on."""
    workers = [name for name in training.names if training.state(name) == "training"]
    luck.shuffle(workers)
    workers.sort(key=lambda name: training.pods[name].recent)  # first those that are started again at once
    names = {"all": training.names, COORDINATOR: [COORDINATOR]}.get(attack.target, workers[: attack.victims])
    pids = {pid for name in names for pid in targets(attack, training, name)}
    now, before = told.storm.seconds, (training.step, training.groups, len(training.resumed))
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, attack.number)
    return Strike(now, attack.words(names), tuple(names), attack.number, pids, *before)


def targets(attack: Attack, training: Training, name: str) -> list[int]:
    """The processes of a pod that an attack strikes."""
    if attack.target == "all":
        return training.processes(name)
    pid = training.trainer(name) if attack.target == "trainer" else training.launcher(name)
    return [pid] if pid else []


def follow(strike: Strike, training: Training, told: Show) -> None:
    """Note what has become of the last attack."""
    if strike.settled:
        return
    since = told.storm.seconds - strike.at
    if strike.number == signal.SIGSTOP and since >= THAW and strike.pids:
        for pid in strike.pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        strike.pids = set()
    if strike.next_step is None and training.step >= strike.step + 2:  # one may have been on its way already
        strike.next_step = since
        found = training.resumed[strike.resumed :]
        if found and len(strike.victims) == len(training.names):  # nobody survived
            strike.lost = max(strike.lost, strike.step - max(found))
    if strike.back is None and all(_is_back(name, strike, training) for name in strike.victims):
        strike.back = since


def _is_back(name: str, strike: Strike, training: Training) -> bool:
    if name == COORDINATOR:
        return training.launcher(name) not in strike.pids and training.answers()
    if training.trainer(name) in strike.pids or training.state(name) != "training":
        return False
    return strike.number == signal.SIGSTOP or training.groups > strike.groups


# -- the end ----------------------------------------------------------------------------------------------------------


def as_object(told: Show) -> dict[str, Any]:
    """What `-o json` prints."""
    times = told.recoveries
    recovery = {"median": round(statistics.median(times), 3), "longest": round(max(times), 3)} if times else {}
    return {
        "equal": told.equal,
        "sha256": told.storm.sha256,
        "sha256_undisturbed": told.calm.sha256,
        "attacks": [each.as_object() for each in told.strikes],
        "recovery_seconds": recovery,
        "steps_lost": told.lost,
    }


@contextmanager
def _ends_once_told(folder: Path) -> Iterator[None]:
    """Ctrl-C, SIGTERM and SIGHUP end the show in order, and no second one disturbs that."""
    caught: list[int] = []

    def told(number: int, frame: object) -> None:
        if not caught:
            caught.append(number)
            raise KeyboardInterrupt

    before = on_ending(told)
    try:
        yield
    except KeyboardInterrupt:
        shutil.rmtree(folder, ignore_errors=True)
        sys.stderr.write("\nstopped: nothing of it runs any more\n")
        raise SystemExit(128 + caught[0]) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
