"""A search in the object store: which trials each round trains, and how well they did.

    ROOT/rounds/3.json                 what round 3 trains: the first write holds, whoever repeats the decision
    ROOT/trials/7/rung-1/model.json    trial 7 has trained to rung 1 (`failed.json`: it cannot)
    ROOT/trials/7/checkpoints/         where it goes on from

A decision is a function of the rounds before it and of their results, so it may be repeated at any time.
"""

import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from rekindle.errors import ConfigError, Conflict
from rekindle.storage import THREADS, NotFound
from rekindle.training.search import rounds as halving
from rekindle.training.search.config import LOSS, Settings, Sweep
from rekindle.training.search.rounds import Trial

if TYPE_CHECKING:
    from rekindle.storage import Store

FOLDER = "search"  # below the workflow's name


class Study:
    """The search below one prefix. Methods raise StorageError."""

    def __init__(self, store: "Store", root: str, sweep: Sweep) -> None:
        self.store, self.root, self.sweep = store, root.rstrip("/"), sweep
        self.trials: list[Trial] = []
        self.plan = halving.rounds(sweep)

    def place(self, trial: int, rung: int) -> str:
        """Key prefix of what a trial has left at a rung."""
        return f"{self.root}/trials/{trial}/rung-{rung}"

    def checkpoints(self, trial: int) -> str:
        return f"{self.root}/trials/{trial}/checkpoints"

    def record(self, number: int) -> dict[str, Any] | None:
        """What round `number` trains; None before that is decided."""
        return self._json(f"{self.root}/rounds/{number}.json")

    def decide(self, number: int, default: Settings, whole: Mapping[str, bool]) -> dict[str, Any]:
        """What round `number` trains, decided now or before; those before it have ended. Raises ConfigError."""
        if record := self.record(number):
            return record
        self.read(number)
        step = self.plan[number]
        if step.rung:
            record = {"rung": step.rung, "new": [], "run": self.winners(step.rung - 1, step.count)}
        else:
            from rekindle.training.search.sampling import ask  # Optuna: not where trials train

            new = ask(self.sweep, self.trials, step.count, default, whole)
            added = [{"number": trial.number, "settings": trial.settings, "attrs": trial.attrs} for trial in new]
            record = {"rung": 0, "new": added, "run": [trial.number for trial in new]}
        try:
            self.store.put(f"{self.root}/rounds/{number}.json", json.dumps(record).encode(), if_absent=True)
        except Conflict:
            return self.record(number) or record
        return record

    def winners(self, rung: int, count: int) -> list[int]:
        """The best trials of a rung. Raises ConfigError if none has a result there."""
        values = {trial.number: trial.values[rung] for trial in self.trials if rung in trial.values}
        if numbers := halving.best(values, count, self.sweep.better):
            return numbers
        why = next((trial.why for trial in self.trials if trial.why), "none has ended")
        raise ConfigError(f"of {len(self.trials)} trials none has a {self.sweep.metric}: {why}")

    def read(self, before: int | None = None) -> list[Trial]:
        """All trials of the rounds before `before` (default: all), with what is known of them, by number."""
        trials: dict[int, Trial] = {}
        runs: list[tuple[int, int]] = []
        for number in range(len(self.plan) if before is None else before):
            if not (record := self.record(number)):
                break
            trials |= {made["number"]: Trial(**made) for made in record["new"]}
            runs += [(trial, record["rung"]) for trial in record["run"]]
        with ThreadPoolExecutor(THREADS) as pool:
            results = list(pool.map(lambda run: self.result(*run), runs))
        for (number, rung), result in zip(runs, results, strict=True):
            if result:
                trial = trials[number]
                trial.values[rung], trial.why = result.get("value"), result.get("why", "")
                trial.steps, trial.sha256 = result.get("steps", trial.steps), result.get("sha256", "")
        self.trials = [trials[number] for number in sorted(trials)]
        return self.trials

    def result(self, trial: int, rung: int) -> dict[str, Any] | None:
        """How well a trial did at a rung: value, steps and sha256, or why it failed; None before it has got there."""
        place, metric = self.place(trial, rung), self.sweep.metric
        model = self._json(f"{place}/model.json")
        if model is None:
            return self._json(f"{place}/failed.json")
        measured, best = self._json(f"{place}/validation.json") or {}, model.get("best", {})
        if metric not in measured:
            return {"why": f"its held-out samples were measured by {', '.join(measured) or 'nothing'}"}
        value = measured[metric]
        if metric == LOSS and best.get("released"):
            value = min(best["validation_loss"], value)
        return {"value": value, "steps": model["step"], "sha256": model["sha256"]}

    def _json(self, key: str) -> dict[str, Any] | None:
        try:
            return json.loads(self.store.get(key))
        except NotFound:
            return None
