"""Roll a model back to an earlier version, on this machine or on a cluster: `rekindle rollback`."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from argolocal.common.checked_names import show
from argolocal.common.json_text import loads
from rekindle import tracking
from rekindle.cluster.cluster_objects import ClusterObjects
from rekindle.cluster.kubernetes_api import Cluster
from rekindle.errors import ConfigError, RekindleError, say
from rekindle.kubernetes_names import CONFIG_MAP, NOTIFY_SECRET, STORE_SECRET
from rekindle.local.cluster import LocalCluster
from rekindle.local.local_objects import LocalObjects
from rekindle.release.rollback import Result, roll_back
from rekindle.release.watch.notification import Message, NotifyConfig, send
from rekindle.sections import parse_section
from rekindle.storage import Store


def rollback(
    home: Path,
    cluster: Cluster | None,
    model: str,
    version: str,
    seconds: float,
    report: Callable[[Result], None],
) -> None:
    """Roll a model back to `version` (empty: the version before the champion), or finish an
    interrupted rollback.

    Then call `report`, and send a notification as configured in the run of the new champion.
    """

    def finish(result: Result) -> None:
        report(result)
        try:
            _notify(model, result)
        except RekindleError as error:
            say(f"notification not sent: {error}")

    objects = _open_objects(home, cluster)
    roll_back(objects, Store.from_env().short_retries(), model, version, seconds, finish)


def _notify(model: str, result: dict[str, str]) -> None:
    champion = tracking.champion(model)
    if not champion:
        return

    settings = tracking.read_params(champion.run_id)
    workflow = tracking.read_tags(champion.run_id).get(tracking.WORKFLOW, "")

    section: dict[str, Any] = {
        name.removeprefix("notify."): value
        for name, value in settings.items()
        if name.startswith("notify.")
    }
    if section:
        section["events"] = _parse_events(section.get("events", ""))

    config = parse_section(NotifyConfig, section, "notify")

    if result["before"]:
        previous = f" (before: version {result['before']})"
    else:
        previous = ""

    text = f"version {result['version']} is serving again{previous}, by `rekindle rollback`."
    send(
        Message(
            "rollback", model, text, link=tracking.find_page_address(workflow, config.mlflow_url)
        ),
        config,
    )


def _parse_events(text: str) -> list[Any]:
    """Parse the list in the MLflow parameter notify.events. Raises ConfigError."""
    try:
        return [*loads(text)]
    except (ValueError, TypeError):
        raise ConfigError(f"notify.events of the run is {show(text)}: it must be a list.") from None


def _open_objects(home: Path, cluster: Cluster | None) -> ClusterObjects | LocalObjects:
    if cluster:
        return ClusterObjects(cluster)

    local = LocalCluster(home)
    os.environ.update(
        local.configmap(CONFIG_MAP) | local.secret(STORE_SECRET) | local.secret(NOTIFY_SECRET)
    )
    return LocalObjects(local)
