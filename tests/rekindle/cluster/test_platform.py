"""`rekindle platform render` gives a namespace exactly the permissions that a pipeline needs, and
writes no secret."""

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
from rekindle.cluster.cluster_objects import KINDS
from rekindle.cluster.platform import Platform
from rekindle.errors import ConfigError
from tests.kinds import kinds
from tests.rekindle.cluster.pod_security import find_pods, find_violations

GOLDEN = Path(__file__).parents[2] / "golden"
FULL_PLATFORM = Platform(
    "models", components=("mlflow", "minio", "frameworks", "prometheus"), quota=("64", "256Gi")
)


@pytest.fixture(scope="module")
def workflow() -> dict[str, Any]:
    return render_manifest(load_config(GOLDEN / "config.yaml", environment={}).config)


@pytest.fixture(scope="module")
def objects() -> dict[tuple[str, str], dict[str, Any]]:
    return {
        (manifest["kind"], manifest["metadata"]["name"]): manifest
        for manifest in platform.render_platform(FULL_PLATFORM)
    }


def applied_objects(workflow: dict[str, Any]) -> list[tuple[dict[str, Any], list[str]]]:
    """Return the objects that a workflow applies, with the flags of `kubectl`."""
    resources = [
        t["resource"]
        for t in workflow["spec"]["templates"]
        if t.get("resource", {}).get("action") == "apply"
    ]
    return [
        (json.loads(re.sub(r"\{\{.*?\}\}", "1", r["manifest"])), r.get("flags", []))
        for r in resources
    ]


def deleted_kinds(workflow: dict[str, Any]) -> set[str]:
    """Return the kinds that the template `delete` deletes."""
    cleaner = next(
        t["name"]
        for t in workflow["spec"]["templates"]
        if t.get("resource", {}).get("action") == "delete"
    )

    tasks = [
        task for t in workflow["spec"]["templates"] for task in t.get("dag", {}).get("tasks", [])
    ]
    arguments = [task["arguments"]["parameters"] for task in tasks if task["template"] == cleaner]

    return {
        kind
        for parameters in arguments
        for p in parameters
        if p["name"] == "kind"
        for kind in p["value"].split(",")
    }


def test_the_account_has_exactly_the_permissions_of_the_pipeline(workflow: dict[str, Any]) -> None:
    """Argo applies with get, create and patch (with server-side apply: without get), deletes with
    delete, and waits with get, list and watch."""
    needed = {("argoproj.io", "workflowtaskresults", verb) for verb in ("create", "patch")}
    removed = deleted_kinds(workflow)
    sets = ["serve.canary.gateway=edge"]
    canary = render_manifest(load_config(GOLDEN / "config.yaml", sets=sets, environment={}).config)

    ingress = render_manifest(
        load_config(GOLDEN / "config.yaml", sets=["serve.host=a.example"], environment={}).config
    )
    for manifest, flags in [
        *applied_objects(workflow),
        *applied_objects(canary),
        *applied_objects(ingress),
    ]:
        api_group = manifest["apiVersion"].rpartition("/")[0]
        resource = manifest["kind"].lower() + ("es" if manifest["kind"] == "Ingress" else "s")
        verbs = {"create", "patch"} | (set() if "--server-side" in flags else {"get"})
        verbs.update({"list", "watch", "delete"} if manifest["kind"].lower() in removed else set())
        needed |= {(api_group, resource, verb) for verb in verbs}

    assert set(platform.list_permissions()) == needed


def test_the_option_frameworks_grants_exactly_the_permissions_of_the_blocks() -> None:
    """The option grants the permissions that the blocks need; the tests on a cluster remove each
    permission in turn."""
    waited = [
        (kind.manifest["apiVersion"], kind.manifest["kind"])
        for kind in kinds().values()
        if kind.success
    ]

    verbs = ("get", "list", "watch", "create", "patch", "delete")
    needed = {
        (api.rpartition("/")[0], f"{kind.lower()}s", verb) for api, kind in waited for verb in verbs
    }
    backends = (("jobset.x-k8s.io", "jobsets"), ("trainer.kubeflow.org", "trainjobs"))
    needed |= {(*resource, verb) for resource in backends for verb in verbs}
    needed |= {
        ("trainer.kubeflow.org", "trainingruntimes", verb) for verb in ("get", "create", "patch")
    }
    assert set(platform.list_permissions("frameworks")) == needed - set(platform.list_permissions())


def test_users_may_change_the_objects_of_scale_and_rollback() -> None:
    granted = set(platform.list_permissions("users"))
    for resource in KINDS.values():
        api_group = resource.api.rpartition("/")[0]
        assert {(api_group, resource.plural, verb) for verb in ("get", "patch")} <= granted
    assert ("apps", "deployments", "list") in granted, "rollback lists the releases"


def test_network_policies_allow_exactly_the_connections_of_the_pipeline(
    objects: dict[Any, Any], workflow: dict[str, Any]
) -> None:
    by_kind = {manifest["kind"]: manifest for manifest, _ in applied_objects(workflow)}
    labels = {
        "step": {"workflows.argoproj.io/workflow": "w"},
        "scoring": by_kind["Deployment"]["spec"]["template"]["metadata"]["labels"],
        "stranger": {"app": "x"},
        "client": {"rekindle/client": "true"},
        "other job": {"job-name": "x"},
    }
    for name in ("mlflow", "minio"):
        labels[name] = objects["Deployment", name]["spec"]["template"]["metadata"]["labels"]

    labels["bucket"] = objects["Job", "minio-bucket"]["spec"]["template"]["metadata"]["labels"]
    for name, replica in by_kind["PyTorchJob"]["spec"]["pytorchReplicaSpecs"].items():
        labels[name] = replica["template"]["metadata"]["labels"] | {
            "training.kubeflow.org/job-name": "j"
        }

    policies = [
        manifest["spec"] for (kind, _), manifest in objects.items() if kind == "NetworkPolicy"
    ]

    def open_to(target: str) -> set[str]:
        chosen = [policy for policy in policies if selects(policy["podSelector"], labels[target])]
        assert chosen, "a pod without a policy is open to all"
        peers = [
            peer for policy in chosen for rule in policy.get("ingress", []) for peer in rule["from"]
        ]
        return {
            name
            for name, values in labels.items()
            if any(selects(peer["podSelector"], values) for peer in peers)
        }

    steps = {"step", "Master", "Worker"}
    assert open_to("Master") == open_to("Worker") == {"Master", "Worker"}
    assert open_to("scoring") == steps | {"client"}
    assert open_to("mlflow") == steps, "access to MLflow allows changing the champion"
    assert open_to("minio") == steps | {"scoring", "mlflow", "minio", "bucket"}
    assert open_to("stranger") == open_to("step") == set()


def test_steps_may_connect_to_any_webhook(objects: dict[Any, Any]) -> None:
    step = {"workflows.argoproj.io/workflow": "w"}
    policies = [
        manifest["spec"] for (kind, _), manifest in objects.items() if kind == "NetworkPolicy"
    ]
    chosen = [policy for policy in policies if selects(policy["podSelector"], step)]
    assert chosen
    assert not [policy for policy in chosen if "Egress" in policy["policyTypes"]]


def test_the_model_server_has_its_own_keys_and_account(workflow: dict[str, Any]) -> None:
    pod = next(m for m, _ in applied_objects(workflow) if m["kind"] == "Deployment")["spec"][
        "template"
    ]["spec"]
    assert pod["serviceAccountName"] == "rekindle-serving"
    text = json.dumps(pod)
    assert "rekindle-serving" in text
    assert "rekindle-s3" not in text
    other_objects = [
        m
        for m, _ in applied_objects(workflow)
        if m["kind"] not in ("Deployment", "HorizontalPodAutoscaler")
    ]
    assert "rekindle-serving" not in json.dumps(other_objects)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (
            {"components": ("mlflow", "minio")},
            [
                {
                    "to": [
                        {
                            "namespaceSelector": {
                                "matchLabels": {"kubernetes.io/metadata.name": "models"}
                            },
                            "podSelector": {"matchLabels": {"app.kubernetes.io/name": "minio"}},
                        }
                    ]
                }
            ],
        ),
        (
            {"endpoint": "http://s3.store.svc:80"},
            [
                {
                    "to": [
                        {
                            "namespaceSelector": {
                                "matchLabels": {"kubernetes.io/metadata.name": "store"}
                            }
                        }
                    ]
                }
            ],
        ),
        ({"endpoint": "https://s3.example.com:9000"}, [{"ports": [{"port": 9000}]}]),
        ({}, [{"ports": [{"port": 443}]}]),
    ],
)
def test_the_model_server_may_connect_only_to_the_object_store(
    settings: dict[str, Any], expected: list[Any]
) -> None:
    mlflow = {} if "components" in settings else {"mlflow": "http://m"}
    policies = [
        o
        for o in platform.render_platform(Platform("models", **mlflow, **settings))
        if o["kind"] == "NetworkPolicy"
    ]
    (serving,) = (o["spec"] for o in policies if o["spec"]["policyTypes"] == ["Egress"])
    assert serving["podSelector"] == {"matchLabels": {"app.kubernetes.io/component": "scoring"}}
    dns, *rules = serving["egress"]
    assert {port["port"] for port in dns["ports"]} == {53}
    assert rules == expected


def selects(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    assert set(selector) <= {"matchLabels", "matchExpressions"}
    assert all(
        expression["operator"] == "Exists" for expression in selector.get("matchExpressions", [])
    )
    names = {expression["key"] for expression in selector.get("matchExpressions", [])}
    return names <= set(labels) and selector.get("matchLabels", {}).items() <= labels.items()


def test_every_pod_of_the_platform_and_the_pipeline_is_admitted_under_restricted(
    objects: dict[Any, Any], workflow: dict[str, Any]
) -> None:
    assert (
        objects["Namespace", "models"]["metadata"]["labels"]["pod-security.kubernetes.io/enforce"]
        == "restricted"
    )
    specs = list(find_pods([*objects.values(), workflow]))

    names = {
        "prepare",
        "train",
        "deployment",
        "pytorch",
        "serve",
        "mlflow",
        "minio",
        "bucket",
        "delete",
    }

    assert names <= {name for name, _ in specs}

    for name, spec in specs:
        assert find_violations(spec) == [], name
        assert spec["automountServiceAccountToken"] is False, name

    # the token of this account is in the Secret that is checked below
    executor = workflow["spec"]["executor"]["serviceAccountName"]
    assert ("ServiceAccount", executor) in objects
    assert (
        "Secret",
        f"{executor}.service-account-token",
    ) in objects


def test_the_operators_init_container_is_admitted_under_restricted() -> None:
    config_map, deployment = platform.render_operator_patch("kubeflow")
    assert config_map["metadata"]["namespace"] == deployment["metadata"]["namespace"] == "kubeflow"
    (file,) = config_map["data"]
    (mount,) = deployment["spec"]["template"]["spec"]["containers"][0]["volumeMounts"]
    # the path is the default path of training operator 1.9
    assert mount["mountPath"] == "/etc/config"
    assert file == "initContainer.yaml"
    # the training operator fills in the Go template in the same way
    filled = yaml.safe_load(re.sub(r"\{\{\.(\w+)\}\}", r"the-\1", config_map["data"][file]))
    assert find_violations({"containers": filled}) == []
    assert "the-MasterAddr" in str(filled)
    assert filled[0]["image"] == "the-InitContainerImage"


COMPLIANT_POD: dict[str, Any] = {
    "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
    "volumes": [{"name": "tmp", "emptyDir": {}}],
    "containers": [
        {
            "name": "a",
            "securityContext": {
                "allowPrivilegeEscalation": False,
                "capabilities": {"drop": ["ALL"]},
            },
        }
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
        (
            {},
            {
                "securityContext": COMPLIANT_POD["containers"][0]["securityContext"]
                | {"runAsUser": 0}
            },
        ),
        (
            {},
            {
                "securityContext": COMPLIANT_POD["containers"][0]["securityContext"]
                | {"runAsNonRoot": False}
            },
        ),
        ({}, {"ports": [{"containerPort": 1, "hostPort": 1}]}),
    ],
)
def test_violations_finds_pods_that_kubernetes_would_refuse(
    pod: dict[str, Any], container: dict[str, Any]
) -> None:
    assert find_violations(COMPLIANT_POD) == []
    assert find_violations(
        COMPLIANT_POD | {"containers": [COMPLIANT_POD["containers"][0] | container]} | pod
    )


def test_rendered_objects_contain_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "MLFLOW_TRACKING_PASSWORD"):
        monkeypatch.setenv(name, "hunter-45871")

    result = CliRunner().invoke(
        commands, ["platform", "render", "-n", "models", "--with", "mlflow", "--with", "minio"]
    )
    assert result.exit_code == 0
    assert "45871" not in result.output
    rendered = list(yaml.safe_load_all(result.stdout))
    secrets = [manifest for manifest in rendered if manifest["kind"] == "Secret"]
    assert [set(secret) & {"data", "stringData"} for secret in secrets] == [set()]

    for name in ("rekindle-s3", "rekindle-serving"):
        assert f"kubectl -n models create secret generic {name} --from-env-file=" in result.stderr

    assert platform.to_yaml_documents(rendered) == platform.to_yaml_documents(
        platform.render_platform(Platform("models", components=("mlflow", "minio")))
    )


@pytest.mark.parametrize(
    "endpoint, settings, expected",
    [
        ("", {}, {"endpoint": "s3.amazonaws.com"}),
        (
            "",
            {"region": "eu-west-1"},
            {"endpoint": "s3.eu-west-1.amazonaws.com", "region": "eu-west-1"},
        ),
        ("http://store:9000/", {}, {"endpoint": "store:9000", "insecure": True}),
    ],
)
def test_argo_and_the_steps_use_the_same_bucket(
    endpoint: str, settings: dict[str, Any], expected: dict[str, Any]
) -> None:
    keys = {
        "accessKeySecret": {"name": "rekindle-s3", "key": "AWS_ACCESS_KEY_ID"},
        "secretKeySecret": {"name": "rekindle-s3", "key": "AWS_SECRET_ACCESS_KEY"},
    }
    for iam, credentials in ((False, keys), (True, {"useSDKCreds": True})):
        requested = Platform(
            "models", bucket="b-1", endpoint=endpoint, mlflow="http://m", iam=iam, **settings
        )
        maps = {
            manifest["metadata"]["name"]: manifest
            for manifest in platform.render_platform(requested)
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
    """The Secret is created after the namespace. For this reason, MLflow must wait for the Secret:
    an MLflow that starts without it could never write an artifact."""
    rendered = platform.render_platform(Platform("models", components=("mlflow",), iam=iam))
    ((_, spec),) = find_pods(rendered)
    secrets = [e["secretRef"] for e in spec["containers"][0]["envFrom"] if "secretRef" in e]
    assert secrets == [
        {"name": "mlflow", "optional": True},
        *([] if iam else [{"name": "rekindle-s3"}]),
    ]


def test_ephemeral_services_need_no_volumes(objects: dict[Any, Any]) -> None:
    assert {name for kind, name in objects if kind == "PersistentVolumeClaim"} == {
        "mlflow",
        "minio",
    }
    rendered = platform.render_platform(
        Platform("models", components=("mlflow", "minio"), ephemeral=True)
    )
    assert "persistentVolumeClaim" not in platform.to_yaml_documents(rendered)
    assert all(
        "emptyDir" in volume for _, spec in find_pods(rendered) for volume in spec["volumes"]
    )


@pytest.mark.parametrize(
    "settings, message",
    [
        ({}, "MLflow is missing"),
        (
            {"namespace": "My_Models", "mlflow": "http://m"},
            'the namespace is "My_Models": it must be lower-case',
        ),
        ({"mlflow": "m:5000"}, "it must be http"),
        (
            {"mlflow": "http://m", "endpoint": "https://s3.example.com/bucket"},
            "it must not have a path",
        ),
        (
            {"endpoint": "http://s", "components": ("minio", "mlflow")},
            "adds an endpoint: choose one",
        ),
        ({"mlflow": "http://m", "components": ("mlflow",)}, "choose one of them"),
        ({"components": ("minio", "mlflow"), "iam": True}, "MinIO does not support cloud roles"),
        ({"mlflow": "http://m", "images": {"minoi": "x"}}, 'Did you mean "minio"'),
    ],
)
def test_invalid_and_conflicting_settings_are_refused(
    settings: dict[str, Any], message: str
) -> None:
    values: dict[str, Any] = {"namespace": "models"} | settings
    with pytest.raises(ConfigError, match=message):
        Platform(**values)


@pytest.mark.parametrize("namespace", ["rekindle", "training", ""])
def test_the_operator_patch_is_for_the_given_namespace(namespace: str) -> None:
    flags = ["-n", namespace] if namespace else []
    result = CliRunner().invoke(commands, ["platform", "render", "--operator", *flags])
    assert {
        manifest["metadata"]["namespace"] for manifest in yaml.safe_load_all(result.stdout)
    } == {namespace or "kubeflow"}
    rendered = CliRunner().invoke(commands, ["platform", "render", *flags, "--mlflow", "http://m"])
    assert f"kubectl -n {namespace or 'rekindle'} create secret" in rendered.stderr
    result = CliRunner().invoke(
        commands, ["platform", "render", "--operator", *flags, "--with", "minio"]
    )
    assert result.exit_code == 2
    assert "cannot be combined with --with" in result.output


@pytest.mark.parametrize(
    "address",
    [
        "http://user:hunter2@m",
        "user:hunter2@m",
        "http://m?token=hunter2",
        "http://m#hunter2",
        "m?hunter2",
    ],
)
def test_a_password_in_an_address_is_refused_and_not_shown(address: str) -> None:
    with pytest.raises(ConfigError, match="put them into a Secret") as caught:
        Platform("models", mlflow=address)
    assert "hunter2" not in str(caught.value)
