"""Judges whether what a model's servers saw since the last look is still what it was judged on."""

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
from rekindle.release.watch.scrape import Counts, look, since
from rekindle.storage import NotFound, Store

DAY = 86400
Shifts = dict[str, Shift]  # by name: `score NAME` of an output, `feature NAME`


def judge(store: Store, config: DriftConfig, workflow: str) -> tuple[int, Shifts]:
    """The instances since the last look, and their shifts; none if there are fewer than `config.minimum`.

    Repeated by the same workflow, it looks from the same point. Raises DataError, RekindleError.
    """
    champion = tracking.champion(config.model)
    if not champion or not champion.deployment:
        raise DataError(f'the model "{config.model}" has no champion that serves: release one, or correct drift.model.')
    try:
        reference = json.loads(store.get(f"{champion.uri.rstrip('/')}/{REFERENCE}"))
    except NotFound as error:
        raise DataError(
            f"version {champion.version} of {config.model} has no {REFERENCE}: release it again."
        ) from error
    state = _state(store, config.model)
    same = state.get("version") == champion.version
    before = state.get("before" if state.get("workflow") == workflow else "seen", {}) if same else {}
    now = look(f"http://{champion.deployment}:{PORT}", champion.version)
    new = since(now, before)
    if new["rows"] < config.minimum:
        return new["rows"], {}
    _write(
        store, config.model, state | {"version": champion.version, "workflow": workflow, "before": before, "seen": now}
    )
    return new["rows"], shifts(reference, new, config.ignore)


def shifts(reference: Counts, new: Counts, ignore: list[str]) -> Shifts:
    """Of every output and feature that the reference has; what an instance lacks is a group of its own."""
    found: Shifts = {}
    for kind in ("scores", "features"):
        for name, expected in reference[kind].items():
            if name not in ignore:
                actual = new[kind].get(name, [0] * len(expected))
                absent = [max(0, all_of["rows"] - sum(part)) for all_of, part in ((reference, expected), (new, actual))]
                found[f"{kind.removesuffix('s')} {name}"] = shift([*expected, absent[0]], [*actual, absent[1]])
    return found


def drifted(found: Shifts, threshold: float) -> dict[str, Shift]:
    """Those that are above the threshold and that chance does not explain, the largest first."""
    above = {name: s for name, s in found.items() if s.psi > max(threshold, s.chance)}
    return dict(sorted(above.items(), key=lambda item: -item[1].psi))


def may_retrain(store: Store, config: DriftConfig, workflow: str) -> float:
    """0 if the model may be trained again for `workflow`, which is recorded; else the days until it may."""
    now, state = time.time(), _state(store, config.model)
    if state.get("retrained_by") == workflow:
        return 0.0
    last = max(tracking.last_start(config.model), state.get("retrained", 0.0))
    if (wait := config.min_days_between - (now - last) / DAY) > 0:
        return wait
    _write(store, config.model, state | {"retrained": now, "retrained_by": workflow})
    return 0.0


def draw(found: Shifts, threshold: float, file: Path) -> None:
    """The PSI of every quantity, and the shares of the groups of the worst."""
    from matplotlib.figure import Figure

    order = sorted(found, key=lambda name: found[name].psi)
    figure = Figure(figsize=(12, 9), layout="constrained")
    every, *panels = figure.subplot_mosaic("AAA;BCD;EFG").values()
    every.barh(order, [found[name].psi for name in order], color="#4477aa")
    every.axvline(threshold, color="#cc3311", linestyle="--")
    every.set_xlabel("PSI (dashed: drift.threshold)")
    for panel, name in zip_longest(panels, order[::-1][: len(panels)]):
        if name is None:
            panel.set_visible(False)
            continue
        places = range(len(found[name].expected))
        panel.bar([place - 0.2 for place in places], found[name].expected, 0.4, color="#bbbbbb", label="test rows")
        panel.bar([place + 0.2 for place in places], found[name].actual, 0.4, color="#4477aa", label="served")
        panel.set_title(f"{name}: PSI {found[name].psi:.3f}", fontsize=9)
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
