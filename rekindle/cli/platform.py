"""The command group `rekindle platform`: sets up a namespace of a cluster, and checks it."""

from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from argolocal.cli.options import FiniteNumber, make_output_option, parse_parameter_options
from rekindle.cli.group import commands
from rekindle.cli.options import Target, cluster_options, config_options
from rekindle.cli.output import print_checks
from rekindle.cli.sources import Source

if TYPE_CHECKING:
    from rekindle.cluster.kueue.queued_jobs import QueuedJob


@commands.group
def platform() -> None:
    """Set up a namespace of a cluster for pipelines, and check it.

    Example:
      rekindle platform check configs/cluster.yaml -n models
    """


@platform.command
@click.option(
    "-n",
    "--namespace",
    help="Namespace of the pipelines (default: rekindle; --operator: kubeflow).",
)
@click.option(
    "--bucket",
    default="rekindle",
    show_default=True,
    help="Bucket for artifacts, checkpoints and models.",
)
@click.option("--endpoint", default="", metavar="URL", help="S3 endpoint (default: AWS).")
@click.option("--region", default="", metavar="NAME", help="Region of the bucket.")
@click.option(
    "--mlflow",
    default="",
    metavar="URL",
    help="Address of an MLflow server (or use --with mlflow).",
)
@click.option(
    "--with",
    "components",
    multiple=True,
    type=click.Choice(["mlflow", "minio", "frameworks", "signals", "prometheus", "retraining"]),
    help=(
        "Component to add: an MLflow server, a small object store, permission to apply jobs of"
        " other frameworks, an account of coordinators that write the times of checkpoints to pods,"
        " monitors for the Prometheus operator, or permission to start pipelines."
    ),
)
@click.option(
    "--iam", is_flag=True, help="Use a cloud role of the pods instead of a Secret with keys."
)
@click.option(
    "--quota",
    nargs=2,
    metavar="CPU MEMORY",
    help="ResourceQuota of the namespace, such as 64 256Gi.",
)
@click.option(
    "--ephemeral",
    is_flag=True,
    help="Keep the data of MLflow and MinIO only as long as their pods exist.",
)
@click.option(
    "--image",
    "images",
    multiple=True,
    metavar="NAME=IMAGE",
    help="Image to use for rekindle, mlflow or minio.",
)
@click.option(
    "--operator",
    is_flag=True,
    help="Print the patch of the training operator, needed once per cluster.",
)
def render(operator: bool, namespace: str | None, images: tuple[str, ...], **settings: Any) -> None:
    """Print the objects of a namespace, for `kubectl apply`.

    The objects are service accounts with the permissions that a pipeline uses, the addresses of the
    object store and MLflow, network policies, and Pod Security `restricted`. Credentials are not
    included: stderr shows how to create their Secrets. The objects can be applied repeatedly.

    Example:
      rekindle platform render -n models --with mlflow --with minio | kubectl apply -f -
      rekindle platform render -n models --endpoint https://s3.example.com \\
        --mlflow https://mlflow.example.com
      rekindle platform render --operator -n kubeflow | kubectl apply --server-side \\
        --field-manager=rekindle -f -
    """
    from rekindle.cluster import platform as objects
    from rekindle.kubernetes_names import SERVING_SECRET

    if operator:
        _reject_other_flags("operator", "namespace")
        click.echo(
            objects.to_yaml_documents(objects.render_operator_patch(namespace or "kubeflow")),
            nl=False,
        )
        return

    requested_platform = objects.Platform(
        namespace or "rekindle", images=parse_parameter_options(images), **settings
    )
    click.echo(objects.to_yaml_documents(objects.render_platform(requested_platform)), nl=False)

    if not requested_platform.iam:
        command = objects.format_secret_command(requested_platform.namespace)
        click.echo(
            f"Create the Secret with the credentials of the object store:\n  {command}", err=True
        )
        command = objects.format_secret_command(requested_platform.namespace, SERVING_SECRET)
        note = (
            "Create the Secret of the model server with the credentials of a user who can only read"
            " releases/:"
        )
        click.echo(f"{note}\n  {command}", err=True)


def _reject_other_flags(*allowed_names: str) -> None:
    """Raise UsageError if a flag was given that the command would ignore."""
    click_context = click.get_current_context()
    for parameter in click_context.command.params:
        is_given = (
            click_context.get_parameter_source(parameter.name or "") is ParameterSource.COMMANDLINE
        )
        if is_given and parameter.name not in allowed_names:
            raise click.UsageError(
                f"--{allowed_names[0]} cannot be combined with {parameter.opts[-1]}."
            )


@platform.command
@config_options
@cluster_options
@click.option(
    "--wait",
    type=FiniteNumber(1),
    metavar="SECONDS",
    help="Time to wait for the images of a pod (default: 180).",
)
@make_output_option("text", "json")
def check(source: Source, target: Target, wait: float | None, as_json: bool) -> int:
    """Check that a namespace has everything that a pipeline needs.

    The checks range from the API server to S3 access from a pod; the objects that they create are
    deleted. Each failure comes with a remedy. CONFIG names the images and priorities to check.

    Example:
      rekindle platform check configs/cluster.yaml -n models
    """
    return check_namespace(source, target, as_json, wait)


def check_namespace(
    source: Source, target: Target, as_json: bool, timeout_seconds: float | None = None
) -> int:
    """Run the checks of `platform check` and `doctor --cluster`, and return the exit code."""
    from rekindle.blocks.manifest.render import render_manifest
    from rekindle.blocks.settings import ClusterConfig
    from rekindle.cluster.kueue.queued_jobs import list_queued_jobs, read_templates
    from rekindle.doctor import cluster_checks as doctor
    from rekindle.training.spec import TrainConfig

    loaded_config = source.load().config if source.config else None
    cluster_config = loaded_config.cluster if loaded_config else ClusterConfig.model_validate({})
    train_config = loaded_config.train if loaded_config else TrainConfig.model_validate({})
    cluster = target.connect(cluster_config.namespace)
    needs_token = bool(loaded_config and loaded_config.serve and loaded_config.serve.token)
    secret_names = loaded_config.program.secrets if loaded_config and loaded_config.program else ()
    probe_timeout_seconds = timeout_seconds or doctor.PROBE_TIMEOUT_S

    queued_jobs: list[QueuedJob] = []
    if loaded_config and cluster_config.gang == "kueue":
        queued_jobs = list_queued_jobs(read_templates(render_manifest(loaded_config)))

    return print_checks(
        doctor.check_cluster(
            cluster,
            cluster_config,
            train_config,
            probe_timeout_seconds,
            needs_token,
            secret_names,
            queued_jobs,
        ),
        as_json,
    )
