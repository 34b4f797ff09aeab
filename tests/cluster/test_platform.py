"""The platform on a real cluster: each right is used, no step holds a token, and the doctor finds what is broken."""

import copy
import json
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import yaml

from rekindle.blocks import pod as pods
from rekindle.blocks.pod import EXECUTOR_SECURITY
from rekindle.blocks.settings import PodConfig
from rekindle.cluster.platform import Platform, render, rules
from tests.cluster.kube import Kube, Object
from tests.cluster.run import Place, rekindle
from tests.waiting import until

HOLD = "rekindle/hold"  # a finalizer: a deletion takes until it is gone


def job(kind: str, replicas: str, role: str, container: str) -> Object:
    """A job of the training operator that starts nothing."""
    pod = {"spec": {"containers": [{"name": container, "image": "none"}]}}
    spec = {"runPolicy": {"suspend": True}, replicas: {role: {"replicas": 1, "template": pod}}}
    return {"apiVersion": "kubeflow.org/v1", "kind": kind, "spec": spec}


TEMPLATE = {"metadata": {"labels": {"a": "b"}}, "spec": {"containers": [{"name": "a", "image": "none"}]}}
DEPLOYMENT = {"replicas": 0, "selector": {"matchLabels": {"a": "b"}}, "template": TEMPLATE}
SCALED = {"maxReplicas": 1, "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": "none"}}
BUDGET = {"maxUnavailable": 1, "selector": {"matchLabels": {"a": "none"}}}
BATCH = {"suspend": True, "template": {"spec": {**TEMPLATE["spec"], "restartPolicy": "Never"}}}
OBJECTS: dict[str, Object] = {
    "pytorchjobs": job("PyTorchJob", "pytorchReplicaSpecs", "Master", "pytorch"),
    "deployments": {"apiVersion": "apps/v1", "kind": "Deployment", "spec": DEPLOYMENT},
    "services": {"apiVersion": "v1", "kind": "Service", "spec": {"ports": [{"port": 80}]}},
    "horizontalpodautoscalers": {"apiVersion": "autoscaling/v2", "kind": "HorizontalPodAutoscaler", "spec": SCALED},
    "poddisruptionbudgets": {"apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "spec": BUDGET},
    "tfjobs": job("TFJob", "tfReplicaSpecs", "Worker", "tensorflow"),
    "mpijobs": job("MPIJob", "mpiReplicaSpecs", "Launcher", "mpi"),
    "xgboostjobs": job("XGBoostJob", "xgbReplicaSpecs", "Master", "xgboost"),
    "paddlejobs": job("PaddleJob", "paddleReplicaSpecs", "Worker", "paddle"),
    "jaxjobs": job("JAXJob", "jaxReplicaSpecs", "Worker", "jax"),
    "jobs": {"apiVersion": "batch/v1", "kind": "Job", "spec": BATCH},
}
WAITS = 3.0  # seconds in which who may watch has seen it; who may not has asked twice and then rests longer
ARGO = [rule for rule in rules() if rule[0] == "argoproj.io"]
APPLIED = [rule for rule in (*rules(), *rules("frameworks")) if rule not in ARGO]


def grant(name: str, left: list[tuple[str, str, str]]) -> list[Object]:
    """An account with these rights, and a token for Argo's container."""
    granted = [{"apiGroups": [group], "resources": [what], "verbs": [verb]} for group, what, verb in left]
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
    return [account, token, {**meta, "kind": "Role", "rules": granted}, {**meta, "kind": "RoleBinding", **binding}]


def applies_and_deletes(kube: Kube, account: str, resource: str, deletes: bool) -> str:
    """As Argo's resource templates do it, with kubectl; what failed, or ""."""
    name = f"{account}-{resource}"[:50]
    manifest = copy.deepcopy(OBJECTS[resource])
    manifest["metadata"] = {"name": name, "finalizers": [HOLD] if deletes else []}
    command = ["kubectl", "-n", kube.namespace, "--as", f"system:serviceaccount:{kube.namespace}:{account}"]

    def run(*args: str) -> str:
        done = subprocess.run([*command, *args], input=json.dumps(manifest), capture_output=True, text=True, timeout=60)
        return f"{args[0]}: {done.stderr}" if done.returncode else ""

    try:
        if failed := run("apply", "-f", "-"):
            return failed
        manifest["metadata"]["labels"] = {"again": "yes"}
        if (failed := run("apply", "-f", "-")) or not deletes:
            return failed
        return deletes_and_waits(kube, [*command, "delete", resource, name, "--cascade=foreground"], resource, name)
    finally:
        release(kube, resource, name)
        kube("delete", resource, name, "--ignore-not-found", "--wait=false")


def deletes_and_waits(kube: Kube, command: list[str], resource: str, name: str) -> str:
    """The object has a finalizer: who waits for its end, waits for that."""
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    until("its end is asked for", lambda: process.poll() is not None or _ends(kube, resource, name), 30)
    try:
        process.wait(WAITS)
        return f"delete: it did not wait: {process.communicate()[1]}"
    except subprocess.TimeoutExpired:
        release(kube, resource, name)
    try:
        said = process.communicate(timeout=WAITS)[1]  # what may not be watched is asked for again, ever less often
        return f"delete: {said}" if said or process.returncode else ""
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return "delete: it did not end"


def _ends(kube: Kube, resource: str, name: str) -> bool:
    return "deletionTimestamp" in (kube.get(resource, name) or {}).get("metadata", {})


def release(kube: Kube, resource: str, name: str) -> None:
    kube("patch", resource, name, "--type=merge", "-p", '{"metadata":{"finalizers":null}}', check=False)


@pytest.mark.parametrize("resource", OBJECTS)
def test_without_any_one_of_its_rights_a_workflow_could_not_apply_or_delete(place: Place, resource: str) -> None:
    own = [rule for rule in APPLIED if rule[1] == resource]
    deletes = "delete" in [verb for _, _, verb in own]
    accounts = {"all-rights": APPLIED}
    accounts |= {f"without-{right[2]}": [rule for rule in APPLIED if rule != right] for right in own}
    place.kube.apply(*(manifest for name, left in accounts.items() for manifest in grant(name, left)))
    with ThreadPoolExecutor(len(accounts)) as pool:
        failed = pool.map(lambda account: applies_and_deletes(place.kube, account, resource, deletes), accounts)
        assert [account for account, why in zip(accounts, failed, strict=True) if not why] == ["all-rights"]


def test_kinds_whose_operators_may_not_be_here_are_for_the_account_of_workflows_alone(place: Place) -> None:
    """Their rights are those of the kinds above, which are tried: applied by the same commands."""
    absent = [rule for rule in APPLIED if rule[1] not in OBJECTS]
    assert {rule[1] for rule in absent} == {"trainjobs"}
    asked = Platform(place.kube.namespace, mlflow="http://mlflow", options=("frameworks",))
    place.kube.apply(*(manifest for manifest in render(asked) if manifest["metadata"]["name"] == "rekindle-frameworks"))
    for account, may in (("rekindle", "true"), ("default", "false")):
        user = f"system:serviceaccount:{place.kube.namespace}:{account}"
        reviews = [
            {
                "apiVersion": "authorization.k8s.io/v1",
                "kind": "SubjectAccessReview",
                "spec": {
                    "user": user,
                    "resourceAttributes": {
                        "namespace": place.kube.namespace,
                        **dict(zip(("group", "resource", "verb"), right, strict=True)),
                    },
                },
            }
            for right in absent
        ]
        flags = ["create", "-f", "-", "-o", "jsonpath={.status.allowed} "]
        assert place.kube(*flags, stdin=yaml.safe_dump_all(reviews)).split() == [may] * len(absent)


def workflow(place: Place, account: str) -> Object:
    """A step with an artifact, and a resource template, as the pipeline has them."""
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
            "parameters": [{"name": "p", "valueFrom": {"path": "/tmp/outputs/p"}, "globalName": "p"}],
        },
        "container": {
            "image": place.image,
            "command": ["python", "-c"],
            "args": [
                "import pathlib; d = pathlib.Path('/tmp/outputs'); d.mkdir(exist_ok=True)\n"
                "(d / 'a').write_text('x'); t = pathlib.Path('/var/run/secrets/kubernetes.io/serviceaccount/token')\n"
                "(d / 'p').write_text(f'token: {t.exists()}')"
            ],
            "resources": {"requests": {"cpu": "50m", "memory": "64Mi"}},
            "securityContext": pods.CONTAINER_SECURITY,
            "volumeMounts": pods.MOUNTS,
        },
        "volumes": pods.volumes(PodConfig.model_validate({})),
        "podSpecPatch": json.dumps(EXECUTOR_SECURITY),
    }
    manifest = OBJECTS["services"] | {"metadata": {"name": "{{workflow.name}}"}}
    applied = {"name": "resource", "resource": {"action": "apply", "manifest": json.dumps(manifest, indent=1)}}
    tasks = [{"name": "step", "template": "step"}, {"name": "resource", "template": "resource"}]
    spec = {
        "entrypoint": "main",
        "serviceAccountName": account,
        "automountServiceAccountToken": False,
        "executor": {"serviceAccountName": account},
        "securityContext": pods.POD_SECURITY,
        "activeDeadlineSeconds": 60,
        "templates": [{"name": "main", "dag": {"tasks": tasks}}, step, applied],
    }
    api = "argoproj.io/v1alpha1"
    return {"apiVersion": api, "kind": "Workflow", "metadata": {"generateName": "platform-"}, "spec": spec}


def submitted(place: Place, account: str) -> Callable[[], Object]:
    """A function that looks at the workflow."""
    name = place.kube(
        "create", "-f", "-", "-o", "jsonpath={.metadata.name}", stdin=json.dumps(workflow(place, account))
    )
    return lambda: place.kube.get("workflow", name) or {}


def phase(workflow: Object) -> str:
    return workflow.get("status", {}).get("phase", "")


def test_steps_and_resources_run_under_restricted_and_no_step_sees_a_token(place: Place) -> None:
    labels = (place.kube.get("namespace", place.kube.namespace) or {})["metadata"]["labels"]
    assert labels["pod-security.kubernetes.io/enforce"] == "restricted"
    look = submitted(place, "rekindle")
    until("the workflow has ended", lambda: phase(look()) not in ("", "Pending", "Running"), 120, pause=1)
    ended = look()
    assert phase(ended) == "Succeeded", ended["status"]
    assert ended["status"]["outputs"]["parameters"] == [{"name": "p", "value": "token: False"}]
    assert place.store.get(f"{ended['metadata']['name']}/a") == b"x"
    selector = f"workflows.argoproj.io/workflow={ended['metadata']['name']}"
    for pod in place.kube.items("pods", selector):
        for container in pod["spec"]["containers"]:
            mounts = [mount["mountPath"] for mount in container.get("volumeMounts", [])]
            holds = any(mount.startswith("/var/run/secrets") for mount in mounts)
            assert holds == (container["name"] == "wait" or "argoexec" in container["image"]), container["name"]


def test_without_any_one_of_its_rights_a_workflow_could_not_report(place: Place) -> None:
    """Argo waits for a report, or fails for the lack of it; one that has all its rights is through meanwhile."""
    looks = {"rekindle": submitted(place, "rekindle")}
    for right in ARGO:
        account = f"mute-{right[2]}"
        place.kube.apply(*grant(account, [rule for rule in rules() if rule != right]))
        looks[account] = submitted(place, account)
    until("a sound workflow has succeeded", lambda: phase(looks["rekindle"]()) == "Succeeded", 120, pause=1)
    second = submitted(place, "rekindle")
    until("another one has succeeded, which began later", lambda: phase(second()) == "Succeeded", 120, pause=1)
    assert [account for account, look in looks.items() if phase(look()) == "Succeeded"] == ["rekindle"]


def examined(place: Place, *sets: str) -> dict[str, Any]:
    """What the doctor found, by name; the pod that it looks from is gone."""
    from tests.commands import BIN

    config = ["configs/demo.yaml", *place.sets(sets)]
    command = [str(BIN / "rekindle"), "platform", "check", *config, "-n", place.kube.namespace, "-o", "json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    checks = {check["name"]: check for check in json.loads(done.stdout)}
    assert done.returncode == any(check["required"] and not check["ok"] for check in checks.values())
    assert not [pod for pod in place.kube.items("pods") if pod["metadata"]["name"].startswith("rekindle-doctor")]
    return checks


def test_the_doctor_finds_nothing_wrong_with_a_sound_namespace(place: Place) -> None:
    checks = examined(place)
    wrong = {name: check["found"] for name, check in checks.items() if not check["ok"]}
    assert wrong.keys() <= {"init container"}, wrong  # the operator is the cluster's, and may lack its template
    assert "1 of 8 concurrent creates succeeded" in checks["object store from a pod"]["found"]
    assert checks["MLflow from a pod"]["ok"] and checks[f"image {place.image}"]["ok"]


@pytest.fixture
def broken(place: Place) -> Iterator[None]:
    """ConfigMap and Role as somebody may have left them."""
    kept = [place.kube.get(*target) or {} for target in (("configmap", "rekindle"), ("role", "rekindle"))]
    for resource in kept:
        for field in ("resourceVersion", "uid", "managedFields", "creationTimestamp"):
            resource["metadata"].pop(field, None)
    addresses, rights = copy.deepcopy(kept)
    addresses["data"] |= {"S3_BUCKET": "nosuch-bucket", "MLFLOW_TRACKING_URI": "http://127.0.0.1:9"}
    rights["rules"] = [rule for rule in rights["rules"] if "pytorchjobs" not in rule["resources"]]
    place.kube.apply(addresses, rights)
    yield
    place.kube.apply(*kept)


@pytest.mark.usefixtures("broken")
def test_the_doctor_finds_all_that_is_broken_and_says_what_to_do(place: Place) -> None:
    sets = ["cluster.pods.serve={priority_class: nosuch-priority, image: registry.invalid/nosuch:1}"]
    checks = examined(place, *sets)
    expected = {
        "artifact repository": "nosuch-bucket",
        "account": "may not get, list, watch, create, patch, delete pytorchjobs.kubeflow.org",
        "pod of serve": "nosuch-priority",
        "image registry.invalid/nosuch:1": "registry.invalid",
    }
    for name, text in expected.items():
        assert not checks[name]["ok"] and text in checks[name]["found"] and checks[name]["remedy"], checks[name]
    for name, text in {"object store from a pod": "nosuch-bucket", "MLflow from a pod": "127.0.0.1:9"}.items():
        assert not checks[name]["ok"] and text in checks[name]["found"] and checks[name]["remedy"], checks[name]


def test_what_the_platform_renders_the_api_server_takes(place: Place) -> None:
    """All of it, the operator's part too: as a dry run."""
    everything = ["--with", "mlflow", "--with", "minio", "--with", "frameworks", "--quota", "64", "256Gi"]
    flags = ["apply", "--server-side", "--field-manager=rekindle", "--dry-run=server", "--validate=strict", "-f", "-"]
    name = f"{place.kube.namespace}-dry"
    place.kube("create", "namespace", name)
    try:
        Kube(name)(*flags, "--force-conflicts", stdin=rekindle("platform", "render", "-n", name, *everything))
    finally:
        place.kube("delete", "namespace", name, "--wait=false")
    operator = yaml.safe_load_all(rekindle("platform", "render", "--operator", "-n", "kubeflow"))
    Kube("kubeflow")(*flags, stdin=yaml.safe_dump_all(operator))
