"""Check the objects and permissions of a namespace, such as ServiceAccounts, Secrets and
addresses."""

import re
from collections.abc import Iterable, Iterator, Sequence

from argolocal.language.yaml_text import parse_one
from argolocal.manifest.object_labels import DEFAULT_ARTIFACT_REPOSITORY
from rekindle.blocks.settings import ClusterConfig
from rekindle.cluster import platform
from rekindle.cluster.errors import ApiError
from rekindle.cluster.kubernetes_api import Cluster, Resource
from rekindle.cluster.platform import KEY_NAMES
from rekindle.doctor.namespace_objects import (
    CONFIG_MAPS,
    POD_SECURITY_LABEL,
    SECRETS,
    read_data,
    read_enforced_level,
)
from rekindle.doctor.operator_checks import BACKEND_KINDS
from rekindle.errors import Check, ConfigError, RekindleError, format_address
from rekindle.kubernetes_names import (
    CONFIG_MAP,
    S3_BUCKET,
    S3_ENDPOINT_URL,
    SERVING_SECRET,
    STORE_SECRET,
)

SERVICE_ACCOUNTS = Resource("v1", "serviceaccounts")
CLOUD_ROLE_NOTE = " The Secret is not needed if pods have a cloud role."
RENDER_COMMAND = "rekindle platform render -n {0} ... | kubectl apply -f -"


def check_namespace(cluster: Cluster) -> Iterator[Check]:
    """Check that the namespace enforces the PodSecurity standard `restricted`; if it does not,
    return a warning."""
    security_level = read_enforced_level(cluster)
    remedy = f"kubectl label namespace {cluster.namespace} {POD_SECURITY_LABEL}=restricted"
    yield Check(
        "PodSecurity",
        security_level == "restricted",
        f"enforced level: {security_level or 'none'}",
        remedy,
        required=False,
    )


def check_user_rights(cluster: Cluster) -> Iterator[Check]:
    """Check that the user has all permissions that the commands of `rekindle` need."""
    permissions = list(platform.list_permissions("users"))
    denied_permissions = _describe_denied(cluster, permissions, "selfsubjectaccessreviews")
    remedy = (
        "Ask an administrator of the cluster to bind you to the Role that `rekindle platform"
        f" render` prints: kubectl -n {cluster.namespace} create rolebinding rekindle-user"
        " --role=rekindle-user --user=YOU"
    )
    yield Check(
        "your rights",
        not denied_permissions,
        denied_permissions or f"all {len(permissions)} permissions granted",
        remedy,
    )


def check_account(cluster: Cluster, cluster_config: ClusterConfig) -> Iterator[Check]:
    """Check that the ServiceAccount of workflows exists, that it has the permissions that a
    pipeline needs, and that a Secret with its token exists for Argo's executor."""
    name = cluster_config.service_account
    remedy = RENDER_COMMAND.format(cluster.namespace)

    if not cluster.find(SERVICE_ACCOUNTS, name):
        yield Check("account", False, f"ServiceAccount {name} does not exist", remedy)
        return

    permissions = [
        permission
        for permission in platform.list_permissions()
        if cluster_config.backend == "pytorchjob" or permission[0] != "kubeflow.org"
    ]

    needed_groups = {
        api_version.partition("/")[0] for api_version in BACKEND_KINDS[cluster_config.backend]
    } - {"kubeflow.org"}
    if needed_groups:
        job_kinds = {
            job_kind
            for kind_names in BACKEND_KINDS[cluster_config.backend].values()
            for job_kind in kind_names
        }
        permissions += [
            permission
            for permission in platform.list_permissions("frameworks")
            if permission[0] in needed_groups and permission[1] in job_kinds
        ]
        remedy = remedy.replace("...", "--with frameworks ...")

    account_user = f"system:serviceaccount:{cluster.namespace}:{name}"
    try:
        denied_permissions = _describe_denied(
            cluster, permissions, "subjectaccessreviews", user=account_user
        )
        yield Check(
            "account",
            not denied_permissions,
            denied_permissions or f"{name}: all {len(permissions)} rights granted",
            remedy,
        )
    except ApiError as error:
        yield Check(
            "account", False, str(error), "Have an administrator run this check.", required=False
        )

    yield from check_keys(
        cluster, "token", SECRETS, f"{name}.service-account-token", ["token"], remedy
    )


def check_serving_account(cluster: Cluster, account_name: str) -> Iterator[Check]:
    """Check that the ServiceAccount of the model server's pods exists."""
    account_exists = bool(cluster.find(SERVICE_ACCOUNTS, account_name))
    detail = f"ServiceAccount {account_name} {'exists' if account_exists else 'does not exist'}"
    yield Check("serving account", account_exists, detail, RENDER_COMMAND.format(cluster.namespace))


def check_serving_credentials(cluster: Cluster) -> Iterator[Check]:
    """Check that the model server has keys for the object store that differ from the keys of the
    pipelines."""
    secret_command = platform.format_secret_command(cluster.namespace, SERVING_SECRET)
    remedy = f"{secret_command}, of a user who can only read releases/.{CLOUD_ROLE_NOTE}"
    (keys_check,) = check_keys(
        cluster, "serving credentials", SECRETS, SERVING_SECRET, KEY_NAMES, remedy, False
    )

    has_same_keys = keys_check.ok and read_data(cluster, SECRETS, SERVING_SECRET) == read_data(
        cluster, SECRETS, STORE_SECRET
    )
    if has_same_keys:
        detail = "pipelines use the same keys: a compromised server could write to the bucket"
    else:
        detail = keys_check.found

    yield Check(
        keys_check.name,
        keys_check.ok and not has_same_keys,
        detail,
        keys_check.remedy,
        required=False,
    )


def check_artifact_repository(cluster: Cluster) -> Iterator[Check]:
    """Check that Argo uses the same bucket as the steps."""
    address_settings = read_data(cluster, CONFIG_MAPS, CONFIG_MAP)
    bucket, endpoint = _read_artifact_repository(cluster)
    steps_endpoint = re.sub(
        "^https?://", "", format_address(address_settings.get(S3_ENDPOINT_URL) or "")
    ).rstrip("/")
    is_same_endpoint = endpoint == steps_endpoint or (
        not steps_endpoint and "amazonaws.com" in endpoint
    )
    is_same_bucket = is_same_endpoint and bucket == address_settings.get(S3_BUCKET)
    detail = f"bucket {bucket!r} at {endpoint!r}"
    if not is_same_bucket:
        detail += f", while steps use {address_settings.get(S3_BUCKET)!r} at {steps_endpoint!r}"
    yield Check(
        "artifact repository", is_same_bucket, detail, RENDER_COMMAND.format(cluster.namespace)
    )


def check_keys(
    cluster: Cluster,
    check_title: str,
    resource: Resource,
    object_name: str,
    required_keys: Sequence[str],
    remedy: str,
    is_required: bool = True,
) -> Iterator[Check]:
    """Check that a ConfigMap or Secret has a value for each key."""
    object_data = read_data(cluster, resource, object_name)
    missing_keys = [key for key in required_keys if not object_data.get(key)]
    object_kind = "Secret" if resource == SECRETS else "ConfigMap"
    yield Check(
        check_title,
        not missing_keys,
        f"{object_kind} {object_name} {'lacks' if missing_keys else 'has'}"
        f" {' and '.join(missing_keys or required_keys)}",
        remedy,
        is_required,
    )


def _describe_denied(
    cluster: Cluster,
    permissions: Iterable[tuple[str, str, str]],
    review_kind: str,
    **review_subject: str,
) -> str:
    """Return a text that lists the permissions that are not granted; "" if all are granted.
    `review_kind`: kind of the access review that answers; `review_subject`: user of the access
    review, if not the current user."""
    denied_verbs: dict[str, list[str]] = {}

    for api_group, resource_path, verb in permissions:
        plural, _, subresource = resource_path.partition("/")
        resource_attributes = {
            "namespace": cluster.namespace,
            "group": api_group,
            "resource": plural,
            "verb": verb,
        }

        review_spec = {
            **review_subject,
            "resourceAttributes": (
                resource_attributes | ({"subresource": subresource} if subresource else {})
            ),
        }

        path = f"/apis/authorization.k8s.io/v1/{review_kind}"
        review_answer = cluster.read("accessreviews", "POST", path, {"spec": review_spec})
        if not review_answer["status"].get("allowed"):
            denied_verbs.setdefault(
                f"{resource_path}.{api_group}" if api_group else resource_path, []
            ).append(verb)

    return "; ".join(
        f"may not {', '.join(verb_list)} {resource_kind}"
        for resource_kind, verb_list in denied_verbs.items()
    )


def _read_artifact_repository(cluster: Cluster) -> tuple[str, str]:
    """Return bucket and endpoint of the default artifact repository of the namespace."""
    config_map = cluster.find(CONFIG_MAPS, "artifact-repositories") or {}
    annotations = (config_map.get("metadata") or {}).get("annotations") or {}
    key = annotations.get(DEFAULT_ARTIFACT_REPOSITORY, "")
    try:
        text = (config_map.get("data") or {}).get(key, "")
        s3_settings = (parse_one(text, "its value") or {}).get("s3") or {}
    except (ConfigError, AttributeError) as error:
        raise RekindleError(f"ConfigMap artifact-repositories, key {key}: {error}") from error
    # omit the credentials of an endpoint, because they would appear in the output
    endpoint = str(s3_settings.get("endpoint", "")).rpartition("@")[2]
    return str(s3_settings.get("bucket", "")), endpoint
