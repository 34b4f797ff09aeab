"""The pipeline as it is rendered: who gets what, what happens when something fails, and what Kubernetes needs."""

import json
from pathlib import Path
from typing import Any

import pytest
from hera.workflows import models as m

from argolocal.language.expr import truth
from argolocal.language.substitute import expanded, substitute
from argolocal.validate import lint
from rekindle.blocks.manifest.config import Config, load_config
from rekindle.blocks.manifest.render import render_manifest
from rekindle.errors import ConfigError
from rekindle.step import flag, is_artifact, load
from tests.argolocal.runner.played import parameters, play, scheduler

GOLDEN = Path(__file__).parents[1] / "golden"
DAGS = ("main", "decide", "ship")
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
    """Every object that the pipeline applies, by kind, as Kubernetes gets it."""
    names = ("digest", "run_id", "model_uri", "server", "version")
    tags = WORKFLOW | {f"inputs.parameters.{name}": f"the-{name}" for name in names}
    resources = [template["resource"] for template in templates.values() if "resource" in template]
    texts = [resource["manifest"] for resource in resources if resource["action"] == "apply"]
    found = [json.loads(substitute(text, tags)) for text in texts]
    return {each["kind"]: each for each in found if "kind" in each}


def tasks(template: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {task["name"]: task for task in template["dag"]["tasks"]}


def test_a_config_with_pinned_images_renders_to_manifests_without_findings(config: Config) -> None:
    for kind in ("workflow", "template", "cron"):
        assert lint(render_manifest(config, kind)) == []


@pytest.mark.parametrize("verdict, ships", [("release", True), ("keep", False), ("same", False)])
def test_only_the_verdict_release_ships(verdict: str, ships: bool, templates: dict[str, dict[str, Any]]) -> None:
    gate = tasks(templates["decide"])["ship"]["when"]
    assert substitute(gate, {"tasks.evaluate.outputs.parameters.verdict": verdict}) == str(ships).lower()


def test_the_parts_of_a_run_come_in_their_order(templates: dict[str, dict[str, Any]]) -> None:
    order = {name: [(t["name"], t.get("depends")) for t in templates[name]["dag"]["tasks"]] for name in DAGS}
    last = [("train", "prepare && train-secret"), ("decide", "train")]
    assert order["main"] == [("prepare", None), ("train-secret", None), *last]
    assert order["decide"] == [("evaluate", None), ("ship", "evaluate")]
    steps = [("release", None), ("deploy", "release"), ("verify", "deploy"), ("switch", "verify")]
    assert order["ship"][:4] == steps
    assert order["ship"][4:5] == [("expire", "switch")]


def test_one_run_at_a_time_judges_and_ships_a_model(templates: dict[str, dict[str, Any]]) -> None:
    assert templates["decide"]["synchronization"] == {"mutexes": [{"name": "cards"}]}
    verify, evaluate = tasks(templates["ship"])["verify"], "{{tasks.evaluate.outputs.parameters.champion}}"
    judged = next(p["value"] for p in verify["arguments"]["parameters"] if p["name"] == "champion")
    given = {p["name"]: p["value"] for p in tasks(templates["decide"])["ship"]["arguments"]["parameters"]}
    assert judged == "{{inputs.parameters.champion}}" and given["champion"] == evaluate


def test_a_failed_deployment_or_verification_is_taken_back(templates: dict[str, dict[str, Any]]) -> None:
    withdraw = tasks(templates["ship"])["withdraw"]
    assert set(withdraw["depends"].split(" || ")) == {
        f"{task}.{phase}" for task in ("deploy", "verify") for phase in ("Failed", "Errored")
    }
    # were `withdraw` a leaf alone, its success would make the DAG a success (hence the target)
    assert templates["ship"]["dag"]["target"].split() == ["verify", "switch", "expire", "withdraw"]


def with_canary(gateway: str) -> dict[str, dict[str, Any]]:
    sets = ["serve.canary.steps=[5, 50, 100]", f"serve.canary.gateway={gateway}"]
    manifest = render_manifest(load_config(GOLDEN / "config.yaml", sets=sets, environment={}).config)
    assert lint(manifest) == []
    return {template["name"]: template for template in manifest["spec"]["templates"]}


@pytest.mark.parametrize("gateway", ["", "infra/edge"])
def test_a_canary_gives_its_share_back_whatever_happens(gateway: str) -> None:
    templates = with_canary(gateway)
    ship, promote, finish = tasks(templates["ship"]), tasks(templates["promote"]), tasks(templates["finish"])
    back = next(name for name in ship if name.startswith("unshare"))
    for outcome, follows in (("taken back: x", [back, "take-back"]), ("passed", ["promote"])):
        answers = {"tasks.canary.outputs.parameters.canary": outcome}
        runs = {name: substitute(task["when"], answers) for name, task in ship.items() if "when" in task}
        assert [name for name, when in runs.items() if when == "true"] == follows
        assert {ship[name]["depends"] for name in follows} == {"canary"}
    assert "canary.Failed" in ship["withdraw"]["depends"] and "canary.Errored" in ship["withdraw"]["depends"]
    assert {"canary", "promote"} <= {*templates["ship"]["dag"]["target"].split()}
    assert next(task for name, task in promote.items() if name.startswith("unshare"))["depends"] == "switch"
    end = next(task for name, task in finish.items() if name.startswith("unshare"))
    assert end["when"] == "{{workflow.status}} != Succeeded"


@pytest.mark.parametrize("gateway", ["", "infra/edge"])
def test_a_canary_gives_the_share_that_the_step_says(gateway: str) -> None:
    tags = {f"inputs.parameters.{name}": f"the-{name}" for name in ("model_uri", "server", "version", "former")}
    tags |= {f"inputs.parameters.{name}": "5" for name in ("replicas", "percent")}
    share = json.loads(substitute(with_canary(gateway)["share"]["resource"]["manifest"], WORKFLOW | tags))
    if gateway:
        weights = [(backend["name"], backend["weight"]) for backend in share["spec"]["rules"][0]["backendRefs"]]
        assert weights == [("cards", 95), ("the-server", 5)]
        assert share["spec"]["rules"][0]["backendRefs"][1]["port"] == 8080
        assert share["spec"]["parentRefs"] == [{"namespace": "infra", "name": "edge"}]
    else:
        labels, selector = share["spec"]["template"]["metadata"]["labels"], share["spec"]["selector"]["matchLabels"]
        assert labels["app.kubernetes.io/instance"] == "the-former" and selector.items() <= labels.items()
        assert share["metadata"]["name"] == "the-server-canary" and share["spec"]["replicas"] == 5


@pytest.mark.parametrize(
    "says",
    [
        [("passed", "5"), ("passed", "50"), ("passed", "0")],
        [("passed", "5"), ("passed", "50"), ("taken back: x", "0")],
        [("passed", "5"), ("taken back: x", "0")],
        [("passed", "0")],  # there is nobody to compare with
    ],
)
def test_a_canary_grows_until_its_step_says_that_it_is_over_and_a_lost_pod_costs_no_share(
    says: list[tuple[str, str]],
) -> None:
    templates = with_canary("infra/edge")
    inputs = [{"name": p["name"], "value": "0"} for p in templates["rollout"]["inputs"]["parameters"]]
    used = [templates[name] for name in ("rollout", "canary", "share")]
    s = scheduler(*used, entrypoint="rollout", arguments={"parameters": inputs})
    looks = ["next." * depth + "watch" for depth in range(len(says))]
    lost = {f"{look}(0)": "Error" for look in looks}
    said = {
        f"{look}(1)": parameters(canary=outcome, percent=percent, replicas="1")
        for look, (outcome, percent) in zip(looks, says, strict=True)
    }
    ran = [(f"{look}(0)", f"{look}(1)", f"{look.replace('watch', 'share')}(0)") for look in looks]
    assert play(s, lost, said) == [name for names in ran for name in names][:-1]
    found = [node["inputs"]["parameters"][1] for node in s.nodes.values() if node["displayName"] == "share(0)"]
    assert found == [{"name": "percent", "value": percent} for _, percent in says[:-1]]
    whole = s.table.get("w") or {}
    assert whole["outputs"]["parameters"] == [{"name": "canary", "value": says[-1][0]}]


@pytest.mark.parametrize(
    ("sets", "says"),
    [
        (["serve.canary.steps=[25, 5, 100]"], r"steps is \[25, 5, 100\]: it must be percentages that rise to 100"),
        (["serve.canary.shadow=true"], "shadow needs a Gateway, which copies the requests: set serve.canary.gateway"),
    ],
)
def test_a_canary_that_cannot_be_is_refused(sets: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load_config(GOLDEN / "config.yaml", sets=sets, environment={})


@pytest.mark.parametrize("status, cleans", [("Succeeded", False), ("Failed", True), ("Error", True)])
def test_a_workflow_that_fails_leaves_no_training_job(
    status: str, cleans: bool, spec: dict[str, Any], templates: dict[str, dict[str, Any]]
) -> None:
    cleanup = tasks(templates[spec["onExit"]])["cleanup"]
    left, _, right = substitute(cleanup["when"], {"workflow.status": status}).partition(" != ")
    assert (left != right) == cleans
    given = {p["name"]: p["value"] for p in cleanup["arguments"]["parameters"]}
    assert given == {"kind": "pytorchjob", "object": "{{workflow.name}}-train"}
    assert templates[cleanup["template"]]["resource"]["flags"] == [
        "{{inputs.parameters.kind}}",
        "{{inputs.parameters.object}}",
        "--cascade=foreground",
    ]


@pytest.mark.parametrize("name", ["prepare", "evaluate", "release", "verify", "report"])
def test_every_input_and_output_of_a_step_is_in_its_template(name: str, templates: dict[str, dict[str, Any]]) -> None:
    module, template = load(f"steps.{name}"), templates[name]
    args = template["container"]["args"]
    for field, info in module.Inputs.model_fields.items():
        kind = "artifacts" if is_artifact(info) else "parameters"
        assert field in {each["name"] for each in template["inputs"][kind]}
        assert sum(arg.startswith(f"{flag(field)}={{{{inputs.{kind}.{field}") for arg in args) == 1
    for field, info in module.Outputs.model_fields.items():
        kind = "artifacts" if is_artifact(info) else "parameters"
        assert f"{field}={{{{outputs.{kind}.{field}.path}}}}" in args


def test_an_artifact_is_found_where_it_was_left(templates: dict[str, dict[str, Any]], objects: dict[str, Any]) -> None:
    """Steps and the training job meet at keys of the store: a resource template has no artifacts."""
    left, taken = set(), set()
    for task in [task for name in DAGS for task in tasks(templates[name]).values()]:
        arguments = task.get("arguments", {})
        known = {f"inputs.parameters.{p['name']}": p["value"] for p in arguments.get("parameters", [])}
        for artifact in templates[task["template"]].get("outputs", {}).get("artifacts", []):
            assert artifact["archive"] == {"none": {}}
            left.add(substitute(substitute(artifact["s3"]["key"], known), WORKFLOW))
        for artifact in arguments.get("artifacts", []):
            assert artifact["archive"] == {"none": {}}
            taken.add(substitute(artifact["s3"]["key"], WORKFLOW))
    worker = objects["PyTorchJob"]["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]
    assert {"--dataset=cards-x7k2p/prepare/dataset", "--out=cards-x7k2p/train/model"} <= set(worker["args"])
    assert taken == left | {"cards-x7k2p/train/model"}


def test_the_workflow_says_what_came_out(templates: dict[str, dict[str, Any]]) -> None:
    exported = {
        parameter["globalName"]
        for template in templates.values()
        for parameter in template.get("outputs", {}).get("parameters", [])
        if "globalName" in parameter
    }
    assert exported == {"run_id", "digest", "verdict", "reason", "metrics", "model_sha256"}


@pytest.mark.parametrize("code, again", [("1", True), ("137", True), ("-1", True), ("65", False), ("78", False)])
def test_what_a_retry_cannot_cure_is_not_tried_again(
    code: str, again: bool, templates: dict[str, dict[str, Any]]
) -> None:
    retry = templates["prepare"]["retryStrategy"]
    assert retry["retryPolicy"] == "Always" and retry["limit"] == 4
    assert truth(retry["expression"], {"lastRetry": {"exitCode": code}}) is again


def test_a_lost_pod_of_the_training_step_finds_the_job_again_and_a_failed_job_is_final(
    templates: dict[str, dict[str, Any]],
) -> None:
    train = templates["train"]
    assert train["resource"]["action"] == "apply" and train["resource"]["setOwnerReference"] is True
    assert "activeDeadlineSeconds" not in train and "timeout" not in train  # it would count per attempt
    expression = train["retryStrategy"]["expression"]
    failed = "failure condition 'status.conditions.1.type==Failed' evaluated true"

    def again(message: str, retries: int) -> bool:
        return truth(expression, expanded({"lastRetry.message": message, "retries": str(retries)}))

    assert not again(f"main: Error (exit code 64): {failed}", 0)
    assert again("pod deleted", 500) and again("OOMKilled (exit code 137)", 500), "its job trains on"
    refused = "main: Error (exit code 64): no more retries Error from server"
    assert again(f"{refused} (InternalError): failed calling webhook: connection refused", 500)
    assert again(f"{refused} (Forbidden): may not", 4) and not again(f"{refused} (Forbidden): may not", 5)
    assert train["retryStrategy"]["limit"] > 1000 and train["retryStrategy"]["backoff"] == {"duration": "10s"}


def test_the_pods_that_watch_jobs_have_requests_and_outlive_the_preemptible_nodes() -> None:
    nodes = {"preset": "karpenter-spot", "priority_class": "high"}
    loaded = load_config(GOLDEN / "config.yaml", [f"cluster.pods.train={json.dumps(nodes)}"], {}).config
    templates = render_manifest(loaded)["spec"]["templates"]
    for template in (template for template in templates if "resource" in template):
        (main,) = json.loads(template["podSpecPatch"])["containers"]
        assert main["name"] == "main" and main["resources"]["requests"]["memory"] == "256Mi"
        (term,) = template["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"][
            "nodeSelectorTerms"
        ]
        assert term["matchExpressions"] == [
            {"key": "karpenter.sh/capacity-type", "operator": "NotIn", "values": ["spot"]}
        ]
        assert template["priorityClassName"] == "high", "else the workers that it watches push it away"


def test_the_longest_names_fit_kubernetes() -> None:
    name = "a" * 30
    config = load_config(GOLDEN / "config.yaml", [f"name={name}"], environment={}).config
    for kind in ("workflow", "template", "cron"):
        assert lint(render_manifest(config, kind)) == []
    assert len(f"{name}-1700000000-train-worker-99") <= 63


def test_a_tag_in_a_config_that_nothing_fills_is_found() -> None:
    loaded = load_config(GOLDEN / "config.yaml", ["data.source=s3://a/{{inputs.parameters.b}}"], {}).config
    assert [finding.rule for finding in lint(render_manifest(loaded))] == ["tag"]


# what Kubernetes gets


def round_trip(model: Any, value: Any) -> None:
    assert model.model_validate(value).model_dump(exclude_none=True, by_alias=True) == value


def pods(objects: dict[str, Any]) -> dict[str, dict[str, Any]]:
    replicas = objects["PyTorchJob"]["spec"]["pytorchReplicaSpecs"]
    specs = {name: replica["template"]["spec"] for name, replica in replicas.items()}
    return specs | {"Deployment": objects["Deployment"]["spec"]["template"]["spec"]}


@pytest.mark.parametrize("name", ["Master", "Worker", "Deployment"])
def test_a_pod_holds_only_fields_that_kubernetes_knows(name: str, objects: dict[str, Any]) -> None:
    pod = pods(objects)[name]
    container = dict(pod["containers"][0])
    probes = {key: container.pop(key) for key in list(container) if key.endswith("Probe")}
    round_trip(m.Container, container)
    for probe in probes.values():
        plain = {**probe, "httpGet": {**probe["httpGet"], "port": 8080}}  # the model knows no named ports
        assert set(m.Probe.model_validate(plain).model_dump(exclude_none=True, by_alias=True)) == set(plain)
    for volume in pod["volumes"]:
        round_trip(m.Volume, volume)
    for toleration in pod.get("tolerations", []):
        round_trip(m.Toleration, toleration)
    round_trip(m.PodSecurityContext, pod["securityContext"])


def test_a_pod_can_write_in_one_place_only_a_worker_in_memory_and_its_cache_too(
    objects: dict[str, Any], spec: dict[str, Any]
) -> None:
    """The rest of what a pod may and may not: tests/rekindle/cluster/test_platform.py."""
    steps = [template["container"] for template in spec["templates"] if "container" in template]
    for container in [pod["containers"][0] for pod in pods(objects).values()] + steps:
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        more = ["/dev/shm", "/tmp/cache"] if "rekindle.training.launch.launcher" in container["args"] else []
        assert [mount["mountPath"] for mount in container["volumeMounts"]] == ["/tmp", *more]
        assert container["envFrom"][0] == {"configMapRef": {"name": "rekindle"}}
        name = "rekindle-serving" if "steps.serve" in container["args"] else "rekindle-s3"
        assert container["envFrom"][1]["secretRef"] == {"name": name, "optional": True}


def test_each_kind_of_pod_gets_its_own_resources_and_place(objects: dict[str, Any]) -> None:
    worker, master, server = (pods(objects)[name] for name in ("Worker", "Master", "Deployment"))
    spot = {"karpenter.sh/capacity-type": "spot"}  # of its preset
    assert worker["nodeSelector"] == spot and "nodeSelector" not in master
    assert worker["containers"][0]["resources"] == {
        "requests": {"cpu": "4", "memory": "8Gi", "ephemeral-storage": "4Gi"},
        "limits": {"memory": "8Gi", "nvidia.com/gpu": "1"},
    }
    assert server["priorityClassName"] == "serving"
    assert server["containers"][0]["resources"]["limits"] == {"memory": "3Gi"}
    lost = [t for t in worker["tolerations"] if t.get("tolerationSeconds")]
    assert {t["key"].partition("/")[2] for t in lost} == {"not-ready", "unreachable"}
