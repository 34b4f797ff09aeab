"""Applies retention at the end of a run on a cluster, in the pod of the step `report`.

The pod of the step `report` has no access to Workflows and Deployments. Without this access,
retention keeps a failed run as long as its Workflow may be resumed. Releases are removed only after
a promotion, because a promotion deletes the Deployments of older releases.
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


def compute_resumable_seconds(cluster_section: Mapping[str, Any]) -> float:
    """Return the number of seconds after the end of a run during which the run may be resumed, or
    the resumed run may be active. `cluster_section`: section `cluster` of the run's config."""
    workflow_hours = cluster_section["deadline_hours"]
    if cluster_section.get("queue"):
        # a config that an older version of Rekindle has recorded lacks the setting queue_hours
        workflow_hours += cluster_section.get("queue_hours", 0)
    return float(cluster_section["keep_days"] * DAY_S + workflow_hours * 3600)


def apply(
    object_store: Store, workflow_name: str, run_config: Mapping[str, Any], promoted_model: str
) -> list[str]:
    """Apply the limits of a run's config to the runs of its pipeline; return the names of the
    removed runs.

    `promoted_model`: name of the model if the run has succeeded and promoted a release, else "".
    Raises StorageError, TrackingError.
    """
    retention_limits = RetentionConfig.model_validate(run_config["retention"])
    if retention_limits == NO_LIMITS:
        return []

    pipeline_name = run_config["name"]
    resumable_seconds = compute_resumable_seconds(run_config["cluster"])

    def list_restorable_versions(model_name: str) -> set[str]:
        if model_name == promoted_model:
            return promotion.list_retained_versions(model_name)
        return {release.version for release in tracking.promoted_releases(model_name)}

    now_seconds = time.time()
    current_run = Run(
        RunName(workflow_name, "the input workflow"), pipeline_name, ended=now_seconds
    )
    listing_context = listing.ListingContext(
        {workflow_name: current_run},
        resumable_seconds,
        resumable_seconds,
        list_restorable_versions if promoted_model else None,
    )
    current_listing = listing.read_listing(object_store, [pipeline_name], listing_context)
    planned_removal = choose_removals(
        current_listing,
        {pipeline_name: retention_limits},
        now_seconds,
        listing.make_inputs_function(object_store, current_listing.releases),
    )

    return removal.apply_removal(
        object_store, removal.limit_removal(planned_removal), removal.NoHost(), listing_context
    )
