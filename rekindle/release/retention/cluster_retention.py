"""Applies retention at the end of a run on a cluster, in the pod of the step `report`.

The pod has no access to Workflows and Deployments. Therefore the pod keeps a failed run as long as
the Workflow of the run may be resumed, and removes releases only after a promotion, because the
promotion has deleted the Deployments of older releases.
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
    """Return the number of seconds after the end of a run during which it may be resumed and run,
    from the section `cluster` of its config."""
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
