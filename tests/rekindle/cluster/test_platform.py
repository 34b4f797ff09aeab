"""What a namespace is given: enough for the pipeline, nothing more, and no secret."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from rekindle.blocks.manifest.config import load_config
from rekindle.blocks.manifest.render import render_manifest
from rekindle.cli import commands
from rekindle.cluster import platform
from rekindle.cluster.platform import Platform
from rekindle.errors import ConfigError
from tests.kinds import kinds
from tests.rekindle.cluster.pod_security import pods, violations

GOLDEN = Path(__file__).parents[2] / "golden"
FULL = Platform("models", options=("mlflow", "minio", "frameworks", "prometheus"), quota=("64", "256Gi"))


@pytest.fixture(scope="module")
def workflow() -> dict[str, Any]:
    return render_manifest(load_config(GOLDEN / "config.yaml", environment={}).config)


@pytest.fixture(scope="module")
def objects() -> dict[tuple[str, str], dict[str, Any]]:
    return {(manifest["kind"], manifest["metadata"]["name"]): manifest for manifest in platform.render(FULL)}


def applied(workflow: dict[str, Any]) -> list[tuple[dict[str, Any], list[str]]]:
    """Each object, and the flags."""
    found = [t["resource"] for t in workflow["spec"]["templates"] if t.get("resource", {}).get("action") == "apply"]
    return [(json.loads(re.sub(r"\{\{.*?\}\}", "1", r["manifest"])), r.get("flags", [])) for r in found]


def deleted(workflow: dict[str, Any]) -> set[str]:
    """The kinds given to the template `delete`."""
    cleaner = next(t["name"] for t in workflow["spec"]["templates"] if t.get("resource", {}).get("action") == "delete")
    tasks = [task for t in workflow["spec"]["templates"] for task in t.get("dag", {}).get("tasks", [])]
    given = [task["arguments"]["parameters"] for task in tasks if task["template"] == cleaner]
    return {kind for parameters in given for p in parameters if p["name"] == "kind" for kind in p["value"].split(",")}


def test_the_account_may_do_what_the_pipeline_does_and_nothing_else(workflow: dict[str, Any]) -> None:
    """Argo applies with get, create and patch, on the server's side without get; it deletes with delete, and waits for
    the end with get, list, watch."""
    needed = {("argoproj.io", "workflowtaskresults", verb) for verb in ("create", "patch")}
    going = deleted(workflow)
    sets = ["serve.canary.gateway=edge"]
    canary = render_manifest(load_config(GOLDEN / "config.yaml", sets=sets, environment={}).config)
    for manifest, flags in [*applied(workflow), *applied(canary)]:
        group = manifest["apiVersion"].rpartition("/")[0]
        resource = manifest["kind"].lower() + "s"
        verbs = {"create", "patch"} | (set() if "--server-side" in flags else {"get"})
        verbs |= {"list", "watch", "delete"} if manifest["kind"].lower() in going else set()
        needed |= {(group, resource, verb) for verb in verbs}
    assert set(platform.rules()) == needed


def test_the_account_may_apply_and_remove_every_kind_that_a_workflow_waits_for_and_nothing_else() -> None:
    """Of the blocks, where it is asked for; the cluster's tests take each right away in turn."""
    waited = [(kind.manifest["apiVersion"], kind.manifest["kind"]) for kind in kinds().values() if kind.success]
    verbs = ("get", "list", "watch", "create", "patch", "delete")
    needed = {(api.rpartition("/")[0], f"{kind.lower()}s", verb) for api, kind in waited for verb in verbs}
    backends = (("jobset.x-k8s.io", "jobsets"), ("trainer.kubeflow.org", "trainjobs"))
    needed |= {(*resource, verb) for resource in backends for verb in verbs}
    needed |= {("trainer.kubeflow.org", "trainingruntimes", verb) for verb in ("get", "create", "patch")}
    assert set(platform.rules("frameworks")) == needed - set(platform.rules())


def test_pods_are_let_in_where_the_pipeline_connects_and_nowhere_else(
    objects: dict[Any, Any], workflow: dict[str, Any]
) -> None:
    ours = {manifest["kind"]: manifest for manifest, _ in applied(workflow)}
    labels = {
        "step": {"workflows.argoproj.io/workflow": "w"},
        "scoring": ours["Deployment"]["spec"]["template"]["metadata"]["labels"],
        "stranger": {"app": "x"},
        "client": {"rekindle/client": "true"},
        "other job": {"job-name": "x"},
    }
    for name in ("mlflow", "minio"):
        labels[name] = objects["Deployment", name]["spec"]["template"]["metadata"]["labels"]
    labels["bucket"] = objects["Job", "minio-bucket"]["spec"]["template"]["metadata"]["labels"]
    for name, replica in ours["PyTorchJob"]["spec"]["pytorchReplicaSpecs"].items():
        labels[name] = replica["template"]["metadata"]["labels"] | {"training.kubeflow.org/job-name": "j"}
    policies = [manifest["spec"] for (kind, _), manifest in objects.items() if kind == "NetworkPolicy"]

    def open_to(target: str) -> set[str]:
        chosen = [policy for policy in policies if selects(policy["podSelector"], labels[target])]
        assert chosen, "whoever no policy selects is open to everybody"
        peers = [peer for policy in chosen for rule in policy.get("ingress", []) for peer in rule["from"]]
        return {name for name, own in labels.items() if any(selects(peer["podSelector"], own) for peer in peers)}

    steps = {"step", "Master", "Worker"}
    assert open_to("Master") == open_to("Worker") == {"Master", "Worker"}
    assert open_to("scoring") == steps | {"client"}
    assert open_to("mlflow") == steps, "whoever reaches it can move the champion"
    assert open_to("minio") == steps | {"scoring", "mlflow", "minio", "bucket"}
    assert open_to("stranger") == open_to("step") == set()


def test_steps_are_let_out_to_the_webhook_wherever_it_is(objects: dict[Any, Any]) -> None:
    step = {"workflows.argoproj.io/workflow": "w"}
    policies = [manifest["spec"] for (kind, _), manifest in objects.items() if kind == "NetworkPolicy"]
    chosen = [policy for policy in policies if selects(policy["podSelector"], step)]
    assert chosen and not [policy for policy in chosen if "Egress" in policy["policyTypes"]]


def test_a_server_can_read_releases_with_keys_and_an_account_of_its_own(workflow: dict[str, Any]) -> None:
    pod = next(m for m, _ in applied(workflow) if m["kind"] == "Deployment")["spec"]["template"]["spec"]
    assert pod["serviceAccountName"] == "rekindle-serving"
    text = json.dumps(pod)
    assert "rekindle-serving" in text and "rekindle-s3" not in text
    others = [m for m, _ in applied(workflow) if m["kind"] not in ("Deployment", "HorizontalPodAutoscaler")]
    assert "rekindle-serving" not in json.dumps(others)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"options": ("mlflow", "minio")}, [{"to": [{
            "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "models"}},
            "podSelector": {"matchLabels": {"app.kubernetes.io/name": "minio"}},
        }]}]),
        ({"endpoint": "http://s3.store.svc:80"}, [{"to": [
            {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "store"}}}
        ]}]),
        ({"endpoint": "https://s3.example.com:9000"}, [{"ports": [{"port": 9000}]}]),
        ({}, [{"ports": [{"port": 443}]}]),
    ],
)  # fmt: skip
def test_a_server_reaches_the_object_store_and_nothing_else(given: dict[str, Any], expected: list[Any]) -> None:
    mlflow = {} if "options" in given else {"mlflow": "http://m"}
    policies = [o for o in platform.render(Platform("models", **mlflow, **given)) if o["kind"] == "NetworkPolicy"]
    (serving,) = (o["spec"] for o in policies if o["spec"]["policyTypes"] == ["Egress"])
    assert serving["podSelector"] == {"matchLabels": {"app.kubernetes.io/component": "scoring"}}
    dns, *ways = serving["egress"]
    assert {port["port"] for port in dns["ports"]} == {53} and ways == expected


def selects(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    assert set(selector) <= {"matchLabels", "matchExpressions"}
    assert all(expression["operator"] == "Exists" for expression in selector.get("matchExpressions", []))
    names = {expression["key"] for expression in selector.get("matchExpressions", [])}
    return names <= set(labels) and selector.get("matchLabels", {}).items() <= labels.items()


def test_every_pod_of_the_platform_and_the_pipeline_is_admitted_under_restricted(
    objects: dict[Any, Any], workflow: dict[str, Any]
) -> None:
    assert objects["Namespace", "models"]["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    specs = list(pods([*objects.values(), workflow]))
    names = {"prepare", "train", "deployment", "pytorch", "serve", "mlflow", "minio", "bucket", "delete"}
    assert names <= {name for name, _ in specs}
    for name, spec in specs:
        assert violations(spec) == [], name
        assert spec["automountServiceAccountToken"] is False, name
    executor = workflow["spec"]["executor"]["serviceAccountName"]  # the one that has a token, by the Secret below
    assert ("ServiceAccount", executor) in objects and ("Secret", f"{executor}.service-account-token") in objects


def test_the_operators_init_container_is_admitted_under_restricted() -> None:
    config_map, deployment = platform.operator("kubeflow")
    assert config_map["metadata"]["namespace"] == deployment["metadata"]["namespace"] == "kubeflow"
    (file,) = config_map["data"]
    (mount,) = deployment["spec"]["template"]["spec"]["containers"][0]["volumeMounts"]
    assert (mount["mountPath"], file) == ("/etc/config", "initContainer.yaml")  # where operator 1.9 looks by itself
    # the operator is written in Go: what it fills in stands in {{}}
    filled = yaml.safe_load(re.sub(r"\{\{\.(\w+)\}\}", r"the-\1", config_map["data"][file]))
    assert violations({"containers": filled}) == []
    assert "the-MasterAddr" in str(filled) and filled[0]["image"] == "the-InitContainerImage"


SOUND: dict[str, Any] = {
    "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
    "volumes": [{"name": "tmp", "emptyDir": {}}],
    "containers": [
        {"name": "a", "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}}
    ],
}


@pytest.mark.parametrize(
    "pod, container",
    [
        ({"hostNetwork": True}, {}),
        ({"volumes": [{"name": "a", "hostPath": {"path": "/"}}]}, {}),
        ({"securityContext": {}}, {}),
        ({"securityContext": {"runAsNonRoot": True}}, {}),
        ({"initContainers": [{"name": "init"}]}, {}),
        ({}, {"securityContext": {}}),
        ({}, {"securityContext": SOUND["containers"][0]["securityContext"] | {"runAsUser": 0}}),
        ({}, {"securityContext": SOUND["containers"][0]["securityContext"] | {"runAsNonRoot": False}}),
        ({}, {"ports": [{"containerPort": 1, "hostPort": 1}]}),
    ],
)
def test_the_check_of_pods_finds_what_kubernetes_would_refuse(pod: dict[str, Any], container: dict[str, Any]) -> None:
    assert violations(SOUND) == []
    assert violations(SOUND | {"containers": [SOUND["containers"][0] | container]} | pod)


def test_no_secret_is_in_what_is_rendered(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "MLFLOW_TRACKING_PASSWORD"):
        monkeypatch.setenv(name, "hunter-45871")
    done = CliRunner().invoke(commands, ["platform", "render", "-n", "models", "--with", "mlflow", "--with", "minio"])
    assert done.exit_code == 0 and "45871" not in done.output
    rendered = list(yaml.safe_load_all(done.stdout))
    secrets = [manifest for manifest in rendered if manifest["kind"] == "Secret"]
    assert [set(secret) & {"data", "stringData"} for secret in secrets] == [set()]
    for name in ("rekindle-s3", "rekindle-serving"):
        assert f"kubectl -n models create secret generic {name} --from-env-file=" in done.stderr
    assert platform.text(rendered) == platform.text(platform.render(Platform("models", options=("mlflow", "minio"))))


@pytest.mark.parametrize(
    "endpoint, given, expected",
    [
        ("", {}, {"endpoint": "s3.amazonaws.com"}),
        ("", {"region": "eu-west-1"}, {"endpoint": "s3.eu-west-1.amazonaws.com", "region": "eu-west-1"}),
        ("http://store:9000/", {}, {"endpoint": "store:9000", "insecure": True}),
    ],
)
def test_argo_and_the_steps_are_told_of_the_same_bucket(
    endpoint: str, given: dict[str, Any], expected: dict[str, Any]
) -> None:
    keys = {
        "accessKeySecret": {"name": "rekindle-s3", "key": "AWS_ACCESS_KEY_ID"},
        "secretKeySecret": {"name": "rekindle-s3", "key": "AWS_SECRET_ACCESS_KEY"},
    }
    for iam, credentials in ((False, keys), (True, {"useSDKCreds": True})):
        asked = Platform("models", bucket="b-1", endpoint=endpoint, mlflow="http://m", iam=iam, **given)
        maps = {
            manifest["metadata"]["name"]: manifest
            for manifest in platform.render(asked)
            if manifest["kind"] == "ConfigMap"
        }
        key = maps["artifact-repositories"]["metadata"]["annotations"][
            "workflows.argoproj.io/default-artifact-repository"
        ]
        repository = yaml.safe_load(maps["artifact-repositories"]["data"][key])["s3"]
        assert repository == {"bucket": "b-1", **expected, **credentials}
        assert maps["rekindle"]["data"].get("S3_ENDPOINT_URL", "") == endpoint
        assert maps["rekindle"]["data"]["S3_BUCKET"] == "b-1"


@pytest.mark.parametrize("iam", [False, True])
def test_mlflow_waits_for_the_credentials_unless_it_has_a_role(iam: bool) -> None:
    """The Secret is made after the namespace: an MLflow that began without it would never write an artifact."""
    rendered = platform.render(Platform("models", options=("mlflow",), iam=iam))
    ((_, spec),) = pods(rendered)
    secrets = [e["secretRef"] for e in spec["containers"][0]["envFrom"] if "secretRef" in e]
    assert secrets == [{"name": "mlflow", "optional": True}, *([] if iam else [{"name": "rekindle-s3"}])]


def test_a_trial_needs_no_volumes(objects: dict[Any, Any]) -> None:
    assert {name for kind, name in objects if kind == "PersistentVolumeClaim"} == {"mlflow", "minio"}
    rendered = platform.render(Platform("models", options=("mlflow", "minio"), ephemeral=True))
    assert "persistentVolumeClaim" not in platform.text(rendered)
    assert all("emptyDir" in volume for _, spec in pods(rendered) for volume in spec["volumes"])


@pytest.mark.parametrize(
    "given, message",
    [
        ({}, "MLflow is missing"),
        ({"namespace": "My_Models", "mlflow": "http://m"}, 'the namespace is "My_Models": it must be lower-case'),
        ({"mlflow": "m:5000"}, "it must be http"),
        ({"mlflow": "http://m", "endpoint": "https://s3.example.com/bucket"}, "it must not have a path"),
        ({"endpoint": "http://s", "options": ("minio", "mlflow")}, "choose one of the two"),
        ({"mlflow": "http://m", "options": ("mlflow",)}, "choose one of the two"),
        ({"options": ("minio", "mlflow"), "iam": True}, "MinIO does not support cloud roles"),
        ({"mlflow": "http://m", "images": {"minoi": "x"}}, 'Did you mean "minio"'),
    ],
)
def test_what_does_not_fit_together_is_said(given: dict[str, Any], message: str) -> None:
    values: dict[str, Any] = {"namespace": "models"} | given
    with pytest.raises(ConfigError, match=message):
        Platform(**values)


@pytest.mark.parametrize("namespace", ["rekindle", "training", ""])
def test_the_operators_part_is_for_the_namespace_that_is_named(namespace: str) -> None:
    named = ["-n", namespace] if namespace else []
    done = CliRunner().invoke(commands, ["platform", "render", "--operator", *named])
    assert {manifest["metadata"]["namespace"] for manifest in yaml.safe_load_all(done.stdout)} == {
        namespace or "kubeflow"
    }
    alone = CliRunner().invoke(commands, ["platform", "render", *named, "--mlflow", "http://m"])
    assert f"kubectl -n {namespace or 'rekindle'} create secret" in alone.stderr
    done = CliRunner().invoke(commands, ["platform", "render", "--operator", *named, "--with", "minio"])
    assert done.exit_code == 2 and "cannot be combined with --with" in done.output


@pytest.mark.parametrize("address", ["http://user:hunter2@m", "user:hunter2@m"])
def test_a_password_in_an_address_is_refused_and_not_repeated(address: str) -> None:
    with pytest.raises(ConfigError, match="put them into a Secret") as caught:
        Platform("models", mlflow=address)
    assert "hunter2" not in str(caught.value)
