"""What commands change of what runs, here or on a cluster: an earlier release serves again, other workers train."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from argolocal.view import runs
from rekindle import tracking
from rekindle.cluster.api import Cluster
from rekindle.cluster.objects import ClusterObjects
from rekindle.cluster.scale import scale_workers
from rekindle.errors import ConfigError, RekindleError, say
from rekindle.local.cluster import LocalCluster
from rekindle.local.objects import LocalObjects
from rekindle.notify import SECRET, Message, NotifyConfig, send
from rekindle.release.rollback import Result, roll_back
from rekindle.sections import parse_section
from rekindle.storage import Store


def rollback(
    home: Path, cluster: Cluster | None, model: str, version: str, seconds: float, report: Callable[[Result], None]
) -> None:
    """Let `version` of the model answer again (empty: the one before the champion), or finish what was interrupted.

    Calls `report`, then tells people, if the config that it was trained with says so.
    """

    def ended(result: Result) -> None:
        report(result)
        try:
            _tell(model, result)
        except RekindleError as error:
            say(f"notification not sent: {error}")

    objects = _objects(home, cluster)
    roll_back(objects, Store.from_env().short_retries(), model, version, seconds, ended)


def scale(home: Path, cluster: Cluster | None, run: str, task: str, workers: int) -> dict[str, Any]:
    """Have `workers` train in the training `task` of a run. Raises ConfigError if it cannot have them."""
    if cluster:
        return scale_workers(ClusterObjects(cluster), run, task, workers)
    if (phase := runs.state(home, run)["phase"]) != "Running":
        raise ConfigError(f"run {run} is {phase}, and only one that trains can be scaled: `rekindle resume {run}`.")
    return scale_workers(LocalObjects(LocalCluster(home)), run, task, workers)


def _tell(model: str, result: dict[str, str]) -> None:
    if not (champion := tracking.champion(model)):
        return
    settings = tracking.params_of(champion.run_id)
    workflow = tracking.tags_of(champion.run_id).get(tracking.WORKFLOW, "")
    notify = {name.removeprefix("notify."): value for name, value in settings.items() if name.startswith("notify.")}
    notify |= {"events": json.loads(notify["events"])} if notify else {}
    config = parse_section(NotifyConfig, notify, "notify")
    before = f" (before: version {result['before']})" if result["before"] else ""
    text = f"version {result['version']} answers again{before}, by `rekindle rollback`."
    send(Message("rollback", model, text, link=tracking.page(workflow, config.mlflow_url)), config)


def _objects(home: Path, cluster: Cluster | None) -> Any:
    if cluster:
        return ClusterObjects(cluster)
    local = LocalCluster(home)
    os.environ.update(local.configmap("rekindle") | local.secret("rekindle-s3") | local.secret(SECRET))
    return LocalObjects(local)
