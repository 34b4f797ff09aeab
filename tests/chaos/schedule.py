"""Schedules of faults. A schedule of faults depends only on its seed.

Schedule.of(17).words()
"""

import random
from dataclasses import dataclass, field
from typing import Any

import pytest

# targets of signals, in addition to "coordinator"
WORKERS = ("worker", "launcher", "forkserver", "all")
SIGNALS = ("kill", "term", "stop")
# faults of the object store, which faults.py implements
FAULTS = ("slow", "throttle", "reset", "refuse", "hang", "deaf")
# damages of the stored checkpoints, which are made while all processes are dead
DAMAGES = ("lose hot", "flip hot", "flip chunk")
# requests during which an act can happen, named as in faults.KINDS
REQUESTS = (
    *(
        "GET dataset",
        "PUT chunk",
        "PUT manifest",
        "PUT latest",
        "PUT model.safetensors",
        "PUT model.json",
    ),
)
# seeds of the default suite, which cover all kinds of acts and moments
DEFAULT_SEEDS = (17242, 6266, 312, 14566, 12404, 15074)
# seeds of the slow suite
SLOW_SEEDS = (7185, 12347, 5392, 11774, 11706, 7181, 5428, 12379, 744, 11441, 8690)
_RECIPE = "tests.rekindle.training.recipes"
# name of a training whose state has other contents → its settings
RECIPES: dict[str, dict[str, Any]] = {
    "BatchNorm": {"model": {"statistics": True}, "average": 0.9},
    "bf16": {"precision": "bf16"},
    "early stopping": {
        "workload": _RECIPE,
        "model": {"optimizer": "NAdam", "statistics": True},
        "learning_rate": 2.0,
        "validation": "workload",
        "validation_steps": 1,
        "patience": 2,
        "keep_best": True,
        "average": 0.5,
    },
    "SGD": {"workload": _RECIPE, "model": {"optimizer": "SGD"}, "learning_rate": 1e-3},
    "Adafactor": {"workload": _RECIPE, "model": {"optimizer": "Adafactor"}, "learning_rate": 0.01},
}
# seconds: until the operator removes the pod
FOREVER = 1e9


@dataclass(frozen=True)
class Moment:
    """A moment of a run, which is `plus` seconds after the run's start, a training step or a
    generation of the worker group, or the time during which a request to the object store is
    held."""

    # kind of moment: start, step, generation or request
    kind: str
    # number of the step, the generation or the request
    number: int = 0
    request: str = ""
    plus: float = 0.0

    def words(self) -> str:
        delay_words = f" + {self.plus * 1000:.0f} ms"
        if self.kind == "start":
            return f"start{delay_words}"
        if self.kind == "request":
            return f"during the {self.number}. {self.request}"
        return f"{self.kind} {self.number}{delay_words}"


@dataclass(frozen=True)
class Act:
    """A disturbance of the run, such as a signal to a process. `victims` are indices into the list
    of the processes that are alive at the moment of the act."""

    when: Moment
    verb: str  # one of SIGNALS, FAULTS, DAMAGES, "join"
    target: str = ""
    victims: tuple[int, ...] = ()
    seconds: float = 0.0  # duration

    def words(self) -> str:
        victims = self.target + "".join(f" {number}" for number in self.victims)
        if not self.seconds:
            duration = ""
        else:
            if self.seconds == FOREVER:
                duration = " forever"
            else:
                duration = f" for {self.seconds:.1f} s"
        store = "store: " if self.verb in FAULTS else ""
        return f"{self.when.words()}: {store}{self.verb} {victims}".rstrip() + duration

    def kinds(self) -> set[str]:
        """Return the kind of an act's action (`verb target`) and the kind of the moment (`at
        KIND`)."""
        return {f"{self.verb} {self.target}".rstrip(), f"at {self.when.request or self.when.kind}"}


@dataclass(frozen=True)
class Schedule:
    """The settings of a run, the acts on it, and the delays before restarts of pods."""

    seed: int
    # "": the plain training, else one of RECIPES
    recipe: str
    # "": workers without a launcher | light: forked from a process with torch | real: a command
    launcher: str
    # number of workers per launcher
    per_pod: int
    settings: dict[str, Any] = field(hash=False)
    # duration of a micro-batch in seconds
    pace: float
    acts: tuple[Act, ...]
    # delays before the restarts of pods, used one after the other
    delays: tuple[float, ...]

    @classmethod
    def of(cls, seed: int, recipe: str = "") -> "Schedule":
        """Return the schedule of a seed, which is always the same for this seed; `recipe` changes
        only the settings."""
        rng = random.Random(seed)
        # the state has two chunks, and a step takes longer
        has_large_state = rng.random() < 0.12
        virtual_workers = rng.choice(
            [2, 3, 5] if has_large_state else [1, 2, 3, 5, 5, 7, 7, 8, 11, 13]
        )
        workers = min(rng.choice([1, 2, 2, 3, 3, 4]), virtual_workers)
        launcher = ["real" if seed % 12 == 0 else "light", "light", ""][seed % 3]
        per_pod = rng.choice([1, 1, 2]) if launcher and workers % 2 == 0 else 1

        settings = {
            "virtual_workers": virtual_workers,
            "workers": workers,
            "min_workers": rng.choice([1, 1, 1, workers]),
            "max_workers": min(workers + rng.randint(0, 1), virtual_workers),
            "steps": rng.randint(12, 20) if has_large_state else rng.randint(30, 60),
            "average": rng.choice([0.0, 0.0, 0.9]),
            "silence_seconds": 1,
            "checkpoint_steps": rng.choice([0, 1, 5, 10]),
            "checkpoint_seconds": rng.choice([0.2, 1, 30]),
            "hot_seconds": rng.choice([0, 0, 0.05, 600]),
            "model": {"width": 60_000 if has_large_state else 24},
        }

        pace = rng.choice([0.0005, 0.002, 0.05 / virtual_workers])
        # all these acts happen at the same moment of the run
        is_burst = rng.random() < 0.25
        acts: list[Act] = []

        for _ in range(rng.choice([1, 2, 3, 3, 4, 5])):
            if is_burst and acts:
                moment = acts[0].when
            else:
                moment = _choose_moment(rng, settings["steps"])

            acts.append(_choose_act(rng, moment, workers, bool(launcher)))

        delays = tuple(
            rng.choice([0.0, rng.uniform(0, 0.1), rng.uniform(0, 0.6)]) for _ in range(16)
        )
        recipe_settings = RECIPES[recipe] if recipe else {}
        settings.update(
            recipe_settings | {"model": settings["model"] | recipe_settings.get("model", {})}
        )

        return cls(seed, recipe, launcher, per_pod, settings, pace, tuple(acts), delays)

    def words(self) -> list[str]:
        """Return the schedule of faults as text."""
        settings = " ".join(f"{name}={value}" for name, value in self.settings.items())
        if self.launcher:
            kind = f"{self.launcher} launchers of {self.per_pod}"
        else:
            kind = "no launcher"
        return [
            f"seed {self.seed}: {self.recipe} {kind}, pace={self.pace:.4f} {settings}",
            *(f"  {act.words()}" for act in self.acts),
        ]

    def coverage(self) -> set[str]:
        """Return the kinds of all acts of the schedule and of their moments, and `burst` if several
        acts have the same moment."""
        kinds = set[str]().union(*(act.kinds() for act in self.acts))
        return kinds | (
            {"burst"} if len({act.when for act in self.acts}) < len(self.acts) else set()
        )


def choose_seeds(launcher: bool) -> list[Any]:
    """Return the seeds of the default and the slow suite that have, or do not have, launchers, as
    parameters of a test."""
    marked = [
        *((seed, ()) for seed in DEFAULT_SEEDS),
        *((seed, pytest.mark.slow) for seed in SLOW_SEEDS),
    ]
    return [
        pytest.param(seed, marks=marks)
        for seed, marks in marked
        if bool(Schedule.of(seed).launcher) is launcher
    ]


def required_coverage() -> set[str]:
    """Return the kinds of acts and moments that a set of schedules must cover."""
    signal_kinds = {
        f"{verb} {target}" for verb in ("kill", "term") for target in (*WORKERS, "coordinator")
    }
    signal_kinds -= {"term forkserver", "term coordinator"}
    moment_kinds = {f"at {name}" for name in ("start", "step", "generation", *REQUESTS)}
    return (
        signal_kinds
        | {"stop worker", "stop all", "join", "burst", *FAULTS, *DAMAGES}
        | moment_kinds
    )


def _choose_moment(rng: random.Random, steps: int) -> Moment:
    kind = rng.choice(["start", "step", "step", "step", "generation", "request", "request"])
    if kind == "start":
        return Moment(kind, plus=rng.uniform(0, 0.8))

    if kind == "step":
        return Moment(
            kind,
            rng.choice([0, 1, rng.randint(1, steps - 1), steps - 1]),
            plus=rng.uniform(0, 0.03),
        )

    if kind == "generation":
        return Moment(kind, rng.randint(1, 4), plus=rng.choice([0.0, rng.uniform(0, 0.02)]))

    name = rng.choice(REQUESTS)
    return Moment(
        kind, rng.randint(1, 3) if name in ("PUT chunk", "PUT manifest", "PUT latest") else 1, name
    )


def _choose_act(rng: random.Random, when: Moment, workers: int, launchers: bool) -> Act:
    kind = rng.choice(
        ["kill"] * 5
        + ["term"] * 2
        + ["stop"] * 2
        + ["coordinator", "join", "store", "store", "damage"]
    )
    if kind == "join":
        return Act(when, "join")
    if kind == "store":
        return Act(when, rng.choice(FAULTS), seconds=rng.uniform(0.2, 2))
    if kind == "damage":
        return Act(when, rng.choice(DAMAGES))
    if kind == "coordinator":
        return Act(when, "kill", "coordinator", seconds=rng.choice([0.0, rng.uniform(0, 2)]))

    victims = tuple(sorted(rng.sample(range(workers), rng.randint(1, workers))))
    targets = ["worker", "worker", "all"] + (["launcher", "forkserver"] if launchers else [])

    target = rng.choice(
        targets if kind != "term" else [name for name in targets if name != "forkserver"]
    )
    if target == "all":
        victims = ()

    if kind == "stop":
        duration = rng.choice([rng.uniform(0.1, 0.8), rng.uniform(1.2, 2.5), FOREVER])
    else:
        duration = 0.0

    if kind == "stop" and target in ("forkserver", "launcher"):
        target = "worker"
    if kind == "stop" and target == "all":
        duration = min(duration, 2.5)

    return Act(when, kind, target, victims, duration)
