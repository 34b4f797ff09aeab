"""Compares the requests since the last check with the test rows of the release."""

import json
import time
from collections.abc import Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Any

from rekindle import tracking
from rekindle.errors import DataError
from rekindle.release.config import PORT, DriftConfig
from rekindle.release.watch.psi import Shift, shift
from rekindle.release.watch.reference import REFERENCE
from rekindle.release.watch.scrape import Counts, increments, scrape
from rekindle.storage import NotFound, Store

DAY_S = 86400
Shifts = dict[str, Shift]  # name (`score NAME` of an output, `feature NAME`) → its shift


def compare(store: Store, config: DriftConfig, workflow: str) -> tuple[int, Shifts]:
    """Return the number of instances since the last check, and their shifts (empty below `config.minimum` instances).

    If the same workflow calls it again, it starts from the same point. Raises DataError, RekindleError.
    """
    champion = tracking.champion(config.model)
    if not champion or not champion.deployment:
        raise DataError(f'the model "{config.model}" does not have a champion: release one, or correct drift.model.')
    try:
        reference = json.loads(store.get(f"{champion.uri.rstrip('/')}/{REFERENCE}"))
    except NotFound as error:
        raise DataError(f"version {champion.version} of {config.model} lacks {REFERENCE}: release it again.") from error
    state = _state(store, config.model)
    same = state.get("version") == champion.version
    earlier = state.get("before" if state.get("workflow") == workflow else "seen", {}) if same else {}
    now = scrape(f"http://{champion.deployment}:{PORT}", champion.version)
    new = increments(now, earlier)
    if new["rows"] < config.minimum:
        return new["rows"], {}
    state |= {"version": champion.version, "workflow": workflow, "before": earlier, "seen": now}
    _write(store, config.model, state)
    return new["rows"], compute_shifts(reference, new, config.ignore)


def compute_shifts(reference: Counts, new: Counts, ignore: list[str]) -> Shifts:
    """Compute the shift of each output and feature of the reference; missing values form a bucket of their own."""
    result: Shifts = {}
    for kind in ("scores", "features"):
        for name, expected in reference[kind].items():
            if name not in ignore:
                actual = new[kind].get(name, [0] * len(expected))
                missing = [
                    max(0, side["rows"] - sum(counts)) for side, counts in ((reference, expected), (new, actual))
                ]
                result[f"{kind.removesuffix('s')} {name}"] = shift([*expected, missing[0]], [*actual, missing[1]])
    return result


def select_drifted(shifts: Shifts, threshold: float) -> Shifts:
    """Return the shifts that exceed the threshold and that chance does not explain, largest first."""
    above = {name: s for name, s in shifts.items() if s.psi > max(threshold, s.chance)}
    return dict(sorted(above.items(), key=lambda item: -item[1].psi))


def days_until_retraining(store: Store, config: DriftConfig, workflow: str) -> float:
    """Return 0 if the model may be trained again, and record it for `workflow`; else the days until it may."""
    now, state = time.time(), _state(store, config.model)
    if state.get("retrained_by") == workflow:
        return 0.0
    last = max(tracking.last_start(config.model), state.get("retrained", 0.0))
    if (wait := config.min_days_between - (now - last) / DAY_S) > 0:
        return wait
    _write(store, config.model, state | {"retrained": now, "retrained_by": workflow})
    return 0.0


def draw(shifts: Shifts, threshold: float, file: Path) -> None:
    """Plot the PSI of each output and feature, and the shares of the buckets with the largest PSI."""
    from matplotlib.figure import Figure

    order = sorted(shifts, key=lambda name: shifts[name].psi)
    figure = Figure(figsize=(12, 9), layout="constrained")
    overview, *panels = figure.subplot_mosaic("AAA;BCD;EFG").values()
    overview.barh(order, [shifts[name].psi for name in order], color="#4477aa")
    overview.axvline(threshold, color="#cc3311", linestyle="--")
    overview.set_xlabel("PSI (dashed: drift.threshold)")
    for panel, name in zip_longest(panels, order[::-1][: len(panels)]):
        if name is None:
            panel.set_visible(False)
            continue
        quantity = shifts[name]
        positions = range(len(quantity.expected))
        panel.bar([p - 0.2 for p in positions], quantity.expected, 0.4, color="#bbbbbb", label="test rows")
        panel.bar([p + 0.2 for p in positions], quantity.actual, 0.4, color="#4477aa", label="served")
        panel.set_title(f"{name}: PSI {quantity.psi:.3f}", fontsize=9)
        panel.set_xticks([])
    panels[0].legend(fontsize=8)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=100)


def _key(model: str) -> str:
    return f"releases/{model}/drift.json"


def _state(store: Store, model: str) -> dict[str, Any]:
    try:
        return json.loads(store.get(_key(model)))
    except NotFound:
        return {}


def _write(store: Store, model: str, state: Mapping[str, Any]) -> None:
    store.put(_key(model), json.dumps(state).encode())
