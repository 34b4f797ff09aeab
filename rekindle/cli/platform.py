"""The commands that prepare a namespace of a cluster, and examine it."""

from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from rekindle.cli.shared import (
    CONTEXT,
    Commands,
    cluster_options,
    commands,
    config_of,
    configured,
    output_option,
    told,
)


@commands.group(cls=Commands, context_settings=CONTEXT)
def platform() -> None:
    """What a namespace of a cluster needs once, before pipelines run in it.

    \b
    Example:
      rekindle platform check configs/cluster.yaml -n models
    """


@platform.command(context_settings=CONTEXT)
@click.option("-n", "--namespace", help="Namespace of the pipelines (default: rekindle; --operator: kubeflow).")
@click.option("--bucket", default="rekindle", show_default=True, help="Bucket for artifacts, checkpoints and models.")
@click.option("--endpoint", default="", metavar="URL", help="S3 endpoint (default: AWS).")
@click.option("--region", default="", metavar="NAME", help="Region of the bucket.")
@click.option("--mlflow", default="", metavar="URL", help="MLflow's address (or --with mlflow).")
@click.option(
    "--with",
    "options",
    multiple=True,
    type=click.Choice(["mlflow", "minio", "frameworks"]),
    help="Also: an MLflow server, a small object store, the right to apply jobs of other frameworks.",
)
@click.option("--iam", is_flag=True, help="Pods have a cloud role: no Secret with keys.")
@click.option("--quota", nargs=2, metavar="CPU MEMORY", help="What the namespace may request, such as 64 256Gi.")
@click.option("--ephemeral", is_flag=True, help="MLflow and MinIO keep nothing when their pods go: to try things.")
@click.option(
    "--image", "images", multiple=True, metavar="NAME=IMAGE", help="Image of rekindle, mlflow or minio, to pin it."
)
@click.option("--operator", is_flag=True, help="Instead: the training operator's part, once a cluster.")
def render(operator: bool, namespace: str | None, images: tuple[str, ...], **given: Any) -> None:
    """Print the objects of a namespace, for `kubectl apply`.

    Accounts with the rights that a pipeline uses, addresses of the object store and MLflow, who may connect to whom,
    and PodSecurity `restricted`. No credential is among them: how to make their Secret is said on stderr. Everything
    can be applied again.

    \b
    Example:
      rekindle platform render -n models --with mlflow --with minio | kubectl apply -f -
      rekindle platform render -n models --endpoint https://s3.example.com --mlflow https://mlflow.example.com
      rekindle platform render --operator -n kubeflow | kubectl apply --server-side --field-manager=rekindle -f -
    """
    from rekindle.cli.shared import pairs_of
    from rekindle.cluster import platform as objects

    if operator:
        _alone("operator", "namespace")
        click.echo(objects.text(objects.operator(namespace or "kubeflow")), nl=False)
        return
    asked = objects.Platform(namespace or "rekindle", images=pairs_of(images), **given)
    click.echo(objects.text(objects.render(asked)), nl=False)
    if not asked.iam:
        how = objects.secret(asked.namespace)
        click.echo(f"The credentials of the object store are yours to give:\n  {how}", err=True)


def _alone(*names: str) -> None:
    """Refuses what would be ignored."""
    context = click.get_current_context()
    for each in context.command.params:
        given = context.get_parameter_source(each.name or "") is ParameterSource.COMMANDLINE
        if given and each.name not in names:
            raise click.UsageError(f"--{names[0]} is by itself: {each.opts[-1]} means nothing with it, leave it out.")


@platform.command(context_settings=CONTEXT)
@configured
@cluster_options
@click.option("--wait", type=click.FloatRange(min=1), metavar="SECONDS", help="For a pod's images (default: 180).")
@output_option("text", "json")
def check(
    config: Path | None, sets: tuple[str, ...], namespace: str, context: str, wait: float | None, output: str
) -> int:
    """Examine a namespace of a cluster: all that a pipeline needs there, from the API server to a pod's view of S3.

    Nothing is left behind. Each failure comes with its remedy. A config says which images and priorities are meant.

    \b
    Example:
      rekindle platform check configs/cluster.yaml -n models
    """
    return examine(config, sets, namespace, context, output, wait)


def examine(
    config: Path | None, sets: tuple[str, ...], namespace: str, context: str, output: str, wait: float | None = None
) -> int:
    """Of `platform check` and `doctor --cluster`."""
    from rekindle.blocks.settings import ClusterConfig
    from rekindle.cluster import doctor
    from rekindle.cluster.api import Cluster
    from rekindle.training.spec import TrainConfig

    settings = config_of(config, sets).config if config else None
    place = settings.cluster if settings else ClusterConfig.model_validate({})
    train = settings.train if settings else TrainConfig.model_validate({})
    cluster = Cluster.connect(context or None, namespace or place.namespace or None)
    return told(doctor.check(cluster, place, train, wait or doctor.SECONDS), output)
