"""Tests of the rendered training pipeline: inputs of its tasks, behaviour after failures, and
requirements of Kubernetes."""

import json
from pathlib import Path
from typing import Any

import pytest
from hera.workflows import models as m

from argolocal.language.expr import evaluate_bool
from argolocal.language.substitute import nest_scope, substitute
from argolocal.validate import lint
from rekindle.blocks.manifest.config import Config, load_config
from rekindle.blocks.manifest.render import render_manifest
from rekindle.errors import ConfigError
from rekindle.step import format_flag, is_artifact, load_step_module
from tests.argolocal.runner.played import make_parameters, make_scheduler, play

GOLDEN = Path(__file__).parents[1] / "golden"
DAGS = ("main", "decide", "ship", "promote")
NOTHING = json.dumps({"prepare": {"at": ""}, "train": {"at": ""}, "reuse": "yes"})
WORKFLOW = {"workflow.name": "cards-x7k2p", "workflow.parameters.cached": NOTHING}


@pytest.fixture(scope="module")
def config() -> Config:
    return load_config(GOLDEN / "config.yaml", environment={}).config


@pytest.fixture(scope="module")
def spec(config: Config) -> dict[str, Any]:
    return render_manifest(config)["spec"]


@pytest.fixture(scope="module")
def templates(spec: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {template["name"]: template for template in spec["templates"]}


@pytest.fixture(scope="module")
def objects(templates: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The objects that the pipeline applies, by kind, in the form that Kubernetes gets."""
    names = ("digest", "run_id", "model_uri", "server", "version")
    tags = WORKFLOW | {f"inputs.parameters.{name}": f"the-{name}" for name in names}
    resources = [template["resource"] for template in templates.values() if "resource" in template]
    texts = [resource["manifest"] for resource in resources if resource["action"] == "apply"]
    manifests = [json.loads(substitute(text, tags)) for text in texts]
    return {each["kind"]: each for each in manifests if "kind" in each}


def tasks_by_name(template: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {task["name"]: task for task in template["dag"]["tasks"]}


def test_a_config_with_pinned_images_renders_to_manifests_without_findings(config: Config) -> None:
    for kind in ("workflow", "template", "cron"):
        assert lint(render_manifest(config, kind)) == []


@pytest.mark.parametrize("verdict, ships", [("release", True), ("keep", False), ("same", False)])
def test_a_model_is_shipped_only_with_the_verdict_release(
    verdict: str, ships: bool, templates: dict[str, dict[str, Any]]
) -> None:
    gate = tasks_by_name(templates["decide"])["ship"]["when"]
    assert (
        substitute(gate, {"tasks.evaluate.outputs.parameters.verdict": verdict})
        == str(ships).lower()
    )


def test_tasks_depend_on_each_other_in_the_right_order(
    templates: dict[str, dict[str, Any]],
) -> None:
    order = {
        name: [(t["name"], t.get("depends")) for t in templates[name]["dag"]["tasks"]]
        for name in DAGS
    }
    last_dependencies = [("train", "prepare && train-secret"), ("decide", "train")]
    assert order["main"] == [("prepare", None), ("train-secret", None), *last_dependencies]
    assert order["decide"] == [("evaluate", None), ("ship", "evaluate")]
    steps = [("release", None), ("deploy", "release"), ("promote", "deploy"), ("switch", "promote")]
    assert order["ship"][:4] == steps
    assert order["ship"][4:6] == [("expire", "switch"), ("take-back", "switch")]
    repetition = [("evaluate-again", "verify.Succeeded"), ("next", "evaluate-again.Succeeded")]
    assert order["promote"] == [("verify", None), *repetition]


def test_only_one_run_at_a_time_evaluates_and_ships_a_model(
    templates: dict[str, dict[str, Any]],
) -> None:
    assert templates["decide"]["synchronization"] == {"mutexes": [{"name": "cards"}]}
    callers = [
        tasks_by_name(templates[dag])[task]
        for dag, task in (("decide", "ship"), ("ship", "promote"))
    ]
    callers += [tasks_by_name(templates["promote"])[task] for task in ("verify", "next")]
    champions = [
        {p["name"]: p["value"] for p in task["arguments"]["parameters"]}["champion"]
        for task in callers
    ]
    passed_on = "{{inputs.parameters.champion}}"
    first, last = (
        f"{{{{tasks.{task}.outputs.parameters.champion}}}}"
        for task in ("evaluate", "evaluate-again")
    )
    assert champions == [first, passed_on, passed_on, last]


def test_servers_are_removed_after_a_failed_deployment_or_verification(
    templates: dict[str, dict[str, Any]],
) -> None:
    withdraw = tasks_by_name(templates["ship"])["withdraw"]
    assert set(withdraw["depends"].split(" || ")) == {
        f"{task}.{phase}" for task in ("deploy", "promote") for phase in ("Failed", "Errored")
    }
    # without the target, `withdraw` would be a leaf, and its success would make the DAG a success
    assert templates["ship"]["dag"]["target"].split() == [
        "promote",
        "switch",
        "expire",
        "take-back",
        "withdraw",
    ]


def with_canary(gateway: str) -> dict[str, dict[str, Any]]:
    sets = ["serve.canary.steps=[5, 50, 100]", f"serve.canary.gateway={gateway}"]
    manifest = render_manifest(
        load_config(GOLDEN / "config.yaml", sets=sets, environment={}).config
    )
    assert lint(manifest) == []
    return {template["name"]: template for template in manifest["spec"]["templates"]}


@pytest.mark.parametrize("gateway", ["", "infra/edge"])
def test_the_traffic_share_of_a_canary_is_removed_after_any_outcome(gateway: str) -> None:
    templates = with_canary(gateway)
    ship = tasks_by_name(templates["ship"])
    promote = tasks_by_name(templates["promote"])
    finish = tasks_by_name(templates["finish"])

    for outcome, successors in (
        ("taken back: x", ["unshare"]),
        ("champion changed", ["unshare", "verify-again"]),
        ("passed", ["verify-again"]),
    ):
        answers = {"tasks.canary.outputs.parameters.canary": outcome}
        runs = {
            name: substitute(promote[name]["when"], answers) for name in ("unshare", "verify-again")
        }
        assert [name for name, condition in runs.items() if condition == "true"] == successors
        assert {promote[name]["depends"] for name in successors} == {"canary"}

    assert (
        next(task for name, task in ship.items() if name.startswith("unshare"))["depends"]
        == "switch"
    )
    end = next(task for name, task in finish.items() if name.startswith("unshare"))
    assert end["when"] == "{{workflow.status}} != Succeeded"


@pytest.mark.parametrize("gateway", ["", "infra/edge"])
def test_a_canary_gets_the_traffic_share_that_its_step_returns(gateway: str) -> None:
    tags = {
        f"inputs.parameters.{name}": f"the-{name}"
        for name in ("model_uri", "server", "version", "former")
    }
    tags.update({f"inputs.parameters.{name}": "5" for name in ("replicas", "percent")})
    share = json.loads(
        substitute(with_canary(gateway)["share"]["resource"]["manifest"], WORKFLOW | tags)
    )

    if gateway:
        weights = [
            (backend["name"], backend["weight"])
            for backend in share["spec"]["rules"][0]["backendRefs"]
        ]
        assert weights == [("cards", 95), ("the-server", 5)]
        assert share["spec"]["rules"][0]["backendRefs"][1]["port"] == 8080
        assert share["spec"]["parentRefs"] == [{"namespace": "infra", "name": "edge"}]
    else:
        labels = share["spec"]["template"]["metadata"]["labels"]
        selector = share["spec"]["selector"]["matchLabels"]
        assert labels["app.kubernetes.io/instance"] == "the-former"
        assert selector.items() <= labels.items()
        assert share["metadata"]["name"] == "the-server-canary"
        assert share["spec"]["replicas"] == 5
        # the pods of both Deployments have the labels of the-former, so only the metrics of the
        # servers distinguish them
        assert (
            "--deployment=the-server" in share["spec"]["template"]["spec"]["containers"][0]["args"]
        )


@pytest.mark.parametrize(
    "answers",
    [
        [("passed", "5"), ("passed", "50"), ("passed", "0")],
        [("passed", "5"), ("passed", "50"), ("taken back: x", "0")],
        [("passed", "5"), ("taken back: x", "0")],
        # a case without a champion
        [("passed", "0")],
    ],
)
def test_the_share_of_a_canary_grows_until_its_step_ends_the_canary_even_if_pods_are_lost(
    answers: list[tuple[str, str]],
) -> None:
    templates = with_canary("infra/edge")
    inputs = [
        {"name": p["name"], "value": "0"} for p in templates["rollout"]["inputs"]["parameters"]
    ]
    used = [templates[name] for name in ("rollout", "champion-pods", "canary", "scale", "share")]
    s = make_scheduler(*used, entrypoint="rollout", arguments={"parameters": inputs})
    watches = ["next." * depth + "watch" for depth in range(len(answers))]
    lost = {f"{watch}(0)": "Error" for watch in watches}
    outputs = {
        f"{watch}(1)": make_parameters(canary=outcome, percent=percent, replicas="1")
        for watch, (outcome, percent) in zip(watches, answers, strict=True)
    }
    steps = [watch.removesuffix("watch") for watch in watches]
    outputs.update({f"{step}champion(0)": make_parameters(replicas="") for step in steps})
    pods = [
        [f"{step}{pod}" for pod in ("champion(0)", "watch(0)", "watch(1)", "share(0)")]
        for step in steps
    ]
    assert play(s, lost, outputs) == [name for names in pods for name in names][:-1]

    shares = [
        node["inputs"]["parameters"][1]
        for node in s.nodes.values()
        if node["displayName"] == "share(0)"
    ]

    assert shares == [{"name": "percent", "value": percent} for _, percent in answers[:-1]]
    workflow = s.table.get("w") or {}
    assert workflow["outputs"]["parameters"] == [{"name": "canary", "value": answers[-1][0]}]


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (
            ["serve.canary.steps=[25, 5, 100]"],
            r"steps is \[25, 5, 100\]: it must be percentages that rise to 100",
        ),
        (
            ["serve.canary.shadow=true"],
            "shadow needs a Gateway, which copies the requests: set serve.canary.gateway",
        ),
    ],
)
def test_invalid_settings_of_a_canary_are_rejected(sets: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(GOLDEN / "config.yaml", sets=sets, environment={})


@pytest.mark.parametrize(
    "status, cleans", [("Succeeded", False), ("Failed", True), ("Error", True)]
)
def test_a_failed_workflow_deletes_its_training_job(
    status: str, cleans: bool, spec: dict[str, Any], templates: dict[str, dict[str, Any]]
) -> None:
    cleanup = tasks_by_name(templates[spec["onExit"]])["cleanup"]
    first, _, second = substitute(cleanup["when"], {"workflow.status": status}).partition(" != ")
    assert (first != second) == cleans
    parameters = {p["name"]: p["value"] for p in cleanup["arguments"]["parameters"]}
    assert parameters == {"kind": "pytorchjob", "object": "{{workflow.name}}-train"}
    assert templates[cleanup["template"]]["resource"]["flags"] == [
        "{{inputs.parameters.kind}}",
        "{{inputs.parameters.object}}",
        "--cascade=foreground",
    ]


@pytest.mark.parametrize("name", ["prepare", "evaluate", "release", "verify", "report"])
def test_every_input_and_output_of_a_step_is_in_its_template(
    name: str, templates: dict[str, dict[str, Any]]
) -> None:
    module = load_step_module(f"steps.{name}")
    template = templates[name]
    args = template["container"]["args"]

    for field, info in module.Inputs.model_fields.items():
        kind = "artifacts" if is_artifact(info) else "parameters"
        assert field in {each["name"] for each in template["inputs"][kind]}
        assert (
            sum(
                arg.startswith(f"{format_flag(field)}={{{{") and f"inputs.{kind}.{field}" in arg
                for arg in args
            )
            == 1
        )

    for field, info in module.Outputs.model_fields.items():
        kind = "artifacts" if is_artifact(info) else "parameters"
        assert f"{field}={{{{outputs.{kind}.{field}.path}}}}" in args


def test_every_artifact_is_read_from_the_key_where_it_was_stored(
    templates: dict[str, dict[str, Any]], objects: dict[str, Any]
) -> None:
    """Steps and the training job exchange artifacts by key, because a resource template cannot have
    artifacts."""
    stored = set()
    read = set()

    for task in [task for name in DAGS for task in tasks_by_name(templates[name]).values()]:
        arguments = task.get("arguments", {})
        tags = {
            f"inputs.parameters.{p['name']}": p["value"] for p in arguments.get("parameters", [])
        }
        for artifact in templates[task["template"]].get("outputs", {}).get("artifacts", []):
            assert artifact["archive"] == {"none": {}}
            stored.add(substitute(substitute(artifact["s3"]["key"], tags), WORKFLOW))

        for artifact in arguments.get("artifacts", []):
            assert artifact["archive"] == {"none": {}}
            read.add(substitute(artifact["s3"]["key"], WORKFLOW))

    worker = objects["PyTorchJob"]["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"][
        "containers"
    ][0]
    assert {"--dataset=cards-x7k2p/prepare/dataset", "--out=cards-x7k2p/train/model"} <= set(
        worker["args"]
    )
    assert read == stored | {"cards-x7k2p/train/model"}


def test_results_are_outputs_of_the_workflow(templates: dict[str, dict[str, Any]]) -> None:
    exported = {
        parameter["globalName"]
        for template in templates.values()
        for parameter in template.get("outputs", {}).get("parameters", [])
        if "globalName" in parameter
    }
    assert exported == {
        "run_id",
        "digest",
        "model_sha256",
        "content",
    }  # the verdict may change in a repeated evaluation


@pytest.mark.parametrize(
    "code, is_retried", [("1", True), ("137", True), ("-1", True), ("65", False), ("78", False)]
)
def test_errors_that_a_retry_cannot_cure_are_not_retried(
    code: str, is_retried: bool, templates: dict[str, dict[str, Any]]
) -> None:
    retry = templates["prepare"]["retryStrategy"]
    assert retry["retryPolicy"] == "Always"
    assert retry["limit"] == 4
    assert evaluate_bool(retry["expression"], {"lastRetry": {"exitCode": code}}) is is_retried


def test_the_training_task_is_retried_while_its_job_is_healthy(
    templates: dict[str, dict[str, Any]],
) -> None:
    train = templates["train"]
    assert train["resource"]["action"] == "apply"
    assert train["resource"]["setOwnerReference"] is True
    # with these fields, each attempt would have its own limit
    assert "activeDeadlineSeconds" not in train
    assert "timeout" not in train
    expression = train["retryStrategy"]["expression"]
    failed = "failure condition 'status.conditions.1.type==Failed' evaluated true"

    def is_retried(message: str, retries: int) -> bool:
        return evaluate_bool(
            expression, nest_scope({"lastRetry.message": message, "retries": str(retries)})
        )

    assert not is_retried(f"main: Error (exit code 64): {failed}", 0)
    assert is_retried("pod deleted", 500)
    assert is_retried("OOMKilled (exit code 137)", 500), "its job continues"
    rejected = "main: Error (exit code 64): no more retries Error from server"
    assert is_retried(
        f"{rejected} (InternalError): failed calling webhook: connection refused", 500
    )
    assert is_retried(f"{rejected} (Forbidden): may not", 4)
    assert not is_retried(f"{rejected} (Forbidden): may not", 5)
    assert train["retryStrategy"]["limit"] > 1000
    assert train["retryStrategy"]["backoff"] == {"duration": "10s"}


def test_pods_that_watch_jobs_have_resource_requests_and_avoid_preemptible_nodes() -> None:
    nodes = {"preset": "karpenter-spot", "priority_class": "high"}
    loaded = load_config(
        GOLDEN / "config.yaml", [f"cluster.pods.train={json.dumps(nodes)}"], {}
    ).config

    templates = render_manifest(loaded)["spec"]["templates"]
    for template in (template for template in templates if "resource" in template):
        (main_container,) = json.loads(template["podSpecPatch"])["containers"]
        assert main_container["name"] == "main"
        assert main_container["resources"]["requests"]["memory"] == "256Mi"
        (term,) = template["affinity"]["nodeAffinity"][
            "requiredDuringSchedulingIgnoredDuringExecution"
        ]["nodeSelectorTerms"]
        assert term["matchExpressions"] == [
            {"key": "karpenter.sh/capacity-type", "operator": "NotIn", "values": ["spot"]}
        ]
        assert template["priorityClassName"] == "high", "otherwise its workers could preempt it"


def test_the_longest_names_are_valid_in_kubernetes() -> None:
    name = "a" * 30
    config = load_config(GOLDEN / "config.yaml", [f"name={name}"], environment={}).config
    for kind in ("workflow", "template", "cron"):
        assert lint(render_manifest(config, kind)) == []
    assert len(f"{name}-1700000000-train-worker-99") <= 63


def test_an_undefined_tag_in_a_config_is_reported() -> None:
    loaded = load_config(
        GOLDEN / "config.yaml", ["data.source=s3://a/{{inputs.parameters.b}}"], {}
    ).config
    assert {finding.rule for finding in lint(render_manifest(loaded))} == {"tag"}


# the objects for Kubernetes


def round_trip(model: Any, value: Any) -> None:
    assert model.model_validate(value).model_dump(exclude_none=True, by_alias=True) == value


def list_pod_specs(objects: dict[str, Any]) -> dict[str, dict[str, Any]]:
    replicas = objects["PyTorchJob"]["spec"]["pytorchReplicaSpecs"]
    specs = {name: replica["template"]["spec"] for name, replica in replicas.items()}
    return specs | {"Deployment": objects["Deployment"]["spec"]["template"]["spec"]}


@pytest.mark.parametrize("name", ["Master", "Worker", "Deployment"])
def test_pods_have_only_fields_that_kubernetes_knows(name: str, objects: dict[str, Any]) -> None:
    pod = list_pod_specs(objects)[name]
    container = dict(pod["containers"][0])
    probes = {key: container.pop(key) for key in list(container) if key.endswith("Probe")}
    round_trip(m.Container, container)

    for probe in probes.values():
        # the local model of a Deployment does not support named ports
        plain = {**probe, "httpGet": {**probe["httpGet"], "port": 8080}}
        assert set(
            m.Probe.model_validate(plain).model_dump(exclude_none=True, by_alias=True)
        ) == set(plain)

    for volume in pod["volumes"]:
        round_trip(m.Volume, volume)

    for toleration in pod.get("tolerations", []):
        round_trip(m.Toleration, toleration)

    round_trip(m.PodSecurityContext, pod["securityContext"])


def test_pods_can_write_only_to_tmp_and_workers_also_to_shared_memory_and_the_cache(
    objects: dict[str, Any], spec: dict[str, Any]
) -> None:
    """Other permissions of pods are tested in tests/rekindle/cluster/test_platform.py."""
    steps = [template["container"] for template in spec["templates"] if "container" in template]
    for container in [pod["containers"][0] for pod in list_pod_specs(objects).values()] + steps:
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        if "rekindle.training.launch.launcher" in container["args"]:
            more = ["/dev/shm", "/tmp/cache"]
        else:
            more = []

        assert [mount["mountPath"] for mount in container["volumeMounts"]] == ["/tmp", *more]
        assert container["envFrom"][0] == {"configMapRef": {"name": "rekindle"}}
        if "steps.serve" in container["args"]:
            name = "rekindle-serving"
        else:
            name = "rekindle-s3"

        assert container["envFrom"][1]["secretRef"] == {"name": name, "optional": True}


def test_each_kind_of_pod_gets_its_own_resources_and_nodes(objects: dict[str, Any]) -> None:
    worker, master, server = (
        list_pod_specs(objects)[name] for name in ("Worker", "Master", "Deployment")
    )
    # the preset sets these node labels
    spot = {"karpenter.sh/capacity-type": "spot"}
    assert worker["nodeSelector"] == spot
    assert "nodeSelector" not in master
    assert worker["containers"][0]["resources"] == {
        "requests": {"cpu": "4", "memory": "8Gi", "ephemeral-storage": "4Gi"},
        "limits": {"memory": "8Gi", "nvidia.com/gpu": "1"},
    }
    assert server["priorityClassName"] == "serving"
    assert server["containers"][0]["resources"]["limits"] == {"memory": "3Gi"}
    lost = [t for t in worker["tolerations"] if t.get("tolerationSeconds")]
    assert {t["key"].partition("/")[2] for t in lost} == {"not-ready", "unreachable"}
