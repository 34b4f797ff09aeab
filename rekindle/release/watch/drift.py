"""Checks a model for drift: compares the requests since the last check with the test rows of its
release."""

import time
from collections.abc import Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from argolocal.common.json_text import to_json
from rekindle import tracking
from rekindle.content.verified_release import REFERENCE, read_described, reject_other_folder
from rekindle.documents import Document, parse
from rekindle.errors import DataError, RekindleError, say
from rekindle.names import ModelName
from rekindle.release.serve_config import PORT, DriftConfig
from rekindle.release.watch.psi import Shift, compute_shift
from rekindle.release.watch.scores import BUCKET_BOUNDS
from rekindle.release.watch.scrape import Counts, scrape, subtract_counts
from rekindle.storage import Conflict, NotFound, Store

DAY_S = 86400
Count = Annotated[int, Field(ge=0)]
Buckets = Annotated[
    list[Count], Field(min_length=len(BUCKET_BOUNDS), max_length=len(BUCKET_BOUNDS))
]
Shifts = dict[str, Shift]  # `score OUTPUT` or `feature NAME` → its shift


class Histograms(Document):
    """Histograms of the numbers in requests and predictions."""

    rows: Count
    scores: dict[str, Buckets] = Field(default_factory=dict)
    features: dict[str, Buckets] = Field(default_factory=dict)


class Reference(Histograms):
    """reference.json: the histograms of the test rows of a release."""

    rows: int = Field(ge=1)


class State(Document):
    """drift.json of a model: the last retraining, and the histograms of each server process at the
    last check (`seen`) and at the one before it (`before`)."""

    version: str = ""
    workflow: str = ""
    before: dict[str, Histograms] = Field(default_factory=dict)
    seen: dict[str, Histograms] = Field(default_factory=dict)
    retrained: float = 0.0  # Unix time
    retrained_by: str = ""


def compare(store: Store, config: DriftConfig, workflow: str) -> tuple[int, Shifts]:
    """Return the number of instances since the last check or promotion, and the shifts.

    With fewer than `config.minimum` instances, the shifts are empty. Repeated calls by one
    workflow, such as retries, count from the check before its first call. Raises DataError,
    RekindleError.
    """
    champion = tracking.champion(config.model)
    if not champion or not champion.deployment:
        raise DataError(
            f'the model "{config.model}" does not have a champion: correct drift.model, or'
            " release it."
        )

    key = champion.uri.rstrip("/")
    reject_other_folder(key, store.uri(key))

    try:
        data = read_described(store, key, REFERENCE)
        reference = parse(Reference, data, store.uri(f"{key}/{REFERENCE}")).model_dump()
    except NotFound as error:
        raise DataError(
            f"version {champion.version} of {config.model} lacks {REFERENCE}: release it again."
        ) from error

    endpoint = f"http://{champion.deployment}:{PORT}"
    new_counts = _count_new_requests(store, config, endpoint, champion.version, workflow)
    if new_counts["rows"] < config.minimum:
        return new_counts["rows"], {}
    return new_counts["rows"], compute_shifts(reference, new_counts, config.ignore)


def _count_new_requests(
    store: Store, config: DriftConfig, endpoint: str, version: str, workflow: str
) -> Counts:
    """Return the histograms of the requests since the last check. If there are at least
    `config.minimum` instances, record them as checked, so that checks of other workflows do not
    count them again."""
    while True:
        state, etag = _read_state(store, config.model)
        histograms = state.before if state.workflow == workflow else state.seen

        if state.version == version:
            earlier_counts = {process: item.model_dump() for process, item in histograms.items()}
        else:
            earlier_counts = {}

        current_counts = scrape(endpoint, version, earlier_counts)
        new_counts = subtract_counts(current_counts, earlier_counts)
        if new_counts["rows"] < config.minimum:
            return new_counts

        changes = {
            "version": version,
            "workflow": workflow,
            "before": earlier_counts,
            "seen": current_counts,
        }
        if _write_state(store, config.model, state, changes, etag):
            return new_counts


def reset_counts(store: Store, model: str, version: str) -> None:
    """Let the next check of a new champion count requests from now on, without the copies of
    requests that its servers received as a shadow.

    If the servers cannot be read, the next check counts from their start.
    """
    champion = tracking.champion(model)
    if not champion or champion.version != version or not champion.deployment:
        return

    try:
        seen = scrape(f"http://{champion.deployment}:{PORT}", version, {})
    except RekindleError as error:
        return say(f"the next check for drift counts all requests of version {version}: {error}")

    changes = {"version": version, "workflow": "", "before": {}, "seen": seen}
    while True:
        state, etag = _read_state(store, model)
        if _write_state(store, model, state, changes, etag):
            return


def compute_shifts(reference: Counts, new_counts: Counts, ignore: list[str]) -> Shifts:
    """Compute the shift of each output and feature of the reference. Missing values form a separate
    group."""
    result: Shifts = {}

    for kind in ("scores", "features"):
        for name, expected_counts in reference[kind].items():
            if name not in ignore:
                actual_counts = new_counts[kind].get(name, [0] * len(expected_counts))
                missing = (
                    max(0, reference["rows"] - sum(expected_counts)),
                    max(0, new_counts["rows"] - sum(actual_counts)),
                )
                result[f"{kind.removesuffix('s')} {name}"] = compute_shift(
                    expected_counts, actual_counts, missing
                )

    return result


def select_drifted(shifts: Shifts, threshold: float) -> Shifts:
    """Return the significant shifts above the threshold, the largest first."""
    drifted_shifts = {name: s for name, s in shifts.items() if s.psi > max(threshold, s.chance)}
    return dict(sorted(drifted_shifts.items(), key=lambda item: -item[1].psi))


def claim_retraining(store: Store, config: DriftConfig, workflow: str) -> float:
    """If the model may be trained again, claim its retraining for `workflow` and return 0; else
    return the number of days to wait."""
    while True:
        now = time.time()
        state, etag = _read_state(store, config.model)
        if state.retrained_by == workflow:
            return 0.0

        last_training_time = max(tracking.find_last_start(config.model), state.retrained)
        remaining_days = config.min_days_between - (now - last_training_time) / DAY_S
        if remaining_days > 0:
            return remaining_days

        claim = {"retrained": now, "retrained_by": workflow}
        if _write_state(store, config.model, state, claim, etag):
            return 0.0


def draw(shifts: Shifts, threshold: float, file: Path) -> None:
    """Plot the PSI of each output and feature, and the histograms with the largest PSI."""
    from matplotlib.figure import Figure

    sorted_names = sorted(shifts, key=lambda name: shifts[name].psi)
    figure = Figure(figsize=(12, 9), layout="constrained")
    overview, *panels = figure.subplot_mosaic("AAA;BCD;EFG").values()
    overview.barh(sorted_names, [shifts[name].psi for name in sorted_names], color="#4477aa")
    overview.axvline(threshold, color="#cc3311", linestyle="--")
    overview.set_xlabel("PSI (dashed: drift.threshold)")

    for panel, name in zip_longest(panels, sorted_names[::-1][: len(panels)]):
        if name is None:
            panel.set_visible(False)
            continue

        quantity_shift = shifts[name]
        positions = range(len(quantity_shift.expected))

        panel.bar(
            [p - 0.2 for p in positions],
            quantity_shift.expected,
            0.4,
            color="#bbbbbb",
            label="test rows",
        )

        panel.bar(
            [p + 0.2 for p in positions],
            quantity_shift.actual,
            0.4,
            color="#4477aa",
            label="served",
        )

        panel.set_title(f"{name}: PSI {quantity_shift.psi:.3f}", fontsize=9)
        panel.set_xticks([])

    panels[0].legend(fontsize=8)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=100)


def _state_key(model: str) -> str:
    return f"releases/{ModelName(model)}/drift.json"


def _read_state(store: Store, model: str) -> tuple[State, str | None]:
    """Return drift.json and its etag; None if it does not exist."""
    key = _state_key(model)
    try:
        data, etag = store.get_with_etag(key)
    except NotFound:
        return State(), None
    return parse(State, data, store.uri(key)), etag


def _write_state(
    store: Store, model: str, state: State, changes: Mapping[str, Any], etag: str | None
) -> bool:
    """Write `state` with `changes`, unless drift.json has changed since `etag`. Return True if it
    was written."""
    data = to_json(state.model_dump() | dict(changes)).encode()
    try:
        store.put(_state_key(model), data, if_match=etag, if_absent=etag is None)
    except (Conflict, NotFound):
        # another check, or a promotion, has changed or removed it
        return False
    return True
