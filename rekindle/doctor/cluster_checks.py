"""Check that pipelines can run in a namespace of a cluster. Each failed check has a remedy.

    for check in check_cluster(Cluster.connect(namespace="models"), config.cluster, config.train):
        print(check)

Pods and a job are created as a dry run, the operator's webhook gets a job that it must refuse, and
a temporary pod tests the object store and MLflow. If the user lacks the permission to read an
object, the result is only a warning.
"""

import re
from collections.abc import Iterator, Sequence

from rekindle.blocks.settings import ClusterConfig
from rekindle.cluster import platform
from rekindle.cluster.errors import ApiError
from rekindle.cluster.kubernetes_api import Cluster
from rekindle.cluster.kueue.queued_jobs import QueuedJob
from rekindle.cluster.platform import KEY_NAMES
from rekindle.doctor.admission_checks import check_admission
from rekindle.doctor.namespace_checks import (
    CLOUD_ROLE_NOTE,
    RENDER_COMMAND,
    check_account,
    check_artifact_repository,
    check_keys,
    check_namespace,
    check_serving_account,
    check_serving_credentials,
    check_user_rights,
)
from rekindle.doctor.namespace_objects import CONFIG_MAPS, SECRETS
from rekindle.doctor.operator_checks import (
    check_controllers,
    check_gang,
    check_init_container,
    check_job,
    check_kinds,
    check_webhook,
)
from rekindle.doctor.pod_checks import PROBE_TIMEOUT_S, run_pod_checks
from rekindle.doctor.queue_checks import check_waiting_jobs
from rekindle.errors import Check, RekindleError
from rekindle.kubernetes_names import (
    CONFIG_MAP,
    MLFLOW_TRACKING_URI,
    PROGRAM_SECRET,
    REKINDLE_TOKEN,
    S3_BUCKET,
    STORE_SECRET,
    TOKEN_SECRET,
)
from rekindle.training.spec import TrainConfig

# the oldest supported version of Kubernetes, as in docs/cluster.md
MIN_KUBERNETES = (1, 30)
# keys of the ConfigMap that locate the object store and MLflow
ADDRESS_KEYS = (S3_BUCKET, MLFLOW_TRACKING_URI)


def check_cluster(
    cluster: Cluster,
    cluster_config: ClusterConfig,
    train_config: TrainConfig,
    probe_timeout_seconds: float = PROBE_TIMEOUT_S,
    needs_token: bool = False,
    secret_names: Sequence[str] = (),
    queued_jobs: Sequence[QueuedJob] = (),
) -> list[Check]:
    """Run all checks of a cluster in order. An error in a check becomes the result of the check, so
    that the other checks still run.

    `probe_timeout_seconds`: time limit of the temporary pod, including the time to pull its image.
    `needs_token`: value of the setting `serve.token`. `secret_names`: value of the setting
    `program.secrets`. `queued_jobs`: the jobs and pods of the config that wait in a queue of Kueue.
    """
    finished_checks = [_check_api_server(cluster)]
    if not finished_checks[0].ok:
        return finished_checks

    checks_by_name = {
        **_list_namespace_checks(cluster, cluster_config, queued_jobs),
        **_list_secret_checks(cluster, needs_token, secret_names),
        **_list_job_checks(cluster, cluster_config, train_config),
        "probe": run_pod_checks(cluster, cluster_config, probe_timeout_seconds),
    }
    for name, check_iterator in checks_by_name.items():
        try:
            for finished_check in check_iterator:
                finished_checks.append(finished_check)
        except RekindleError as error:
            # the code 403 means that the user may not read the object, which is only a warning
            is_required = getattr(error, "code", 0) != 403
            finished_checks.append(
                Check(
                    name,
                    False,
                    f"not checked: {error}",
                    "Fix this error, then check again.",
                    is_required,
                )
            )

    return finished_checks


def _list_namespace_checks(
    cluster: Cluster, cluster_config: ClusterConfig, queued_jobs: Sequence[QueuedJob]
) -> dict[str, Iterator[Check]]:
    """Return the checks that every config needs, by name."""
    render_command = RENDER_COMMAND.format(cluster.namespace)
    secret_command = platform.format_secret_command(cluster.namespace) + CLOUD_ROLE_NOTE

    return {
        "kinds": check_kinds(cluster, cluster_config.backend),
        "controllers": check_controllers(cluster, cluster_config.backend),
        "gang": check_gang(cluster, cluster_config, queued_jobs),
        "waiting jobs": check_waiting_jobs(cluster),
        "namespace": check_namespace(cluster),
        "your rights": check_user_rights(cluster),
        "account": check_account(cluster, cluster_config),
        "serving account": check_serving_account(cluster, cluster_config.serving_account),
        "addresses": check_keys(
            cluster, "addresses", CONFIG_MAPS, CONFIG_MAP, ADDRESS_KEYS, render_command
        ),
        "artifact repository": check_artifact_repository(cluster),
        # the Secret is not required, because pods may use a cloud role, which the check of the
        # object store tests
        "credentials": check_keys(
            cluster,
            "credentials",
            SECRETS,
            STORE_SECRET,
            KEY_NAMES,
            secret_command,
            is_required=False,
        ),
        "serving credentials": check_serving_credentials(cluster),
        "admission": check_admission(cluster, cluster_config),
    }


def _list_secret_checks(
    cluster: Cluster, needs_token: bool, secret_names: Sequence[str]
) -> dict[str, Iterator[Check]]:
    """Return, by name, the checks of the Secrets that `serve.token` and `program.secrets` need."""
    checks_by_name: dict[str, Iterator[Check]] = {}
    if needs_token:
        secret_command = platform.format_secret_command(
            cluster.namespace, TOKEN_SECRET, [REKINDLE_TOKEN]
        )
        checks_by_name["tokens"] = check_keys(
            cluster, "tokens", SECRETS, TOKEN_SECRET, [REKINDLE_TOKEN], secret_command
        )

    if secret_names:
        secret_command = platform.format_secret_command(
            cluster.namespace, PROGRAM_SECRET, secret_names
        )
        checks_by_name["program secrets"] = check_keys(
            cluster, "program secrets", SECRETS, PROGRAM_SECRET, secret_names, secret_command
        )
    return checks_by_name


def _list_job_checks(
    cluster: Cluster, cluster_config: ClusterConfig, train_config: TrainConfig
) -> dict[str, Iterator[Check]]:
    """Return, by name, the checks of the job that `cluster.backend` selects."""
    if cluster_config.backend == "pytorchjob":
        return {
            "webhook": check_webhook(cluster, cluster_config, train_config),
            "init container": check_init_container(cluster),
        }
    return {"job": check_job(cluster, cluster_config, train_config)}


def _check_api_server(cluster: Cluster) -> Check:
    try:
        server_version = cluster.read("version", "GET", "/version")
    except ApiError as error:
        return Check(
            "API server",
            False,
            str(error),
            "Choose a --context that answers: kubectl config get-contexts",
        )

    version_texts = (server_version["major"], server_version["minor"])
    version_numbers = tuple(int(re.sub("[^0-9]", "", text)[:9] or 0) for text in version_texts)
    detail = f"{cluster.server}, Kubernetes {server_version['gitVersion']}"
    remedy = f"Kubernetes {MIN_KUBERNETES[0]}.{MIN_KUBERNETES[1]} or newer is needed."

    return Check("API server", version_numbers >= MIN_KUBERNETES, detail, remedy)
