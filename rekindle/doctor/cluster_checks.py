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
from argolocal.manifest.training_jobs import JOB_VERSION
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
from rekindle.doctor.pod_checks import PROBE_TIMEOUT_S, checks_from_pod
from rekindle.errors import Check, ConfigError, RekindleError, format_address
from rekindle.kubernetes_names import (
    CONFIG_MAP,
    DOCTOR,
    MLFLOW_TRACKING_URI,
    NAME_LABEL,
    PROGRAM_SECRET,
    REKINDLE_TOKEN,
    S3_BUCKET,
    S3_ENDPOINT_URL,
    SERVING_SECRET,
    STORE_SECRET,
    TOKEN_SECRET,
    WORKLOAD,
)
from rekindle.training.spec import TrainConfig

JOBS = Resource(JOB_VERSION, "pytorchjobs")
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
    "pytorchjob": {JOB_VERSION: ("pytorchjobs",)},
    "jobset": JOB_SETS,
    "trainjob": {**JOB_SETS, TRAINER_VERSION: ("trainjobs", "trainingruntimes")},
}
# the oldest supported versions of Kubernetes, Argo and the operators, as in docs/cluster.md
MIN_KUBERNETES = (1, 30)
MIN_ARGO = (3, 7)
MIN_OPERATOR = (1, 9)
INSTALL_REMEDIES = {
    API_VERSION: f"install Argo Workflows {MIN_ARGO[0]}.{MIN_ARGO[1]} or newer",
    JOB_VERSION: (f"install the Kubeflow training operator {MIN_OPERATOR[0]}.{MIN_OPERATOR[1]}"),
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
        INSTALL_REMEDIES[JOB_VERSION],
    ),
}
# permissions that the commands of `rekindle` need: (group, resource, verbs)
USER_RULES = (
    ("argoproj.io", "workflows", "get list watch create update patch delete"),
    ("argoproj.io", "workflowtemplates", "get create update delete"),
    ("argoproj.io", "cronworkflows", "get list create update delete"),
    ("", "pods", "get list watch create delete"),
    ("", "pods/log", "get"),
)
CLOUD_ROLE_NOTE = " The Secret is not needed if pods have a cloud role."
RENDER_COMMAND = "rekindle platform render -n {0} ... | kubectl apply -f -"
POD_SECURITY = "pod-security.kubernetes.io/enforce"


def check(
    cluster: Cluster,
    config: ClusterConfig,
    train: TrainConfig,
    seconds: float = PROBE_TIMEOUT_S,
    token: bool = False,
    secrets: Sequence[str] = (),
) -> list[Check]:
    """Run all checks in order. An error in a check becomes its result, so that the other checks
    still run.

    `seconds`: time limit of the pod, including the time to pull its image. `token`: value of
    `serve.token`. `secrets`: value of `program.secrets`.
    """
    results = [_check_api_server(cluster)]
    if not results[0].ok:
        return results

    render = RENDER_COMMAND.format(cluster.namespace)
    create_secret = platform.secret_command(cluster.namespace) + CLOUD_ROLE_NOTE

    checks: dict[str, Iterator[Check]] = {
        "kinds": check_kinds(cluster, config.backend),
        "controllers": check_controllers(cluster, config.backend),
        "gang": check_gang(cluster, config.gang, config.queue),
        "namespace": check_namespace(cluster),
        "your rights": check_user_rights(cluster),
        "account": check_account(cluster, config),
        "serving account": check_serving_account(cluster, config.serving_account),
        "addresses": _check_keys(
            cluster, "addresses", CONFIG_MAPS, CONFIG_MAP, ADDRESS_KEYS, render
        ),
        "artifact repository": check_artifact_repository(cluster),
        # the Secret is not required, because pods may use a cloud role, which the check of the
        # object store tests
        "credentials": _check_keys(
            cluster, "credentials", SECRETS, STORE_SECRET, KEY_NAMES, create_secret, required=False
        ),
        "serving credentials": check_serving_credentials(cluster),
        "admission": check_admission(cluster, config),
    }

    if token:
        command = platform.secret_command(cluster.namespace, TOKEN_SECRET, [REKINDLE_TOKEN])
        checks["tokens"] = _check_keys(
            cluster, "tokens", SECRETS, TOKEN_SECRET, [REKINDLE_TOKEN], command
        )

    if secrets:
        command = platform.secret_command(cluster.namespace, PROGRAM_SECRET, secrets)
        checks["program secrets"] = _check_keys(
            cluster, "program secrets", SECRETS, PROGRAM_SECRET, secrets, command
        )

    if config.backend == "pytorchjob":
        checks["webhook"] = check_webhook(cluster, config, train)
        checks["init container"] = check_init_container(cluster)
    else:
        checks["job"] = check_job(cluster, config, train)

    checks["probe"] = checks_from_pod(cluster, config, seconds)
    for name, check_results in checks.items():
        try:
            for result in check_results:
                results.append(result)
        except RekindleError as error:
            # 403: the user may not read the object, which is only a warning
            required = getattr(error, "code", 0) != 403
            results.append(
                Check(
                    name,
                    False,
                    f"not checked: {error}",
                    "Fix this error, then check again.",
                    required,
                )
            )

    return results


def _check_api_server(cluster: Cluster) -> Check:
    try:
        version = cluster.read("version", "GET", "/version")
    except ApiError as error:
        return Check(
            "API server",
            False,
            str(error),
            "Choose a --context that answers: kubectl config get-contexts",
        )

    texts = (version["major"], version["minor"])
    numbers = tuple(int(re.sub("[^0-9]", "", text)[:9] or 0) for text in texts)
    detail = f"{cluster.server}, Kubernetes {version['gitVersion']}"
    remedy = f"Kubernetes {MIN_KUBERNETES[0]}.{MIN_KUBERNETES[1]} or newer is needed."

    return Check("API server", numbers >= MIN_KUBERNETES, detail, remedy)


def check_kinds(cluster: Cluster, backend: str) -> Iterator[Check]:
    """Check that the cluster defines, in the right versions, the kinds of objects that workflows
    create."""
    for api, required_kinds in (ARGO_KINDS | BACKEND_KINDS[backend]).items():
        defined_kinds = _defined_kinds(cluster, api)
        missing_kinds = [kind for kind in required_kinds if kind not in defined_kinds]
        if missing_kinds:
            detail = f"no {', '.join(missing_kinds)}"
        else:
            detail = ", ".join(required_kinds)

        yield Check(
            api,
            not missing_kinds,
            detail,
            f"Definitions are missing or too old: {INSTALL_REMEDIES[api]}.",
        )


def _defined_kinds(cluster: Cluster, api: str) -> set[str]:
    """Return the kinds that are defined in a version of an API group."""
    try:
        resources = cluster.read("apiresources", "GET", f"/apis/{api}").get("resources") or ()
        return {resource["name"] for resource in resources}
    except ApiError as error:
        if error.code != 404:
            raise
        return set()


def check_controllers(cluster: Cluster, backend: str) -> Iterator[Check]:
    """Check that the controllers run, watch this namespace, and are new enough."""
    for name, (label, min_version, remedy) in CONTROLLERS.items():
        if name == "training operator" and backend != "pytorchjob":
            continue

        controller_pod = next(filter(_is_ready, cluster.list_objects(ALL_PODS, label)), None)
        if not controller_pod:
            remedy = f"See the log of the pod (kubectl get pods -A -l {label}), or {remedy}."
            yield Check(name, False, f"no pod with the label {label} is ready", remedy)
            continue

        container = _first_container(controller_pod)
        own_namespace = controller_pod["metadata"].get("namespace", "")
        image = container.get("image", "")
        args = [*(container.get("command") or []), *(container.get("args") or [])]
        watched_namespace = _flag(args, "--managed-namespace") or _flag(args, "--namespace")
        watched_namespace = watched_namespace or (own_namespace if "--namespaced" in args else "")
        version = re.search(r":v?(\d{1,9})\.(\d{1,9})", image)
        is_supported = not version or (int(version[1]), int(version[2])) >= min_version
        sees_namespace = watched_namespace in ("", cluster.namespace)
        detail = f"{image.rpartition('/')[2]} in {own_namespace}"
        detail += "" if sees_namespace else f", which sees only namespace {watched_namespace}"

        if is_supported:
            remedy = f"Let the controller watch {cluster.namespace}."
        else:
            remedy = f"{remedy}."

        yield Check(name, is_supported and sees_namespace, detail, remedy)


def check_gang(cluster: Cluster, scheduler: str, queue_name: str) -> Iterator[Check]:
    """If `cluster.gang` is set, check that the operator or Kueue starts all pods of a job
    together."""
    if scheduler == "kueue":
        apis = (f"kueue.x-k8s.io/{version}" for version in queue.VERSIONS)
        api = next((api for api in apis if "localqueues" in _defined_kinds(cluster, api)), "")
        detail = f"Kueue is {'installed' if api else 'not installed'}"
        yield Check("gang", bool(api), detail, "Install Kueue, or leave cluster.gang empty.")

        if api:
            queues = {
                obj["metadata"]["name"]: obj
                for obj in cluster.list_objects(Resource(api, "localqueues"))
            }
            queue_spec = queues.get(queue_name, {}).get("spec")
            if queue_spec:
                detail = f"ClusterQueue {queue_spec['clusterQueue']}"
            else:
                detail = "no such queue in this namespace"

            remedy = (
                "Set cluster.queue to a LocalQueue of the namespace"
                f" ({', '.join(sorted(queues)) or 'none exist'}), or ask the platform team for a"
                f" LocalQueue {queue_name}."
            )

            yield Check(f"queue {queue_name}", queue_name in queues, detail, remedy)
    elif scheduler:
        expected_name = read_presets()["gang"][scheduler]["pods"]["schedulerName"]
        for operator in cluster.list_objects(ALL_PODS, CONTROLLERS["training operator"][0]):
            container = _first_container(operator)
            flag = "--gang-scheduler-name"
            actual_name = _flag(
                [*(container.get("command") or []), *(container.get("args") or [])], flag
            )
            detail = (
                "the training operator"
                f" {f'has {flag}={actual_name}' if actual_name else f'does not have {flag}'}"
            )
            remedy = f"Give the training operator the argument {flag}={expected_name}."
            yield Check("gang", actual_name == expected_name, detail, remedy)


def check_namespace(cluster: Cluster) -> Iterator[Check]:
    level = _enforced_level(cluster)
    remedy = f"kubectl label namespace {cluster.namespace} {POD_SECURITY}=restricted"
    yield Check(
        "PodSecurity",
        level == "restricted",
        f"enforced level: {level or 'none'}",
        remedy,
        required=False,
    )


def check_user_rights(cluster: Cluster) -> Iterator[Check]:
    """Check that the user has all permissions that the commands of `rekindle` need."""
    rules = [
        (group, resource, verb) for group, resource, verbs in USER_RULES for verb in verbs.split()
    ]
    denied_permissions = _describe_denied(cluster, rules, "selfsubjectaccessreviews")
    remedy = "Ask an administrator of the cluster for a Role with these verbs, bound to you."
    yield Check(
        "your rights",
        not denied_permissions,
        denied_permissions or f"all {len(rules)} permissions granted",
        remedy,
    )


def check_account(cluster: Cluster, config: ClusterConfig) -> Iterator[Check]:
    """Check that the ServiceAccount of workflows exists, that it has the permissions that a
    pipeline needs, and that a Secret with its token exists for Argo's executor."""
    name = config.service_account
    remedy = RENDER_COMMAND.format(cluster.namespace)

    if not cluster.find(SERVICE_ACCOUNTS, name):
        yield Check("account", False, f"ServiceAccount {name} does not exist", remedy)
        return

    rules = [
        rule
        for rule in platform.list_permissions()
        if config.backend == "pytorchjob" or rule[0] != "kubeflow.org"
    ]

    needed_groups = {api.partition("/")[0] for api in BACKEND_KINDS[config.backend]} - {
        "kubeflow.org"
    }
    if needed_groups:
        kinds = {kind for names in BACKEND_KINDS[config.backend].values() for kind in names}
        rules += [
            rule
            for rule in platform.list_permissions("frameworks")
            if rule[0] in needed_groups and rule[1] in kinds
        ]
        remedy = remedy.replace("...", "--with frameworks ...")

    user = f"system:serviceaccount:{cluster.namespace}:{name}"
    try:
        denied_permissions = _describe_denied(cluster, rules, "subjectaccessreviews", user=user)
        yield Check(
            "account",
            not denied_permissions,
            denied_permissions or f"{name}: all {len(rules)} rights granted",
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
    exists = bool(cluster.find(SERVICE_ACCOUNTS, name))
    detail = f"ServiceAccount {name} {'exists' if exists else 'does not exist'}"
    yield Check("serving account", exists, detail, RENDER_COMMAND.format(cluster.namespace))


def check_serving_credentials(cluster: Cluster) -> Iterator[Check]:
    """Check that the model server has keys for the object store that differ from the keys of the
    pipelines."""
    command = platform.secret_command(cluster.namespace, SERVING_SECRET)
    remedy = f"{command}, of a user who can only read releases/.{CLOUD_ROLE_NOTE}"
    (check,) = _check_keys(
        cluster, "serving credentials", SECRETS, SERVING_SECRET, KEY_NAMES, remedy, False
    )

    has_same_keys = check.ok and _read_data(cluster, SECRETS, SERVING_SECRET) == _read_data(
        cluster, SECRETS, STORE_SECRET
    )
    if has_same_keys:
        detail = "pipelines use the same keys: a compromised server could write to the bucket"
    else:
        detail = check.found

    yield Check(check.name, check.ok and not has_same_keys, detail, check.remedy, required=False)


def check_artifact_repository(cluster: Cluster) -> Iterator[Check]:
    """Check that Argo uses the same bucket as the steps."""
    settings = _read_data(cluster, CONFIG_MAPS, CONFIG_MAP)
    bucket, endpoint = _artifact_repository(cluster)
    steps_endpoint = re.sub(
        "^https?://", "", format_address(settings.get(S3_ENDPOINT_URL) or "")
    ).rstrip("/")
    is_same_endpoint = endpoint == steps_endpoint or (
        not steps_endpoint and "amazonaws.com" in endpoint
    )
    is_same = is_same_endpoint and bucket == settings.get(S3_BUCKET)
    detail = f"bucket {bucket!r} at {endpoint!r}"
    detail += (
        "" if is_same else f", while steps use {settings.get(S3_BUCKET)!r} at {steps_endpoint!r}"
    )
    yield Check("artifact repository", is_same, detail, RENDER_COMMAND.format(cluster.namespace))


def _check_keys(
    cluster: Cluster,
    title: str,
    resource: Resource,
    name: str,
    keys: Sequence[str],
    remedy: str,
    required: bool = True,
) -> Iterator[Check]:
    """Check that a ConfigMap or Secret has a value for each key."""
    data = _read_data(cluster, resource, name)
    missing_keys = [key for key in keys if not data.get(key)]
    kind = "Secret" if resource == SECRETS else "ConfigMap"
    yield Check(
        title,
        not missing_keys,
        f"{kind} {name} {'lacks' if missing_keys else 'has'} {' and '.join(missing_keys or keys)}",
        remedy,
        required,
    )


def check_webhook(cluster: Cluster, config: ClusterConfig, train: TrainConfig) -> Iterator[Check]:
    """Check that the operator's webhook admits the job of the config, and refuses a job without the
    main container. (Without the webhook, the API server accepts such a job.)"""
    job = _job(config, train)
    invalid_job = json.loads(to_json(job).replace('"name": "pytorch"', '"name": "another"'))
    ok = False
    detail = "a job without its main container was admitted: the webhook does not validate jobs"

    try:
        cluster.create(JOBS, job, dry_run=True)
        try:
            cluster.create(JOBS, invalid_job, dry_run=True)
        except ApiError as error:
            ok = "webhook" in str(error)
            if ok:
                detail = "admits a valid job and refuses an invalid job"
            else:
                detail = str(error)
    except ApiError as error:
        detail = str(error)

    remedy = (
        "Restart the training operator (kubectl -n kubeflow rollout restart deployment"
        " training-operator)."
    )
    yield Check("webhook", ok, detail, remedy)


def check_job(cluster: Cluster, config: ClusterConfig, train: TrainConfig) -> Iterator[Check]:
    """Check that the job of the config would be created. JobSet may refuse the job if one of its
    feature gates is off."""
    job = _job(config, train)
    kind = BACKENDS[config.backend].kind

    try:
        cluster.create(Resource(job["apiVersion"], f"{job['kind'].lower()}s"), job, dry_run=True)
    except ApiError as error:
        remedy = f"Change the policy that refuses the job, or cluster.backend ({kind})."
        if config.restart_job:
            remedy = "Enable JobSet's feature gate RestartJob, or remove cluster.restart_job."

        yield Check("job", False, str(error), remedy)
    else:
        yield Check("job", True, f"{job['kind']} would be created")


def _job(config: ClusterConfig, train: TrainConfig) -> Object:
    """Return the job of the config or, for a TrainJob, its TrainingRuntime. Its workflow label gets
    another value, because no workflow creates this object."""
    backend = BACKENDS[config.backend]
    commands = member_commands(WORKLOAD, [])
    job = (backend.runtime or backend.job)(DOCTOR, train, config, commands)
    of_workflow = to_json(pods.WORKFLOW_LABEL)[1:-1]
    name = f'"{NAME_LABEL}": "{DOCTOR}"'
    return json.loads(to_json(job).replace(of_workflow, name))


def check_init_container(cluster: Cluster) -> Iterator[Check]:
    """Check that the operator hardens the init container that it adds. Without this, the
    PodSecurity standard `restricted` refuses the workers."""
    if _enforced_level(cluster) != "restricted":
        yield Check(
            "init container", True, "not needed: the namespace does not enforce `restricted`"
        )
        return

    template = ""
    for operator in cluster.list_objects(ALL_PODS, CONTROLLERS["training operator"][0]):
        namespace = operator["metadata"].get("namespace", "")
        own_namespace = cluster.in_namespace(namespace)
        for volume in (operator.get("spec") or {}).get("volumes") or []:
            name = (volume.get("configMap") or {}).get("name")
            if name:
                template += "".join(_read_data(own_namespace, CONFIG_MAPS, name).values())

    ok = "allowPrivilegeEscalation: false" in template
    detail = (
        f"the operator's template is {'hardened' if ok else 'not hardened: workers are refused'}"
    )
    remedy = (
        "rekindle platform render --operator | kubectl apply --server-side --field-manager=rekindle"
        " -f -"
    )
    yield Check("init container", ok, detail, remedy)


def _describe_denied(
    cluster: Cluster, rules: Iterable[tuple[str, str, str]], review: str, **subject: str
) -> str:
    """Return the permissions that are not granted, as text."""
    denied_verbs: dict[str, list[str]] = {}

    for group, resource, verb in rules:
        plural, _, subresource = resource.partition("/")
        attributes = {
            "namespace": cluster.namespace,
            "group": group,
            "resource": plural,
            "verb": verb,
        }

        spec = {
            **subject,
            "resourceAttributes": (
                attributes | ({"subresource": subresource} if subresource else {})
            ),
        }

        path = f"/apis/authorization.k8s.io/v1/{review}"
        answer = cluster.read("accessreviews", "POST", path, {"spec": spec})
        if not answer["status"].get("allowed"):
            denied_verbs.setdefault(f"{resource}.{group}" if group else resource, []).append(verb)

    return "; ".join(f"may not {', '.join(verbs)} {kind}" for kind, verbs in denied_verbs.items())


def _artifact_repository(cluster: Cluster) -> tuple[str, str]:
    """Return bucket and endpoint of the default artifact repository of the namespace."""
    config_map = cluster.find(CONFIG_MAPS, "artifact-repositories") or {}
    annotations = (config_map.get("metadata") or {}).get("annotations") or {}
    key = annotations.get(DEFAULT_ARTIFACT_REPOSITORY, "")
    try:
        text = (config_map.get("data") or {}).get(key, "")
        s3 = (parse_one(text, "its value") or {}).get("s3") or {}
    except (ConfigError, AttributeError) as error:
        raise RekindleError(f"ConfigMap artifact-repositories, key {key}: {error}") from error
    return str(s3.get("bucket", "")), str(s3.get("endpoint", "")).rpartition("@")[2]


def _read_data(cluster: Cluster, resource: Resource, name: str) -> dict[str, Any]:
    """Return the data of a ConfigMap or Secret, or {} if it does not exist."""
    return (cluster.find(resource, name) or {}).get("data") or {}


def _enforced_level(cluster: Cluster) -> str:
    return (cluster.get(NAMESPACES, cluster.namespace)["metadata"].get("labels") or {}).get(
        POD_SECURITY, ""
    )


def _first_container(pod: Object) -> Object:
    """Return the first container of a pod; {} if the pod has no containers."""
    containers = (pod.get("spec") or {}).get("containers") or [{}]
    return containers[0]


def _is_ready(pod: Object) -> bool:
    conditions = (pod.get("status") or {}).get("conditions") or []
    return any(
        condition["type"] == "Ready" and condition.get("status") == "True"
        for condition in conditions
    )


def _flag(args: list[str], flag: str) -> str:
    """Return the value of `--flag VALUE` or `--flag=VALUE`, or ""."""
    match = re.search(rf"(?:^|\n){flag}[=\n](.*)", "\n".join(args))
    if match:
        return match[1]
    return ""
