"""Every kind is one that its API server takes, and its pods get through where only hardened ones do."""

import json

import pytest

from rekindle.blocks.jobs.kubeflow import Replica, training_job
from rekindle.blocks.settings import ClusterConfig
from rekindle.blocks.volume import CACHE
from rekindle.errors import ConfigError
from rekindle.training import data
from tests.kinds import kinds, pod_specs
from tests.rekindle.blocks.schema import SCHEMAS, wrong

KINDS = kinds()
SPOT = {"preemptible": {"capacity": "spot"}}
CUSTOM = sorted(file.stem.replace("-", "/") for file in SCHEMAS.glob("*.json"))


@pytest.mark.parametrize("kind", CUSTOM)
def test_the_api_server_knows_every_field_we_send(kind: str) -> None:
    schema = json.loads((SCHEMAS / f"{kind.replace('/', '-')}.json").read_text())
    everything = {"gang": "volcano", "queue": "q", "cache": "c", "presets": {"far": SPOT}}
    for cluster in ({}, everything):
        assert list(wrong(kinds(**cluster)[kind].manifest, schema)) == []
    assert list(wrong(KINDS[kind].manifest | {"spec": {"replicsa": 1}}, schema))  # the schema says something


@pytest.mark.parametrize("kind", [kind for kind in KINDS if pod_specs(KINDS[kind].manifest)])
def test_a_restricted_namespace_takes_its_pods(kind: str) -> None:
    """Source: the Pod Security Standards, profile restricted."""
    for pod in pod_specs(KINDS[kind].manifest):
        for container in pod["containers"]:
            security = pod.get("securityContext", {}) | container["securityContext"]
            assert security["runAsNonRoot"] and security["runAsUser"] > 0
            assert security["allowPrivilegeEscalation"] is False
            assert security["capabilities"] == {"drop": ["ALL"]}
            assert security["seccompProfile"] == {"type": "RuntimeDefault"}
            assert {"cpu", "memory"} <= container["resources"]["requests"].keys()
            assert "memory" in container["resources"]["limits"]
        assert all(volume.keys() & {"emptyDir", "persistentVolumeClaim"} for volume in pod["volumes"])


@pytest.mark.parametrize("kind", [kind for kind in KINDS if pod_specs(KINDS[kind].manifest)])
def test_no_pod_gets_a_token_it_does_not_use(kind: str) -> None:
    tokens = [pod.get("automountServiceAccountToken") for pod in pod_specs(KINDS[kind].manifest)]
    needed = 1 if kind == "MPIJob" else 0  # its launcher reaches the workers by `kubectl exec`
    assert [token for token in tokens if token is not False] == [None] * needed


LEADS = {"PyTorchJob": 1, "TFJob": 1, "XGBoostJob": 1, "PaddleJob": 1, "JAXJob": 0, "MPIJob": 1}


@pytest.mark.parametrize("kind, leads", LEADS.items())
def test_what_leads_a_job_is_not_preempted_and_the_others_may_be(kind: str, leads: int) -> None:
    pods = {"train": {**SPOT, "cpu": "1"}}
    found = pod_specs(kinds(pods=pods)[kind].manifest)
    assert [pod.get("nodeSelector") for pod in found] == [None] * leads + [{"capacity": "spot"}] * (len(found) - leads)
    for pod in found[:leads]:
        required = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        (term,) = required["nodeSelectorTerms"]
        assert term["matchExpressions"] == [{"key": "capacity", "operator": "NotIn", "values": ["spot"]}]


def test_a_lost_pod_does_not_fail_the_job() -> None:
    policies = {
        kind: {role["restartPolicy"] for key, role in _replicas(KINDS[kind].manifest["spec"])}
        for kind in ("TFJob", "XGBoostJob", "PaddleJob", "JAXJob")
    }
    restarted = {"OnFailure"}
    # for any other policy the operator takes an evicted pod of an XGBoostJob for the job's failure
    assert policies == {
        "TFJob": restarted,
        "XGBoostJob": {"ExitCode"},
        "PaddleJob": restarted,
        "JAXJob": restarted,
    }
    for kind in ("Job", "Job/search"):
        ignored = KINDS[kind].manifest["spec"]["podFailurePolicy"]["rules"][0]
        assert ignored == {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}


def _replicas(spec: dict) -> list:
    (specs,) = (value for key, value in spec.items() if key.endswith("ReplicaSpecs"))
    return list(specs.items())


def test_one_bad_trial_does_not_end_the_search() -> None:
    spec = KINDS["Job/search"].manifest["spec"]
    assert (spec["completions"], spec["maxFailedIndexes"], spec["backoffLimitPerIndex"]) == (3, 1, 1)
    assert "backoffLimit" not in spec  # it would count all trials' failures together
    assert [rule["action"] for rule in spec["podFailurePolicy"]["rules"]] == ["Ignore", "FailIndex", "Ignore"]


CLUSTER = ClusterConfig.model_validate({})
ONE = Replica(CLUSTER.pod("train"), ["-c", "pass"])
TWO = Replica(CLUSTER.pod("train"), ["-c", "pass"], count=2)


def test_a_job_that_could_never_end_or_start_is_not_built() -> None:
    with pytest.raises(ConfigError, match="XGBoostJob x has 0 Master: there must be 1"):
        training_job("XGBoostJob", "x", {"Worker": TWO}, CLUSTER)
    with pytest.raises(ConfigError, match="TFJob x has 2 Chief: there must be at least 0 and at most 1"):
        training_job("TFJob", "x", {"Chief": TWO}, CLUSTER)
    with pytest.raises(ConfigError, match=r'TFJob x has no role Worke\. Did you mean "Worker"'):
        training_job("TFJob", "x", {"Worke": ONE}, CLUSTER)
    with pytest.raises(ConfigError, match="neither a Chief nor a Worker"):
        training_job("TFJob", "x", {"PS": ONE}, CLUSTER)


def test_a_kind_that_nothing_runs_any_more_is_refused_with_the_reason() -> None:
    with pytest.raises(ConfigError, match=r"MXNet is retired: train with a PyTorchJob"):
        training_job("MXJob", "x", {}, CLUSTER)


def test_datasets_are_looked_for_where_the_volume_is() -> None:
    assert CACHE == data.CACHE
    worker = pod_specs(kinds(cache="datasets")["PyTorchJob"].manifest)[1]
    (container,) = worker["containers"]
    path = {each["name"]: each.get("value") for each in container["env"]}[CACHE]
    (volume,) = [mount["name"] for mount in container["volumeMounts"] if mount["mountPath"] == path]
    assert {"name": volume, "persistentVolumeClaim": {"claimName": "datasets"}} in worker["volumes"]
