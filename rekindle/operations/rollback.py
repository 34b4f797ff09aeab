"""Roll a model back to an earlier version, on this machine or on a cluster (`rekindle
rollback`)."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from argolocal.common.checked_names import format_untrusted
from argolocal.common.json_text import loads
from rekindle import tracking
from rekindle.cluster.cluster_objects import ClusterObjects
from rekindle.cluster.kubernetes_api import Cluster
from rekindle.errors import ConfigError, RekindleError, write_stderr
from rekindle.kubernetes_names import CONFIG_MAP, NOTIFY_SECRET, STORE_SECRET
from rekindle.local.cluster import LocalCluster
from rekindle.local.local_objects import LocalObjects
from rekindle.release.rollback import RollbackResult, roll_back
from rekindle.release.watch.notification import NotificationMessage, NotifyConfig, send_notification
from rekindle.sections import parse_section
from rekindle.storage import Store


def roll_back_model(
    home_folder: Path,
    cluster: Cluster | None,
    model_name: str,
    version: str,
    timeout_seconds: float,
    report_result: Callable[[RollbackResult], None],
) -> None:
    """Roll a model back to `version` (empty: the version before the champion), or finish an
    interrupted rollback.

    After the rollback, call `report_result`, and send a notification according to the config of the
    run that made the new champion.
    """

    def finish(rollback_result: RollbackResult) -> None:
        report_result(rollback_result)
        try:
            _notify_rollback(model_name, rollback_result)
        except RekindleError as error:
            write_stderr(f"notification not sent: {error}")

    kubernetes_objects = _open_objects(home_folder, cluster)
    roll_back(
        kubernetes_objects,
        Store.from_env().short_retries(),
        model_name,
        version,
        timeout_seconds,
        finish,
    )


def _notify_rollback(model_name: str, rollback_result: dict[str, str]) -> None:
    champion = tracking.champion(model_name)
    if not champion:
        return

    recorded_params = tracking.read_params(champion.run_id)
    workflow_name = tracking.read_tags(champion.run_id).get(tracking.WORKFLOW, "")

    notify_section: dict[str, Any] = {
        param_name.removeprefix("notify."): param_text
        for param_name, param_text in recorded_params.items()
        if param_name.startswith("notify.")
    }
    if notify_section:
        notify_section["events"] = _parse_events(notify_section.get("events", ""))

    notify_config = parse_section(NotifyConfig, notify_section, "notify")

    if rollback_result["before"]:
        previous_text = f" (before: version {rollback_result['before']})"
    else:
        previous_text = ""

    message_text = (
        f"version {rollback_result['version']} is serving again{previous_text}, by `rekindle"
        " rollback`."
    )
    send_notification(
        NotificationMessage(
            "rollback",
            model_name,
            message_text,
            link=tracking.find_page_address(workflow_name, notify_config.mlflow_url),
        ),
        notify_config,
    )


def _parse_events(events_text: str) -> list[Any]:
    """Parse the list in the MLflow parameter notify.events. Raises ConfigError."""
    try:
        return [*loads(events_text)]
    except (ValueError, TypeError):
        raise ConfigError(
            f"notify.events of the run is {format_untrusted(events_text)}: it must be a list."
        ) from None


def _open_objects(home_folder: Path, cluster: Cluster | None) -> ClusterObjects | LocalObjects:
    """Return access to the Kubernetes objects of this machine or a cluster. For this machine, set
    the environment variables of the services for this process."""
    if cluster:
        return ClusterObjects(cluster)

    local_cluster = LocalCluster(home_folder)
    os.environ.update(
        local_cluster.configmap(CONFIG_MAP)
        | local_cluster.secret(STORE_SECRET)
        | local_cluster.secret(NOTIFY_SECRET)
    )
    return LocalObjects(local_cluster)
