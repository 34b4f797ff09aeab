"""Check that the cluster defines the kinds of objects that workflows create, and that Argo and the
operators handle these kinds."""

import json
import re
from collections.abc import Iterator, Sequence

from argolocal.common.json_text import to_json
from argolocal.manifest.allowed_values import API_VERSION
from argolocal.manifest.training_jobs import JOB_API_VERSION
from argolocal.manifest.types import Object
from rekindle.blocks import pod_settings as pods
from rekindle.blocks.jobs.backends import BACKENDS
from rekindle.blocks.jobs.members import member_commands
from rekindle.blocks.jobs.train_job import TRAINER_VERSION
from rekindle.blocks.presets import read_presets
from rekindle.blocks.settings import ClusterConfig
from rekindle.cluster.cluster_nodes import ALL_PODS
from rekindle.cluster.errors import ApiError
from rekindle.cluster.kubernetes_api import Cluster, Resource
from rekindle.cluster.kueue.admission import check_admission
from rekindle.cluster.kueue.queued_jobs import QueuedJob
from rekindle.doctor.namespace_objects import CONFIG_MAPS, read_data, read_enforced_level
from rekindle.errors import Check
from rekindle.kubernetes_names import DOCTOR_NAME, NAME_LABEL, WORKLOAD_MODULES
from rekindle.training.spec import TrainConfig

PYTORCH_JOBS = Resource(JOB_API_VERSION, "pytorchjobs")
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
# the oldest supported versions of Argo and the operators, as in docs/cluster.md
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


def check_kinds(cluster: Cluster, backend_name: str) -> Iterator[Check]:
    """Check that the cluster defines, in the right versions, the kinds of objects that workflows
    create."""
    for api_version, required_kinds in (ARGO_KINDS | BACKEND_KINDS[backend_name]).items():
        defined_kinds = _list_defined_kinds(cluster, api_version)
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


def _list_defined_kinds(cluster: Cluster, api_version: str) -> set[str]:
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
    """Check that the controllers of Argo and the operators run, watch this namespace, and are new
    enough."""
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

        controller_container = _find_first_container(controller_pod)
        own_namespace = controller_pod["metadata"].get("namespace", "")
        image_name = controller_container.get("image", "")
        container_arguments = [
            *(controller_container.get("command") or []),
            *(controller_container.get("args") or []),
        ]
        watched_namespace = _read_flag(container_arguments, "--managed-namespace") or _read_flag(
            container_arguments, "--namespace"
        )
        if not watched_namespace and "--namespaced" in container_arguments:
            watched_namespace = own_namespace

        version_match = re.search(r":v?(\d{1,9})\.(\d{1,9})", image_name)
        is_supported = (
            not version_match or (int(version_match[1]), int(version_match[2])) >= min_version
        )
        watches_namespace = watched_namespace in ("", cluster.namespace)
        detail = f"{image_name.rpartition('/')[2]} in {own_namespace}"
        if not watches_namespace:
            detail += f", which sees only namespace {watched_namespace}"

        if is_supported:
            remedy = f"Let the controller watch {cluster.namespace}."
        else:
            remedy = f"{remedy}."

        yield Check(name, is_supported and watches_namespace, detail, remedy)


def check_gang(
    cluster: Cluster, cluster_config: ClusterConfig, queued_jobs: Sequence[QueuedJob]
) -> Iterator[Check]:
    """If `cluster.gang` is set, check that Kueue or the training operator starts all pods of a job
    together. `queued_jobs`: the jobs and pods of the config that wait in a queue of Kueue."""
    if cluster_config.gang == "kueue":
        yield from _check_kueue(cluster, cluster_config.queue, queued_jobs)
    elif cluster_config.gang:
        yield from _check_operator_scheduler(cluster, cluster_config.gang)


def _check_kueue(
    cluster: Cluster, queue_name: str, queued_jobs: Sequence[QueuedJob]
) -> Iterator[Check]:
    """Check that Kueue can admit the jobs. A reason that only delays a job is a warning."""
    findings = check_admission(cluster, queued_jobs)
    if not any(finding.is_fatal for finding in findings):
        yield Check(f"queue {queue_name}", True, f"{len(queued_jobs)} kinds of pods may wait in it")
    for finding in findings:
        yield Check(
            f"queue {queue_name}",
            False,
            finding.problem,
            finding.remedy or "No change is needed.",
            finding.is_fatal,
        )


def _check_operator_scheduler(cluster: Cluster, scheduler_name: str) -> Iterator[Check]:
    """Check that the training operator was started with the flag for the gang scheduler."""
    scheduler_flag = "--gang-scheduler-name"
    expected_name = read_presets()["gang"][scheduler_name]["pods"]["schedulerName"]
    for operator_pod in cluster.list_objects(ALL_PODS, CONTROLLERS["training operator"][0]):
        operator_container = _find_first_container(operator_pod)
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


def check_webhook(
    cluster: Cluster, cluster_config: ClusterConfig, train_config: TrainConfig
) -> Iterator[Check]:
    """Check that the operator's webhook admits the job of the config, and refuses a job without the
    main container. (Without the webhook, the API server accepts a job without the main
    container.)"""
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
    """Return the job of the config or, for a TrainJob, its TrainingRuntime. The label of the
    workflow is replaced by the label of the doctor, because no workflow creates this object."""
    backend = BACKENDS[cluster_config.backend]
    commands = member_commands(WORKLOAD_MODULES, [])
    job_object = (backend.runtime or backend.job)(
        DOCTOR_NAME, train_config, cluster_config, commands
    )
    workflow_label_json = to_json(pods.WORKFLOW_LABEL)[1:-1]
    name = f'"{NAME_LABEL}": "{DOCTOR_NAME}"'
    return json.loads(to_json(job_object).replace(workflow_label_json, name))


def check_init_container(cluster: Cluster) -> Iterator[Check]:
    """Check that the operator hardens the init container that it adds. If the init container is not
    hardened, the PodSecurity standard `restricted` refuses the workers."""
    if read_enforced_level(cluster) != "restricted":
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
                    read_data(operator_cluster, CONFIG_MAPS, name).values()
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


def _find_first_container(pod_object: Object) -> Object:
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
    """Return the value of `--flag VALUE` or `--flag=VALUE`; "" if the flag is missing."""
    flag_match = re.search(rf"(?:^|\n){flag_name}[=\n](.*)", "\n".join(container_arguments))
    if flag_match:
        return flag_match[1]
    return ""
