"""Applies retention at the end of a run on a cluster, in the pod of the step `report`.

The pod has no access to Workflows and Deployments. So it keeps a failed run while its Workflow may
be resumed. It removes releases only after a promotion, because a promotion deletes the Deployments
of older releases.
"""

import time
from collections.abc import Mapping
from typing import Any

from rekindle import tracking
from rekindle.cache.entries import DAY_S
from rekindle.names import RunName
from rekindle.release import promotion
from rekindle.release.retention import listing, removal
from rekindle.release.retention.decision import NO_LIMITS, Run, choose_removals
from rekindle.release.serve_config import RetentionConfig
from rekindle.storage import Store


def compute_resumable_s(cluster: Mapping[str, Any]) -> float:
    """Return for how many seconds after its end a run may be resumed and still be running, from the
    section `cluster` of its config."""
    return float(cluster["keep_days"] * DAY_S + cluster["deadline_hours"] * 3600)


def apply(store: Store, workflow: str, config: Mapping[str, Any], promoted: str) -> list[str]:
    """Apply the limits of a run's config to the runs of its pipeline; return the names of the
    removed runs.

    `promoted`: name of the model if the run has succeeded and promoted a release, else "". Raises
    StorageError, TrackingError.
    """
    limits = RetentionConfig.model_validate(config["retention"])
    if limits == NO_LIMITS:
        return []

    pipeline = config["name"]
    seconds = compute_resumable_s(config["cluster"])

    def targets(model: str) -> set[str]:
        if model == promoted:
            return promotion.list_retained_versions(model)
        return {release.version for release in tracking.promoted_releases(model)}

    now = time.time()
    current = Run(RunName(workflow, "the input workflow"), pipeline, ended=now)
    context = listing.Context({workflow: current}, seconds, seconds, targets if promoted else None)
    found = listing.read(store, [pipeline], context)
    plan = choose_removals(
        found, {pipeline: limits}, now, listing.make_inputs_function(store, found.releases)
    )

    return removal.remove(store, removal.limit_removal(plan), removal.NoHost(), context)
