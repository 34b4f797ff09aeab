"""Tests of the rendered platform on a real cluster: every permission is needed, no step has a
token, and `rekindle platform check` finds mistakes."""

import copy
import json
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import yaml

from rekindle.blocks import pod_settings as pods
from rekindle.blocks.pod_settings import EXECUTOR_SECURITY
from rekindle.blocks.settings import PodConfig
from rekindle.cluster.platform import Platform, list_permissions, render_platform
from tests.cluster.kube import Kube, Object
from tests.cluster.run import Namespace, rekindle
from tests.waiting import until

# a finalizer, so that the deletion ends only when the test removes it
HOLD = "rekindle/hold"


def job(kind: str, replicas: str, role: str, container: str) -> Object:
    """Return a job of the training operator that starts no pods."""
    pod = {"spec": {"containers": [{"name": container, "image": "none"}]}}
    spec = {"runPolicy": {"suspend": True}, replicas: {role: {"replicas": 1, "template": pod}}}
    return {"apiVersion": "kubeflow.org/v1", "kind": kind, "spec": spec}


TEMPLATE = {
    "metadata": {"labels": {"a": "b"}},
    "spec": {"containers": [{"name": "a", "image": "none"}]},
}
DEPLOYMENT = {"replicas": 0, "selector": {"matchLabels": {"a": "b"}}, "template": TEMPLATE}
AUTOSCALER_SPEC = {
    "maxReplicas": 1,
    "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": "none"},
}
BUDGET = {"maxUnavailable": 1, "selector": {"matchLabels": {"a": "none"}}}
BATCH = {"suspend": True, "template": {"spec": {**TEMPLATE["spec"], "restartPolicy": "Never"}}}
OBJECTS: dict[str, Object] = {
    "pytorchjobs": job("PyTorchJob", "pytorchReplicaSpecs", "Master", "pytorch"),
    "deployments": {"apiVersion": "apps/v1", "kind": "Deployment", "spec": DEPLOYMENT},
    "services": {"apiVersion": "v1", "kind": "Service", "spec": {"ports": [{"port": 80}]}},
    "horizontalpodautoscalers": {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "spec": AUTOSCALER_SPEC,
    },
    "poddisruptionbudgets": {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "spec": BUDGET,
    },
    "tfjobs": job("TFJob", "tfReplicaSpecs", "Worker", "tensorflow"),
    "mpijobs": job("MPIJob", "mpiReplicaSpecs", "Launcher", "mpi"),
    "xgboostjobs": job("XGBoostJob", "xgbReplicaSpecs", "Master", "xgboost"),
    "paddlejobs": job("PaddleJob", "paddleReplicaSpecs", "Worker", "paddle"),
    "jaxjobs": job("JAXJob", "jaxReplicaSpecs", "Worker", "jax"),
    "jobs": {"apiVersion": "batch/v1", "kind": "Job", "spec": BATCH},
}
# this time is enough for `kubectl wait` if it may watch objects; otherwise kubectl polls, with
# growing pauses
WATCH_S = 3.0
ARGO = [rule for rule in list_permissions() if rule[0] == "argoproj.io"]
OTHER_RULES = [
    rule for rule in (*list_permissions(), *list_permissions("frameworks")) if rule not in ARGO
]


def make_role_and_binding(name: str, granted: list[tuple[str, str, str]]) -> list[Object]:
    """Return an account with the given permissions, and a token for Argo's executor."""
    role_rules = [
        {"apiGroups": [api_group], "resources": [kind], "verbs": [verb]}
        for api_group, kind, verb in granted
    ]
    account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": name}}

    token = {
        "apiVersion": "v1",
        "kind": "Secret",
        "type": "kubernetes.io/service-account-token",
        "metadata": {
            "name": f"{name}.service-account-token",
            "annotations": {"kubernetes.io/service-account.name": name},
        },
    }

    api = "rbac.authorization.k8s.io"
    binding = {
        "roleRef": {"apiGroup": api, "kind": "Role", "name": name},
        "subjects": [{"kind": "ServiceAccount", "name": name}],
    }
    meta = {"apiVersion": f"{api}/v1", "metadata": {"name": name}}

    return [
        account,
        token,
        {**meta, "kind": "Role", "rules": role_rules},
        {**meta, "kind": "RoleBinding", **binding},
    ]


def apply_and_delete(kube: Kube, account: str, resource: str, deletes: bool) -> str:
    """Apply and delete an object with kubectl as Argo's resource templates do, and return the first
    error, or ""."""
    name = f"{account}-{resource}"[:50]
    manifest = copy.deepcopy(OBJECTS[resource])
    manifest["metadata"] = {"name": name, "finalizers": [HOLD] if deletes else []}

    command = [
        "kubectl",
        "-n",
        kube.namespace,
        "--as",
        f"system:serviceaccount:{kube.namespace}:{account}",
    ]

    def run(*args: str) -> str:
        completed = subprocess.run(
            [*command, *args],
            input=json.dumps(manifest),
            capture_output=True,
            text=True,
            timeout=60,
        )
        if completed.returncode:
            return f"{args[0]}: {completed.stderr}"
        return ""

    try:
        failed = run("apply", "-f", "-")
        if failed:
            return failed

        manifest["metadata"]["labels"] = {"again": "yes"}
        failed = run("apply", "-f", "-")
        if failed or not deletes:
            return failed

        return delete_and_wait(
            kube, [*command, "delete", resource, name, "--cascade=foreground"], resource, name
        )
    finally:
        release(kube, resource, name)
        kube("delete", resource, name, "--ignore-not-found", "--wait=false")


def delete_and_wait(kube: Kube, command: list[str], resource: str, name: str) -> str:
    """Delete an object and check that kubectl waits for its finalizer, and return the first error,
    or ""."""
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    )

    until(
        "the deletion is requested",
        lambda: process.poll() is not None or _is_deleting(kube, resource, name),
        30,
    )

    try:
        process.wait(WATCH_S)
        return f"delete: it did not wait: {process.communicate()[1]}"
    except subprocess.TimeoutExpired:
        release(kube, resource, name)

    try:
        # without a watch, kubectl polls with growing pauses
        error = process.communicate(timeout=WATCH_S)[1]
        if error or process.returncode:
            return f"delete: {error}"
        return ""
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return "delete: it did not end"


def _is_deleting(kube: Kube, resource: str, name: str) -> bool:
    return "deletionTimestamp" in (kube.get(resource, name) or {}).get("metadata", {})


def release(kube: Kube, resource: str, name: str) -> None:
    kube(
        "patch",
        resource,
        name,
        "--type=merge",
        "-p",
        '{"metadata":{"finalizers":null}}',
        check=False,
    )


@pytest.mark.parametrize("resource", OBJECTS)
def test_applying_and_deleting_jobs_needs_every_permission_of_the_account(
    namespace: Namespace, resource: str
) -> None:
    used = [rule for rule in OTHER_RULES if rule[1] == resource]
    deletes = "delete" in [verb for _, _, verb in used]
    accounts = {"all-rights": OTHER_RULES}
    accounts.update(
        {f"without-{right[2]}": [rule for rule in OTHER_RULES if rule != right] for right in used}
    )
    namespace.kube.apply(
        *(
            manifest
            for name, granted in accounts.items()
            for manifest in make_role_and_binding(name, granted)
        )
    )

    with ThreadPoolExecutor(len(accounts)) as pool:
        errors = pool.map(
            lambda account: apply_and_delete(namespace.kube, account, resource, deletes), accounts
        )
        assert [account for account, error in zip(accounts, errors, strict=True) if not error] == [
            "all-rights"
        ]


def test_only_the_account_of_workflows_may_apply_jobs_of_missing_operators(
    namespace: Namespace,
) -> None:
    """The permissions for jobs of operators that are not installed have the same verbs as the
    permissions for the kinds above."""
    absent = [rule for rule in OTHER_RULES if rule[1] not in OBJECTS]
    assert {rule[1] for rule in absent} == {"trainjobs"}
    settings = Platform(
        namespace.kube.namespace, mlflow="http://mlflow", components=("frameworks",)
    )

    namespace.kube.apply(
        *(
            manifest
            for manifest in render_platform(settings)
            if manifest["metadata"]["name"] == "rekindle-frameworks"
        )
    )

    for account, may in (("rekindle", "true"), ("default", "false")):
        user = f"system:serviceaccount:{namespace.kube.namespace}:{account}"
        reviews = [
            {
                "apiVersion": "authorization.k8s.io/v1",
                "kind": "SubjectAccessReview",
                "spec": {
                    "user": user,
                    "resourceAttributes": {
                        "namespace": namespace.kube.namespace,
                        **dict(zip(("group", "resource", "verb"), right, strict=True)),
                    },
                },
            }
            for right in absent
        ]

        flags = ["create", "-f", "-", "-o", "jsonpath={.status.allowed} "]
        assert namespace.kube(*flags, stdin=yaml.safe_dump_all(reviews)).split() == [may] * len(
            absent
        )


def workflow(namespace: Namespace, account: str) -> Object:
    """Return a workflow with a step with an artifact, and a resource template, as in the
    pipeline."""
    step = {
        "name": "step",
        "outputs": {
            "artifacts": [
                {
                    "name": "a",
                    "path": "/tmp/outputs/a",
                    "s3": {"key": "{{workflow.name}}/a"},
                    "archive": {"none": {}},
                }
            ],
            "parameters": [
                {"name": "p", "valueFrom": {"path": "/tmp/outputs/p"}, "globalName": "p"}
            ],
        },
        "container": {
            "image": namespace.image,
            "command": ["python", "-c"],
            "args": [
                "import pathlib; d = pathlib.Path('/tmp/outputs'); d.mkdir(exist_ok=True)\n(d /"
                " 'a').write_text('x'); t ="
                " pathlib.Path('/var/run/secrets/kubernetes.io/serviceaccount/token')\n(d /"
                " 'p').write_text(f'token: {t.exists()}')"
            ],
            "resources": {"requests": {"cpu": "50m", "memory": "64Mi"}},
            "securityContext": pods.CONTAINER_SECURITY,
            "volumeMounts": pods.TMP_MOUNTS,
        },
        "volumes": pods.tmp_volumes(PodConfig.model_validate({})),
        "podSpecPatch": json.dumps(EXECUTOR_SECURITY),
    }

    manifest = OBJECTS["services"] | {"metadata": {"name": "{{workflow.name}}"}}
    resource = {
        "name": "resource",
        "resource": {"action": "apply", "manifest": json.dumps(manifest, indent=1)},
    }
    tasks = [{"name": "step", "template": "step"}, {"name": "resource", "template": "resource"}]

    spec = {
        "entrypoint": "main",
        "serviceAccountName": account,
        "automountServiceAccountToken": False,
        "executor": {"serviceAccountName": account},
        "securityContext": pods.POD_SECURITY,
        "activeDeadlineSeconds": 60,
        "templates": [{"name": "main", "dag": {"tasks": tasks}}, step, resource],
    }

    api = "argoproj.io/v1alpha1"

    return {
        "apiVersion": api,
        "kind": "Workflow",
        "metadata": {"generateName": "platform-"},
        "spec": spec,
    }


def submit(namespace: Namespace, account: str) -> Callable[[], Object]:
    """Submit a workflow, and return a function that reads the workflow."""
    name = namespace.kube(
        "create",
        "-f",
        "-",
        "-o",
        "jsonpath={.metadata.name}",
        stdin=json.dumps(workflow(namespace, account)),
    )
    return lambda: namespace.kube.get("workflow", name) or {}


def phase(workflow: Object) -> str:
    return workflow.get("status", {}).get("phase", "")


def test_steps_run_without_a_token_in_a_restricted_namespace(namespace: Namespace) -> None:
    labels = (namespace.kube.get("namespace", namespace.kube.namespace) or {})["metadata"]["labels"]
    assert labels["pod-security.kubernetes.io/enforce"] == "restricted"
    look = submit(namespace, "rekindle")

    until(
        "the workflow has ended",
        lambda: phase(look()) not in ("", "Pending", "Running"),
        120,
        pause=1,
    )

    ended_pod = look()
    assert phase(ended_pod) == "Succeeded", ended_pod["status"]
    assert ended_pod["status"]["outputs"]["parameters"] == [{"name": "p", "value": "token: False"}]
    assert namespace.store.get(f"{ended_pod['metadata']['name']}/a") == b"x"

    selector = f"workflows.argoproj.io/workflow={ended_pod['metadata']['name']}"
    for pod in namespace.kube.items("pods", selector):
        for container in pod["spec"]["containers"]:
            mounts = [mount["mountPath"] for mount in container.get("volumeMounts", [])]
            has_token = any(mount.startswith("/var/run/secrets") for mount in mounts)
            assert has_token == (container["name"] == "wait" or "argoexec" in container["image"]), (
                container["name"]
            )


def test_reporting_to_argo_needs_every_permission_of_the_account(namespace: Namespace) -> None:
    """Argo waits for a missing report, or fails; a workflow with all permissions succeeds in the
    same time."""
    looks = {"rekindle": submit(namespace, "rekindle")}
    for right in ARGO:
        account = f"mute-{right[2]}"
        namespace.kube.apply(
            *make_role_and_binding(account, [rule for rule in list_permissions() if rule != right])
        )
        looks[account] = submit(namespace, account)

    until(
        "the first workflow has succeeded",
        lambda: phase(looks["rekindle"]()) == "Succeeded",
        120,
        pause=1,
    )

    get_second_name = submit(namespace, "rekindle")

    until(
        "a workflow that started later has succeeded",
        lambda: phase(get_second_name()) == "Succeeded",
        120,
        pause=1,
    )

    assert [account for account, look in looks.items() if phase(look()) == "Succeeded"] == [
        "rekindle"
    ]


def run_checks(namespace: Namespace, *sets: str) -> dict[str, Any]:
    """Run `rekindle platform check`, and return the results of the checks by name. The pod of the
    command must be deleted at the end."""
    from tests.commands import BIN

    config = ["configs/demo.yaml", *namespace.sets(sets)]

    command = [
        str(BIN / "rekindle"),
        "platform",
        "check",
        *config,
        "-n",
        namespace.kube.namespace,
        "-o",
        "json",
    ]

    completed = subprocess.run(command, capture_output=True, text=True, timeout=600)
    checks = {check["name"]: check for check in json.loads(completed.stdout)}
    assert completed.returncode == any(
        check["required"] and not check["ok"] for check in checks.values()
    )

    assert not [
        pod
        for pod in namespace.kube.items("pods")
        if pod["metadata"]["name"].startswith("rekindle-doctor")
    ]

    return checks


def test_all_checks_pass_in_a_healthy_namespace(namespace: Namespace) -> None:
    checks = run_checks(namespace)
    failures = {name: check["found"] for name, check in checks.items() if not check["ok"]}
    # the patch of the training operator's template may be missing
    assert failures.keys() <= {"init container"}, failures
    assert "1 of 8 concurrent creates succeeded" in checks["object store from a pod"]["found"]
    assert checks["MLflow from a pod"]["ok"]
    assert checks[f"image {namespace.image}"]["ok"]


@pytest.fixture
def broken(namespace: Namespace) -> Iterator[None]:
    """A namespace with a wrong ConfigMap and an incomplete Role."""
    originals = [
        namespace.kube.get(*target) or {}
        for target in (("configmap", "rekindle"), ("role", "rekindle"))
    ]
    for resource in originals:
        for field in ("resourceVersion", "uid", "managedFields", "creationTimestamp"):
            resource["metadata"].pop(field, None)

    addresses, rights = copy.deepcopy(originals)
    addresses["data"]["S3_BUCKET"] = "nosuch-bucket"
    addresses["data"]["MLFLOW_TRACKING_URI"] = "http://127.0.0.1:9"
    rights["rules"] = [rule for rule in rights["rules"] if "pytorchjobs" not in rule["resources"]]
    namespace.kube.apply(addresses, rights)
    yield
    namespace.kube.apply(*originals)


@pytest.mark.usefixtures("broken")
def test_checks_find_all_faults_and_give_remedies(namespace: Namespace) -> None:
    sets = [
        "cluster.pods.serve={priority_class: nosuch-priority, image: registry.invalid/nosuch:1}"
    ]
    checks = run_checks(namespace, *sets)

    expected = {
        "artifact repository": "nosuch-bucket",
        "account": "may not get, list, watch, create, patch, delete pytorchjobs.kubeflow.org",
        "pod of serve": "nosuch-priority",
        "image registry.invalid/nosuch:1": "registry.invalid",
    }
    for name, text in expected.items():
        assert not checks[name]["ok"], checks[name]
        assert text in checks[name]["found"], checks[name]
        assert checks[name]["remedy"], checks[name]

    for name, text in {
        "object store from a pod": "nosuch-bucket",
        "MLflow from a pod": "127.0.0.1:9",
    }.items():
        assert not checks[name]["ok"], checks[name]
        assert text in checks[name]["found"], checks[name]
        assert checks[name]["remedy"], checks[name]


def test_the_api_server_accepts_the_rendered_platform(namespace: Namespace) -> None:
    """All options of the platform, and the patch of the operator, are applied as a dry run."""
    platform_flags = [
        "--with",
        "mlflow",
        "--with",
        "minio",
        "--with",
        "frameworks",
        "--quota",
        "64",
        "256Gi",
    ]

    flags = [
        "apply",
        "--server-side",
        "--field-manager=rekindle",
        "--dry-run=server",
        "--validate=strict",
        "-f",
        "-",
    ]

    name = f"{namespace.kube.namespace}-dry"
    namespace.kube("create", "namespace", name)

    try:
        Kube(name)(
            *flags,
            "--force-conflicts",
            stdin=rekindle("platform", "render", "-n", name, *platform_flags),
        )
    finally:
        namespace.kube("delete", "namespace", name, "--wait=false")

    operator = yaml.safe_load_all(rekindle("platform", "render", "--operator", "-n", "kubeflow"))
    Kube("kubeflow")(*flags, stdin=yaml.safe_dump_all(operator))
