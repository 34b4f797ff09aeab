"""Check that pipelines can run in a namespace of a cluster. Each failure has a remedy.

    for result in check(Cluster.connect(namespace="models"), config.cluster, config.train):
        print(result)

Pods and a job are created as a dry run, the webhook receives a job that it must refuse, and a
temporary pod tests the object store and MLflow. If the user lacks the permission to read an object,
the result is only a warning.
"""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from argolocal.common.json_text import to_json
from argolocal.language.yaml_text import parse_one
from argolocal.manifest.allowed_values import API_VERSION
from argolocal.manifest.object_labels import DEFAULT_ARTIFACT_REPOSITORY
from argolocal.manifest.training_jobs import JOB_API_VERSION
from argolocal.manifest.types import Object
from rekindle.blocks import pod_settings as pods
from rekindle.blocks.jobs.backends import BACKENDS
from rekindle.blocks.jobs.members import member_commands
from rekindle.blocks.jobs.train_job import TRAINER_VERSION
from rekindle.blocks.presets import read_presets
from rekindle.blocks.settings import ClusterConfig
from rekindle.cluster import platform, queue
from rekindle.cluster.cluster_nodes import ALL_PODS
from rekindle.cluster.errors import ApiError
from rekindle.cluster.kubernetes_api import Cluster, Resource
from rekindle.cluster.platform import KEY_NAMES
from rekindle.doctor.admission_checks import check_admission
from rekindle.doctor.pod_checks import PROBE_TIMEOUT_S, run_pod_checks
from rekindle.errors import Check, ConfigError, RekindleError, format_address
from rekindle.kubernetes_names import (
    CONFIG_MAP,
    DOCTOR_NAME,
    MLFLOW_TRACKING_URI,
    NAME_LABEL,
    PROGRAM_SECRET,
    REKINDLE_TOKEN,
    S3_BUCKET,
    S3_ENDPOINT_URL,
    SERVING_SECRET,
    STORE_SECRET,
    TOKEN_SECRET,
    WORKLOAD_MODULES,
)
from rekindle.training.spec import TrainConfig

PYTORCH_JOBS = Resource(JOB_API_VERSION, "pytorchjobs")
NAMESPACES = Resource("v1", "namespaces", namespaced=False)
SECRETS = Resource("v1", "secrets")
CONFIG_MAPS = Resource("v1", "configmaps")
SERVICE_ACCOUNTS = Resource("v1", "serviceaccounts")
ADDRESS_KEYS = (S3_BUCKET, MLFLOW_TRACKING_URI)
ARGO_KINDS = {
    API_VERSION: (
        "workflows",
        "workflowtemplates",
        "cronworkflows",
        "workflowtaskresults",
    )
}
# kinds of objects that each `cluster.backend` needs, by API version
JOB_SETS = {"jobset.x-k8s.io/v1alpha2": ("jobsets",)}
BACKEND_KINDS: dict[str, dict[str, tuple[str, ...]]] = {
    "pytorchjob": {JOB_API_VERSION: ("pytorchjobs",)},
    "jobset": JOB_SETS,
    "trainjob": {**JOB_SETS, TRAINER_VERSION: ("trainjobs", "trainingruntimes")},
}
# the oldest supported versions of Kubernetes, Argo and the operators, as in docs/cluster.md
MIN_KUBERNETES = (1, 30)
MIN_ARGO = (3, 7)
MIN_OPERATOR = (1, 9)
INSTALL_REMEDIES = {
    API_VERSION: f"install Argo Workflows {MIN_ARGO[0]}.{MIN_ARGO[1]} or newer",
    JOB_API_VERSION: (
        f"install the Kubeflow training operator {MIN_OPERATOR[0]}.{MIN_OPERATOR[1]}"
    ),
    "jobset.x-k8s.io/v1alpha2": "install JobSet 0.12",
    TRAINER_VERSION: "install Kubeflow Trainer 2.3",
}
CONTROLLERS = {
    "Argo's controller": (
        "app=workflow-controller",
        MIN_ARGO,
        INSTALL_REMEDIES[API_VERSION],
    ),
    "training operator": (
        "control-plane=kubeflow-training-operator",
        MIN_OPERATOR,
        INSTALL_REMEDIES[JOB_API_VERSION],
    ),
}
# permissions that the commands of `rekindle` need: (group, resource, verbs)
USER_PERMISSIONS = (
    ("argoproj.io", "workflows", "get list watch create update patch delete"),
    ("argoproj.io", "workflowtemplates", "get create update delete"),
    ("argoproj.io", "cronworkflows", "get list create update delete"),
    ("", "pods", "get list watch create delete"),
    ("", "pods/log", "get"),
)
CLOUD_ROLE_NOTE = " The Secret is not needed if pods have a cloud role."
RENDER_COMMAND = "rekindle platform render -n {0} ... | kubectl apply -f -"
POD_SECURITY_LABEL = "pod-security.kubernetes.io/enforce"


def check_cluster(
    cluster: Cluster,
    cluster_config: ClusterConfig,
    train_config: TrainConfig,
    probe_timeout_seconds: float = PROBE_TIMEOUT_S,
    needs_token: bool = False,
    secret_names: Sequence[str] = (),
) -> list[Check]:
    """Run all checks in order. An error in a check becomes its result, so that the other checks
    still run.

    `probe_timeout_seconds`: time limit of the pod, including the time to pull its image.
    `needs_token`: value of `serve.token`. `secret_names`: value of `program.secrets`.
    """
    check_list = [_check_api_server(cluster)]
    if not check_list[0].ok:
        return check_list

    render_command = RENDER_COMMAND.format(cluster.namespace)
    create_secret = platform.format_secret_command(cluster.namespace) + CLOUD_ROLE_NOTE

    checks_by_name: dict[str, Iterator[Check]] = {
        "kinds": check_kinds(cluster, cluster_config.backend),
        "controllers": check_controllers(cluster, cluster_config.backend),
        "gang": check_gang(cluster, cluster_config.gang, cluster_config.queue),
        "namespace": check_namespace(cluster),
        "your rights": check_user_rights(cluster),
        "account": check_account(cluster, cluster_config),
        "serving account": check_serving_account(cluster, cluster_config.serving_account),
        "addresses": _check_keys(
            cluster, "addresses", CONFIG_MAPS, CONFIG_MAP, ADDRESS_KEYS, render_command
        ),
        "artifact repository": check_artifact_repository(cluster),
        # the Secret is not required, because pods may use a cloud role, which the check of the
        # object store tests
        "credentials": _check_keys(
            cluster,
            "credentials",
            SECRETS,
            STORE_SECRET,
            KEY_NAMES,
            create_secret,
            is_required=False,
        ),
        "serving credentials": check_serving_credentials(cluster),
        "admission": check_admission(cluster, cluster_config),
    }

    if needs_token:
        token_command = platform.format_secret_command(
            cluster.namespace, TOKEN_SECRET, [REKINDLE_TOKEN]
        )
        checks_by_name["tokens"] = _check_keys(
            cluster, "tokens", SECRETS, TOKEN_SECRET, [REKINDLE_TOKEN], token_command
        )

    if secret_names:
        token_command = platform.format_secret_command(
            cluster.namespace, PROGRAM_SECRET, secret_names
        )
        checks_by_name["program secrets"] = _check_keys(
            cluster, "program secrets", SECRETS, PROGRAM_SECRET, secret_names, token_command
        )

    if cluster_config.backend == "pytorchjob":
        checks_by_name["webhook"] = check_webhook(cluster, cluster_config, train_config)
        checks_by_name["init container"] = check_init_container(cluster)
    else:
        checks_by_name["job"] = check_job(cluster, cluster_config, train_config)

    checks_by_name["probe"] = run_pod_checks(cluster, cluster_config, probe_timeout_seconds)
    for name, check_results in checks_by_name.items():
        try:
            for check_result in check_results:
                check_list.append(check_result)
        except RekindleError as error:
            # 403: the user may not read the object, which is only a warning
            is_required = getattr(error, "code", 0) != 403
            check_list.append(
                Check(
                    name,
                    False,
                    f"not checked: {error}",
                    "Fix this error, then check again.",
                    is_required,
                )
            )

    return check_list


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


def check_kinds(cluster: Cluster, backend_name: str) -> Iterator[Check]:
    """Check that the cluster defines, in the right versions, the kinds of objects that workflows
    create."""
    for api_version, required_kinds in (ARGO_KINDS | BACKEND_KINDS[backend_name]).items():
        defined_kinds = _defined_kinds(cluster, api_version)
        missing_kinds = [kind for kind in required_kinds if kind not in defined_kinds]
        if missing_kinds:
            detail = f"no {', '.join(missing_kinds)}"
        else:
            detail = ", ".join(required_kinds)

        yield Check(
            api_version,
            not missing_kinds,
            detail,
            f"Definitions are missing or too old: {INSTALL_REMEDIES[api_version]}.",
        )


def _defined_kinds(cluster: Cluster, api_version: str) -> set[str]:
    """Return the kinds that are defined in a version of an API group."""
    try:
        api_resources = (
            cluster.read("apiresources", "GET", f"/apis/{api_version}").get("resources") or ()
        )
        return {api_resource["name"] for api_resource in api_resources}
    except ApiError as error:
        if error.code != 404:
            raise
        return set()


def check_controllers(cluster: Cluster, backend_name: str) -> Iterator[Check]:
    """Check that the controllers run, watch this namespace, and are new enough."""
    for name, (label_selector, min_version, remedy) in CONTROLLERS.items():
        if name == "training operator" and backend_name != "pytorchjob":
            continue

        controller_pod = next(
            filter(_is_ready, cluster.list_objects(ALL_PODS, label_selector)), None
        )
        if not controller_pod:
            remedy = (
                f"See the log of the pod (kubectl get pods -A -l {label_selector}), or {remedy}."
            )
            yield Check(name, False, f"no pod with the label {label_selector} is ready", remedy)
            continue

        controller_container = _first_container(controller_pod)
        own_namespace = controller_pod["metadata"].get("namespace", "")
        image_name = controller_container.get("image", "")
        container_arguments = [
            *(controller_container.get("command") or []),
            *(controller_container.get("args") or []),
        ]
        watched_namespace = _read_flag(container_arguments, "--managed-namespace") or _read_flag(
            container_arguments, "--namespace"
        )
        watched_namespace = watched_namespace or (
            own_namespace if "--namespaced" in container_arguments else ""
        )
        version_match = re.search(r":v?(\d{1,9})\.(\d{1,9})", image_name)
        is_supported = (
            not version_match or (int(version_match[1]), int(version_match[2])) >= min_version
        )
        watches_namespace = watched_namespace in ("", cluster.namespace)
        detail = f"{image_name.rpartition('/')[2]} in {own_namespace}"
        detail += "" if watches_namespace else f", which sees only namespace {watched_namespace}"

        if is_supported:
            remedy = f"Let the controller watch {cluster.namespace}."
        else:
            remedy = f"{remedy}."

        yield Check(name, is_supported and watches_namespace, detail, remedy)


def check_gang(cluster: Cluster, scheduler_name: str, queue_name: str) -> Iterator[Check]:
    """If `cluster.gang` is set, check that the operator or Kueue starts all pods of a job
    together."""
    if scheduler_name == "kueue":
        kueue_versions = (
            f"kueue.x-k8s.io/{kueue_version}" for kueue_version in queue.KUEUE_VERSIONS
        )
        kueue_api = next(
            (
                kueue_api
                for kueue_api in kueue_versions
                if "localqueues" in _defined_kinds(cluster, kueue_api)
            ),
            "",
        )
        detail = f"Kueue is {'installed' if kueue_api else 'not installed'}"
        yield Check("gang", bool(kueue_api), detail, "Install Kueue, or leave cluster.gang empty.")

        if kueue_api:
            queues_by_name = {
                queue_object["metadata"]["name"]: queue_object
                for queue_object in cluster.list_objects(Resource(kueue_api, "localqueues"))
            }
            queue_spec = queues_by_name.get(queue_name, {}).get("spec")
            if queue_spec:
                detail = f"ClusterQueue {queue_spec['clusterQueue']}"
            else:
                detail = "no such queue in this namespace"

            remedy = (
                "Set cluster.queue to a LocalQueue of the namespace"
                f" ({', '.join(sorted(queues_by_name)) or 'none exist'}), or ask the platform team"
                f" for a LocalQueue {queue_name}."
            )

            yield Check(f"queue {queue_name}", queue_name in queues_by_name, detail, remedy)
    elif scheduler_name:
        expected_name = read_presets()["gang"][scheduler_name]["pods"]["schedulerName"]
        for operator_pod in cluster.list_objects(ALL_PODS, CONTROLLERS["training operator"][0]):
            operator_container = _first_container(operator_pod)
            scheduler_flag = "--gang-scheduler-name"
            actual_name = _read_flag(
                [
                    *(operator_container.get("command") or []),
                    *(operator_container.get("args") or []),
                ],
                scheduler_flag,
            )
            if actual_name:
                detail = f"the training operator has {scheduler_flag}={actual_name}"
            else:
                detail = f"the training operator does not have {scheduler_flag}"

            remedy = f"Give the training operator the argument {scheduler_flag}={expected_name}."
            yield Check("gang", actual_name == expected_name, detail, remedy)


def check_namespace(cluster: Cluster) -> Iterator[Check]:
    security_level = _enforced_level(cluster)
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
    permissions = [
        (api_group, resource_name, verb)
        for api_group, resource_name, verb_list in USER_PERMISSIONS
        for verb in verb_list.split()
    ]
    denied_permissions = _describe_denied(cluster, permissions, "selfsubjectaccessreviews")
    remedy = "Ask an administrator of the cluster for a Role with these verbs, bound to you."
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

    yield from _check_keys(
        cluster, "token", SECRETS, f"{name}.service-account-token", ["token"], remedy
    )


def check_serving_account(cluster: Cluster, name: str) -> Iterator[Check]:
    """Check that the ServiceAccount that the pods of the model server need exists."""
    account_exists = bool(cluster.find(SERVICE_ACCOUNTS, name))
    detail = f"ServiceAccount {name} {'exists' if account_exists else 'does not exist'}"
    yield Check("serving account", account_exists, detail, RENDER_COMMAND.format(cluster.namespace))


def check_serving_credentials(cluster: Cluster) -> Iterator[Check]:
    """Check that the model server has keys for the object store that differ from the keys of the
    pipelines."""
    secret_command = platform.format_secret_command(cluster.namespace, SERVING_SECRET)
    remedy = f"{secret_command}, of a user who can only read releases/.{CLOUD_ROLE_NOTE}"
    (keys_check,) = _check_keys(
        cluster, "serving credentials", SECRETS, SERVING_SECRET, KEY_NAMES, remedy, False
    )

    has_same_keys = keys_check.ok and _read_data(cluster, SECRETS, SERVING_SECRET) == _read_data(
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
    address_settings = _read_data(cluster, CONFIG_MAPS, CONFIG_MAP)
    bucket, endpoint = _artifact_repository(cluster)
    steps_endpoint = re.sub(
        "^https?://", "", format_address(address_settings.get(S3_ENDPOINT_URL) or "")
    ).rstrip("/")
    is_same_endpoint = endpoint == steps_endpoint or (
        not steps_endpoint and "amazonaws.com" in endpoint
    )
    is_same_bucket = is_same_endpoint and bucket == address_settings.get(S3_BUCKET)
    detail = f"bucket {bucket!r} at {endpoint!r}"
    detail += (
        ""
        if is_same_bucket
        else f", while steps use {address_settings.get(S3_BUCKET)!r} at {steps_endpoint!r}"
    )
    yield Check(
        "artifact repository", is_same_bucket, detail, RENDER_COMMAND.format(cluster.namespace)
    )


def _check_keys(
    cluster: Cluster,
    check_title: str,
    resource: Resource,
    name: str,
    required_keys: Sequence[str],
    remedy: str,
    is_required: bool = True,
) -> Iterator[Check]:
    """Check that a ConfigMap or Secret has a value for each key."""
    object_data = _read_data(cluster, resource, name)
    missing_keys = [key for key in required_keys if not object_data.get(key)]
    object_kind = "Secret" if resource == SECRETS else "ConfigMap"
    yield Check(
        check_title,
        not missing_keys,
        f"{object_kind} {name} {'lacks' if missing_keys else 'has'}"
        f" {' and '.join(missing_keys or required_keys)}",
        remedy,
        is_required,
    )


def check_webhook(
    cluster: Cluster, cluster_config: ClusterConfig, train_config: TrainConfig
) -> Iterator[Check]:
    """Check that the operator's webhook admits the job of the config, and refuses a job without the
    main container. (Without the webhook, the API server accepts such a job.)"""
    valid_job = _build_job(cluster_config, train_config)
    invalid_job = json.loads(to_json(valid_job).replace('"name": "pytorch"', '"name": "another"'))
    is_refused = False
    detail = "a job without its main container was admitted: the webhook does not validate jobs"

    try:
        cluster.create(PYTORCH_JOBS, valid_job, dry_run=True)
        try:
            cluster.create(PYTORCH_JOBS, invalid_job, dry_run=True)
        except ApiError as error:
            is_refused = "webhook" in str(error)
            if is_refused:
                detail = "admits a valid job and refuses an invalid job"
            else:
                detail = str(error)
    except ApiError as error:
        detail = str(error)

    remedy = (
        "Restart the training operator (kubectl -n kubeflow rollout restart deployment"
        " training-operator)."
    )
    yield Check("webhook", is_refused, detail, remedy)


def check_job(
    cluster: Cluster, cluster_config: ClusterConfig, train_config: TrainConfig
) -> Iterator[Check]:
    """Check that the job of the config would be created. JobSet may refuse the job if one of its
    feature gates is off."""
    job_object = _build_job(cluster_config, train_config)
    job_kind = BACKENDS[cluster_config.backend].kind

    try:
        cluster.create(
            Resource(job_object["apiVersion"], f"{job_object['kind'].lower()}s"),
            job_object,
            dry_run=True,
        )
    except ApiError as error:
        remedy = f"Change the policy that refuses the job, or cluster.backend ({job_kind})."
        if cluster_config.restart_job:
            remedy = "Enable JobSet's feature gate RestartJob, or remove cluster.restart_job."

        yield Check("job", False, str(error), remedy)
    else:
        yield Check("job", True, f"{job_object['kind']} would be created")


def _build_job(cluster_config: ClusterConfig, train_config: TrainConfig) -> Object:
    """Return the job of the config or, for a TrainJob, its TrainingRuntime. Its workflow label gets
    another value, because no workflow creates this object."""
    backend = BACKENDS[cluster_config.backend]
    commands = member_commands(WORKLOAD_MODULES, [])
    job_object = (backend.runtime or backend.job)(
        DOCTOR_NAME, train_config, cluster_config, commands
    )
    workflow_label_json = to_json(pods.WORKFLOW_LABEL)[1:-1]
    name = f'"{NAME_LABEL}": "{DOCTOR_NAME}"'
    return json.loads(to_json(job_object).replace(workflow_label_json, name))


def check_init_container(cluster: Cluster) -> Iterator[Check]:
    """Check that the operator hardens the init container that it adds. Without this, the
    PodSecurity standard `restricted` refuses the workers."""
    if _enforced_level(cluster) != "restricted":
        yield Check(
            "init container", True, "not needed: the namespace does not enforce `restricted`"
        )
        return

    container_template = ""
    for operator_pod in cluster.list_objects(ALL_PODS, CONTROLLERS["training operator"][0]):
        operator_namespace = operator_pod["metadata"].get("namespace", "")
        operator_cluster = cluster.in_namespace(operator_namespace)
        for volume in (operator_pod.get("spec") or {}).get("volumes") or []:
            name = (volume.get("configMap") or {}).get("name")
            if name:
                container_template += "".join(
                    _read_data(operator_cluster, CONFIG_MAPS, name).values()
                )

    is_hardened = "allowPrivilegeEscalation: false" in container_template
    detail = (
        "the operator's template is"
        f" {'hardened' if is_hardened else 'not hardened: workers are refused'}"
    )
    remedy = (
        "rekindle platform render --operator | kubectl apply --server-side --field-manager=rekindle"
        " -f -"
    )
    yield Check("init container", is_hardened, detail, remedy)


def _describe_denied(
    cluster: Cluster,
    permissions: Iterable[tuple[str, str, str]],
    review_kind: str,
    **review_subject: str,
) -> str:
    """Return the permissions that are not granted, as text."""
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


def _artifact_repository(cluster: Cluster) -> tuple[str, str]:
    """Return bucket and endpoint of the default artifact repository of the namespace."""
    config_map = cluster.find(CONFIG_MAPS, "artifact-repositories") or {}
    annotations = (config_map.get("metadata") or {}).get("annotations") or {}
    key = annotations.get(DEFAULT_ARTIFACT_REPOSITORY, "")
    try:
        text = (config_map.get("data") or {}).get(key, "")
        s3_settings = (parse_one(text, "its value") or {}).get("s3") or {}
    except (ConfigError, AttributeError) as error:
        raise RekindleError(f"ConfigMap artifact-repositories, key {key}: {error}") from error
    return str(s3_settings.get("bucket", "")), str(s3_settings.get("endpoint", "")).rpartition("@")[
        2
    ]


def _read_data(cluster: Cluster, resource: Resource, name: str) -> dict[str, Any]:
    """Return the data of a ConfigMap or Secret, or {} if it does not exist."""
    return (cluster.find(resource, name) or {}).get("data") or {}


def _enforced_level(cluster: Cluster) -> str:
    return (cluster.get(NAMESPACES, cluster.namespace)["metadata"].get("labels") or {}).get(
        POD_SECURITY_LABEL, ""
    )


def _first_container(pod_object: Object) -> Object:
    """Return the first container of a pod; {} if the pod has no containers."""
    containers = (pod_object.get("spec") or {}).get("containers") or [{}]
    return containers[0]


def _is_ready(pod_object: Object) -> bool:
    pod_conditions = (pod_object.get("status") or {}).get("conditions") or []
    return any(
        pod_condition["type"] == "Ready" and pod_condition.get("status") == "True"
        for pod_condition in pod_conditions
    )


def _read_flag(container_arguments: list[str], flag_name: str) -> str:
    """Return the value of `--flag VALUE` or `--flag=VALUE`, or ""."""
    flag_match = re.search(rf"(?:^|\n){flag_name}[=\n](.*)", "\n".join(container_arguments))
    if flag_match:
        return flag_match[1]
    return ""
