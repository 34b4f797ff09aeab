"""A sweep in the object store: the trials of each round, and their results.

    ROOT/rounds/3.json                 the trials of round 3; written once, so a repeated decision returns them
    ROOT/trials/7/rung-1/model.json    trial 7 was trained to rung 1 (`failed.json`: it failed)
    ROOT/trials/7/checkpoints/         its checkpoints

A decision depends only on the previous rounds and their results, so it may be repeated at any time.
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

FOLDER = "search"  # folder below the name of the workflow


class Study:
    """The sweep below one prefix. Methods raise StorageError."""

    def __init__(self, store: "Store", root: str, sweep: Sweep) -> None:
        self.store, self.root, self.sweep = store, root.rstrip("/"), sweep
        self.trials: list[Trial] = []
        self.plan = halving.rounds(sweep)

    def output(self, trial: int, rung: int) -> str:
        """Return the key prefix of a trial's output at a rung."""
        return f"{self.root}/trials/{trial}/rung-{rung}"

    def checkpoints(self, trial: int) -> str:
        return f"{self.root}/trials/{trial}/checkpoints"

    def record(self, number: int) -> dict[str, Any] | None:
        """Return the decision on round `number`, or None if it was not made yet."""
        return self._read_json(f"{self.root}/rounds/{number}.json")

    def decide(self, number: int, default: Settings, whole: Mapping[str, bool]) -> dict[str, Any]:
        """Decide the trials of round `number`, or return the earlier decision. All previous rounds must have ended."""
        if record := self.record(number):
            return record
        self.read(number)
        planned_round = self.plan[number]
        if planned_round.rung:
            record = {
                "rung": planned_round.rung,
                "new": [],
                "run": self.winners(planned_round.rung - 1, planned_round.count),
            }
        else:
            from rekindle.training.search.sampling import ask  # imports Optuna, which training pods do not need

            new_trials = ask(self.sweep, self.trials, planned_round.count, default, whole)
            entries = [
                {"number": trial.number, "settings": trial.settings, "attrs": trial.attrs} for trial in new_trials
            ]
            record = {"rung": 0, "new": entries, "run": [trial.number for trial in new_trials]}
        try:
            self.store.put(f"{self.root}/rounds/{number}.json", json.dumps(record).encode(), if_absent=True)
        except Conflict:
            return self.record(number) or record
        return record

    def winners(self, rung: int, count: int) -> list[int]:
        """Return the best trials of a rung. Raises ConfigError if all trials have failed."""
        values = {trial.number: trial.values[rung] for trial in self.trials if rung in trial.values}
        if numbers := halving.best(values, count, self.sweep.better):
            return numbers
        reason = next((trial.why for trial in self.trials if trial.why), "no trial is finished")
        raise ConfigError(f"all {len(self.trials)} trials lack a {self.sweep.metric}: {reason}")

    def read(self, end: int | None = None) -> list[Trial]:
        """Return all trials of the rounds before round `end` (default: all) with their results, by number."""
        trials: dict[int, Trial] = {}
        runs: list[tuple[int, int]] = []
        for number in range(len(self.plan) if end is None else end):
            if not (record := self.record(number)):
                break
            trials |= {new["number"]: Trial(**new) for new in record["new"]}
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
        """Return a trial's value, steps and sha256 at a rung, or why the trial failed; None if both are missing."""
        output, metric = self.output(trial, rung), self.sweep.metric
        model = self._read_json(f"{output}/model.json")
        if model is None:
            return self._read_json(f"{output}/failed.json")
        metrics, best_validation = self._read_json(f"{output}/validation.json") or {}, model.get("best", {})
        if metric not in metrics:
            return {"why": f"its validation has only the metrics {', '.join(metrics) or '(none)'}"}
        value = metrics[metric]
        if metric == LOSS and best_validation.get("released"):
            value = min(best_validation["validation_loss"], value)
        return {"value": value, "steps": model["step"], "sha256": model["sha256"]}

    def _read_json(self, key: str) -> dict[str, Any] | None:
        try:
            return json.loads(self.store.get(key))
        except NotFound:
            return None
