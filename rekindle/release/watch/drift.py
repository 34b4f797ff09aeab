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
from rekindle.content.verified_release import REFERENCE, read_described_file, require_release_key
from rekindle.documents import Document, parse
from rekindle.errors import DataError, RekindleError, write_stderr
from rekindle.names import ModelName
from rekindle.release.serve_config import DEFAULT_PORT, DriftConfig
from rekindle.release.watch.psi import Shift, compute_shift
from rekindle.release.watch.scores import BUCKET_BOUNDS
from rekindle.release.watch.scrape import Counts, scrape_counts, subtract_counts
from rekindle.storage import Conflict, NotFound, Store

DAY_S = 86400
BucketCount = Annotated[int, Field(ge=0)]
BucketCounts = Annotated[
    list[BucketCount], Field(min_length=len(BUCKET_BOUNDS), max_length=len(BUCKET_BOUNDS))
]
# name of an output or feature (`score OUTPUT` or `feature NAME`) → its shift
Shifts = dict[str, Shift]


class Histograms(Document):
    """Histograms of the numbers in requests and predictions."""

    rows: BucketCount
    scores: dict[str, BucketCounts] = Field(default_factory=dict)
    features: dict[str, BucketCounts] = Field(default_factory=dict)


class Reference(Histograms):
    """reference.json: the histograms of the test rows of a release."""

    rows: int = Field(ge=1)


class DriftState(Document):
    """drift.json of a model: the last retraining, and the histograms of each server process at the
    last check (`seen`) and at the check before the last (`before`)."""

    version: str = ""
    workflow: str = ""
    before: dict[str, Histograms] = Field(default_factory=dict)
    seen: dict[str, Histograms] = Field(default_factory=dict)
    retrained: float = 0.0  # Unix time
    retrained_by: str = ""


def compute_request_shifts(
    object_store: Store, drift_config: DriftConfig, workflow_name: str
) -> tuple[int, Shifts]:
    """Return the number of instances since the last check or promotion, and the shifts of their
    outputs and features.

    With fewer than `drift_config.minimum` instances, the shifts are empty. Repeated calls by one
    workflow, such as retries, count the requests since the check before the workflow's first call.
    Raises DataError, RekindleError.
    """
    champion = tracking.champion(drift_config.model)
    if not champion or not champion.deployment:
        raise DataError(
            f'the model "{drift_config.model}" does not have a champion: correct drift.model, or'
            " release it."
        )

    release_key = champion.uri.rstrip("/")
    require_release_key(release_key, object_store.uri(release_key))

    try:
        reference_bytes = read_described_file(object_store, release_key, REFERENCE)
        reference_counts = parse(
            Reference, reference_bytes, object_store.uri(f"{release_key}/{REFERENCE}")
        ).model_dump()
    except NotFound as error:
        raise DataError(
            f"version {champion.version} of {drift_config.model} lacks {REFERENCE}: release it"
            " again."
        ) from error

    endpoint = f"http://{champion.deployment}:{DEFAULT_PORT}"
    new_counts = _count_new_requests(
        object_store, drift_config, endpoint, champion.version, workflow_name
    )
    if new_counts["rows"] < drift_config.minimum:
        return new_counts["rows"], {}
    return new_counts["rows"], compute_shifts(reference_counts, new_counts, drift_config.ignore)


def _count_new_requests(
    object_store: Store, drift_config: DriftConfig, endpoint: str, version: str, workflow_name: str
) -> Counts:
    """Return the histograms of the requests since the last check. If the requests contain at least
    `drift_config.minimum` instances, record these instances as checked, so that checks of other
    workflows do not count them again."""
    while True:
        drift_state, etag = _read_state(object_store, drift_config.model)
        earlier_histograms = (
            drift_state.before if drift_state.workflow == workflow_name else drift_state.seen
        )

        if drift_state.version == version:
            earlier_counts = {
                process_name: histogram.model_dump()
                for process_name, histogram in earlier_histograms.items()
            }
        else:
            earlier_counts = {}

        current_counts = scrape_counts(endpoint, version, earlier_counts)
        new_counts = subtract_counts(current_counts, earlier_counts)
        if new_counts["rows"] < drift_config.minimum:
            return new_counts

        state_changes = {
            "version": version,
            "workflow": workflow_name,
            "before": earlier_counts,
            "seen": current_counts,
        }
        if _write_state(object_store, drift_config.model, drift_state, state_changes, etag):
            return new_counts


def reset_counts(object_store: Store, model_name: str, version: str) -> None:
    """Record the current counts of a new champion's servers, so that the next check counts only
    later requests, not the copies of requests that the servers received as a shadow.

    If the servers cannot be read, the next check counts all requests since their start.
    """
    champion = tracking.champion(model_name)
    if not champion or champion.version != version or not champion.deployment:
        return

    try:
        seen_counts = scrape_counts(f"http://{champion.deployment}:{DEFAULT_PORT}", version, {})
    except RekindleError as error:
        return write_stderr(
            f"the next check for drift counts all requests of version {version}: {error}"
        )

    state_changes = {"version": version, "workflow": "", "before": {}, "seen": seen_counts}
    while True:
        drift_state, etag = _read_state(object_store, model_name)
        if _write_state(object_store, model_name, drift_state, state_changes, etag):
            return


def compute_shifts(
    reference_counts: Counts, new_counts: Counts, ignored_names: list[str]
) -> Shifts:
    """Compute the shift (PSI) of each output and feature of the reference. Missing values form a
    separate group."""
    shifts_by_name: Shifts = {}

    for quantity_kind in ("scores", "features"):
        for quantity_name, expected_counts in reference_counts[quantity_kind].items():
            if quantity_name not in ignored_names:
                actual_counts = new_counts[quantity_kind].get(
                    quantity_name, [0] * len(expected_counts)
                )
                missing_counts = (
                    max(0, reference_counts["rows"] - sum(expected_counts)),
                    max(0, new_counts["rows"] - sum(actual_counts)),
                )
                shifts_by_name[f"{quantity_kind.removesuffix('s')} {quantity_name}"] = (
                    compute_shift(expected_counts, actual_counts, missing_counts)
                )

    return shifts_by_name


def select_drifted_shifts(shifts: Shifts, threshold: float) -> Shifts:
    """Return the significant shifts above the threshold, the largest first."""
    drifted_shifts = {
        quantity_name: quantity_shift
        for quantity_name, quantity_shift in shifts.items()
        if quantity_shift.psi > max(threshold, quantity_shift.chance)
    }
    return dict(sorted(drifted_shifts.items(), key=lambda item: -item[1].psi))


def claim_retraining(object_store: Store, drift_config: DriftConfig, workflow_name: str) -> float:
    """If the model may be trained again, claim its retraining for `workflow_name` and return 0;
    else return the number of days to wait."""
    while True:
        now_seconds = time.time()
        drift_state, etag = _read_state(object_store, drift_config.model)
        if drift_state.retrained_by == workflow_name:
            return 0.0

        last_training_seconds = max(
            tracking.find_last_start(drift_config.model), drift_state.retrained
        )
        remaining_days = (
            drift_config.min_days_between - (now_seconds - last_training_seconds) / DAY_S
        )
        if remaining_days > 0:
            return remaining_days

        claim_changes = {"retrained": now_seconds, "retrained_by": workflow_name}
        if _write_state(object_store, drift_config.model, drift_state, claim_changes, etag):
            return 0.0


def draw_shifts(shifts: Shifts, threshold: float, image_file: Path) -> None:
    """Plot the PSI of each output and feature, and the histograms with the largest PSI."""
    from matplotlib.figure import Figure

    sorted_names = sorted(shifts, key=lambda name: shifts[name].psi)
    figure = Figure(figsize=(12, 9), layout="constrained")
    overview_axes, *panel_axes = figure.subplot_mosaic("AAA;BCD;EFG").values()
    overview_axes.barh(sorted_names, [shifts[name].psi for name in sorted_names], color="#4477aa")
    overview_axes.axvline(threshold, color="#cc3311", linestyle="--")
    overview_axes.set_xlabel("PSI (dashed: drift.threshold)")

    for panel_axis, name in zip_longest(panel_axes, sorted_names[::-1][: len(panel_axes)]):
        if name is None:
            panel_axis.set_visible(False)
            continue

        quantity_shift = shifts[name]
        bar_positions = range(len(quantity_shift.expected))

        panel_axis.bar(
            [bar_position - 0.2 for bar_position in bar_positions],
            quantity_shift.expected,
            0.4,
            color="#bbbbbb",
            label="test rows",
        )

        panel_axis.bar(
            [bar_position + 0.2 for bar_position in bar_positions],
            quantity_shift.actual,
            0.4,
            color="#4477aa",
            label="served",
        )

        panel_axis.set_title(f"{name}: PSI {quantity_shift.psi:.3f}", fontsize=9)
        panel_axis.set_xticks([])

    panel_axes[0].legend(fontsize=8)
    image_file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(image_file, dpi=100)


def _make_state_key(model_name: str) -> str:
    return f"releases/{ModelName(model_name)}/drift.json"


def _read_state(object_store: Store, model_name: str) -> tuple[DriftState, str | None]:
    """Return the content of drift.json and its etag; None if drift.json does not exist."""
    state_key = _make_state_key(model_name)
    try:
        state_bytes, etag = object_store.get_with_etag(state_key)
    except NotFound:
        return DriftState(), None
    return parse(DriftState, state_bytes, object_store.uri(state_key)), etag


def _write_state(
    object_store: Store,
    model_name: str,
    drift_state: DriftState,
    state_changes: Mapping[str, Any],
    etag: str | None,
) -> bool:
    """Write `drift_state` with `state_changes`, unless drift.json has changed since `etag`. Return
    True if drift.json was written."""
    state_bytes = to_json(drift_state.model_dump() | dict(state_changes)).encode()
    try:
        object_store.put(
            _make_state_key(model_name), state_bytes, if_match=etag, if_absent=etag is None
        )
    except (Conflict, NotFound):
        # another check, or a promotion, has changed or removed drift.json
        return False
    return True
