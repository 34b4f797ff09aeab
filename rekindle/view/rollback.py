"""Going back to an earlier release, here or on a cluster; see rekindle/serving/rollback.py."""

import os
from pathlib import Path
from typing import Any

from rekindle import tracking
from rekindle.cluster.api import Cluster
from rekindle.cluster.objects import ClusterObjects
from rekindle.errors import RekindleError
from rekindle.serving import promotion
from rekindle.serving.rollback import roll_back
from rekindle.storage import Store


def rollback(home: Path, cluster: Cluster | None, model: str, version: str, seconds: float) -> dict[str, str]:
    """Let `version` of the model answer again (empty: the one before the present), and record it as the champion."""
    return roll_back(_objects(home, cluster), model, version, lambda *target: _promote(model, *target), seconds)


def _objects(home: Path, cluster: Cluster | None) -> Any:
    if cluster:
        return ClusterObjects(cluster)
    from rekindle.local.controllers.kubectl import LocalObjects
    from rekindle.local.emulator import LocalCluster

    local = LocalCluster(home)
    os.environ.update(local.configmap("rekindle") | local.secret("rekindle-s3"))
    return LocalObjects(local)


def _promote(model: str, version: str, deployment: str) -> None:
    try:
        champion = tracking.champion(model)
        promotion.promote(Store.from_env(), model, version, champion.version if champion else "", deployment)
    except RekindleError as error:
        raise RekindleError(
            f"version {version} of {model} answers now, but it is not recorded as the champion, and what served before "
            f"keeps its pods: {error} Then run this command again."
        ) from error
