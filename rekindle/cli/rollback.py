"""The command that goes back to an earlier release."""

import os
from typing import TYPE_CHECKING, Any

import click

from rekindle.cli.group import HOME, command
from rekindle.cli.options import Name, cluster_flag, output_option
from rekindle.cli.output import print_result
from rekindle.errors import RekindleError

if TYPE_CHECKING:
    from rekindle.cluster.api import Cluster


@command
@click.argument("name", type=Name())
@click.argument("version", default="")
@click.option("--seconds", type=float, default=120.0, show_default=True, help="Wait so long for its servers.")
@cluster_flag
@output_option("text", "json")
def rollback(name: str, version: str, seconds: float, cluster: "Cluster | None", as_json: bool) -> None:
    """Let an earlier release of model NAME answer again.

    VERSION is that of the registered model (default: the one before the present). Its Deployment is still there, with
    its weights, image, flags and resources: it gets its pods back, then the traffic, and becomes the champion. On a
    cluster, MLFLOW_TRACKING_URI, S3_BUCKET and S3_ENDPOINT_URL say where the champion is recorded.

    Example:
      rekindle rollback demo
      rekindle rollback demo 3 --cluster
    """
    from rekindle.serving.rollback import roll_back

    def promote(target: str, deployment: str) -> None:
        from rekindle import tracking
        from rekindle.serving import promotion
        from rekindle.storage import Store

        try:
            champion = tracking.champion(name)
            promotion.promote(Store.from_env(), name, target, champion.version if champion else "", deployment)
        except RekindleError as error:
            raise RekindleError(
                f"version {target} of {name} answers now, but it is not recorded as the champion, and what served "
                f"before keeps its pods: {error} Then run this command again."
            ) from error

    if cluster:
        from rekindle.cluster.objects import ClusterObjects

        objects: Any = ClusterObjects(cluster)
    else:
        from rekindle.local.controllers.kubectl import LocalObjects
        from rekindle.local.emulator import LocalCluster

        local = LocalCluster(HOME)
        os.environ.update(local.configmap("rekindle") | local.secret("rekindle-s3"))
        objects = LocalObjects(local)
    result = roll_back(objects, name, version, promote, seconds)
    before = f" (before: version {result['before']})" if result["before"] else ""
    print_result(as_json, result, f"version {result['version']} of {name} answers{before}")
