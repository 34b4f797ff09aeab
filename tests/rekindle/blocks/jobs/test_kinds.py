"""The API server accepts objects of every kind, and their pods in a namespace with PodSecurity
`restricted`."""

import pytest

from rekindle.blocks.jobs.kubeflow import Replica, build_training_job
from rekindle.blocks.settings import ClusterConfig
from rekindle.errors import ConfigError
from tests.kinds import kinds, pod_specs, program_jobs
from tests.schema import find_errors, schema_of

KINDS = kinds()
SPOT = {"preemptible": {"capacity": "spot"}}


@pytest.mark.parametrize("kind", KINDS)
def test_the_api_server_knows_every_field_of_the_rendered_objects(kind: str) -> None:
    schema = schema_of(KINDS[kind].manifest)
    all_settings = {"gang": "volcano", "queue": "q", "cache": "c", "presets": {"far": SPOT}}
    for cluster in ({}, all_settings):
        assert list(find_errors(kinds(**cluster)[kind].manifest, schema)) == []
    # check that the schema rejects an unknown field
    assert list(find_errors(KINDS[kind].manifest | {"spec": {"replicsa": 1}}, schema))


@pytest.mark.parametrize("kind", program_jobs())
def test_the_api_server_knows_every_field_of_a_job_with_a_program(kind: str) -> None:
    for cluster in ({}, {"gang": "volcano", "queue": "q", "cache": "c"}):
        job = program_jobs(**cluster)[kind]
        assert list(find_errors(job, schema_of(job))) == []


@pytest.mark.parametrize("kind", [kind for kind in KINDS if pod_specs(KINDS[kind].manifest)])
def test_a_restricted_namespace_accepts_the_pods_of_every_kind(kind: str) -> None:
    """The rules are the Pod Security Standards, profile restricted."""
    for pod in pod_specs(KINDS[kind].manifest):
        for container in pod["containers"]:
            security = pod.get("securityContext", {}) | container["securityContext"]
            assert security["runAsNonRoot"]
            assert security["runAsUser"] > 0
            assert security["allowPrivilegeEscalation"] is False
            assert security["capabilities"] == {"drop": ["ALL"]}
            assert security["seccompProfile"] == {"type": "RuntimeDefault"}
            assert {"cpu", "memory"} <= container["resources"]["requests"].keys()
            assert "memory" in container["resources"]["limits"]

        assert all(
            volume.keys() & {"emptyDir", "persistentVolumeClaim"} for volume in pod["volumes"]
        )


@pytest.mark.parametrize("kind", [kind for kind in KINDS if pod_specs(KINDS[kind].manifest)])
def test_pods_get_a_token_only_if_they_need_it(kind: str) -> None:
    tokens = [pod.get("automountServiceAccountToken") for pod in pod_specs(KINDS[kind].manifest)]
    # the Launcher reaches the Workers by `kubectl exec`
    if kind == "MPIJob":
        needed = 1
    else:
        needed = 0
    assert [token for token in tokens if token is not False] == [None] * needed


LEADS = {"PyTorchJob": 1, "TFJob": 1, "XGBoostJob": 1, "PaddleJob": 1, "JAXJob": 0, "MPIJob": 1}


@pytest.mark.parametrize("kind, leads", LEADS.items())
def test_only_the_leading_pod_of_a_job_avoids_preemptible_nodes(kind: str, leads: int) -> None:
    pods = {"train": {**SPOT, "cpu": "1"}}
    specs = pod_specs(kinds(pods=pods)[kind].manifest)
    assert [pod.get("nodeSelector") for pod in specs] == [None] * leads + [{"capacity": "spot"}] * (
        len(specs) - leads
    )
    for pod in specs[:leads]:
        required = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        (term,) = required["nodeSelectorTerms"]
        assert term["matchExpressions"] == [
            {"key": "capacity", "operator": "NotIn", "values": ["spot"]}
        ]


def test_a_lost_pod_does_not_fail_the_job() -> None:
    policies = {
        kind: {role["restartPolicy"] for key, role in _list_replicas(KINDS[kind].manifest["spec"])}
        for kind in ("TFJob", "XGBoostJob", "PaddleJob", "JAXJob")
    }
    restarted = {"OnFailure"}
    # with any other restartPolicy, an evicted pod of an XGBoostJob fails the job
    assert policies == {
        "TFJob": restarted,
        "XGBoostJob": {"ExitCode"},
        "PaddleJob": restarted,
        "JAXJob": restarted,
    }


def _list_replicas(spec: dict) -> list:
    (specs,) = (value for key, value in spec.items() if key.endswith("ReplicaSpecs"))
    return list(specs.items())


CLUSTER = ClusterConfig.model_validate({})
ONE_REPLICA = Replica(CLUSTER.pod("train"), ["-c", "pass"])
TWO_REPLICAS = Replica(CLUSTER.pod("train"), ["-c", "pass"], count=2)


def test_a_job_that_could_never_start_or_complete_is_rejected() -> None:
    with pytest.raises(ConfigError, match="XGBoostJob x has 0 Master: there must be 1"):
        build_training_job("XGBoostJob", "x", {"Worker": TWO_REPLICAS}, CLUSTER)
    with pytest.raises(
        ConfigError, match="TFJob x has 2 Chief: there must be at least 0 and at most 1"
    ):
        build_training_job("TFJob", "x", {"Chief": TWO_REPLICAS}, CLUSTER)
    with pytest.raises(ConfigError, match=r'TFJob x has no role Worke\. Did you mean "Worker"'):
        build_training_job("TFJob", "x", {"Worke": ONE_REPLICA}, CLUSTER)
    with pytest.raises(ConfigError, match="neither a Chief nor a Worker"):
        build_training_job("TFJob", "x", {"PS": ONE_REPLICA}, CLUSTER)


def test_a_retired_kind_of_job_is_rejected_with_the_reason() -> None:
    with pytest.raises(ConfigError, match=r"MXNet is retired: train with a PyTorchJob"):
        build_training_job("MXJob", "x", {}, CLUSTER)


def test_workers_look_for_datasets_on_the_mounted_volume() -> None:
    worker = pod_specs(kinds(cache="datasets")["PyTorchJob"].manifest)[1]
    (container,) = worker["containers"]
    path = {each["name"]: each.get("value") for each in container["env"]}["REKINDLE_CACHE"]
    (volume,) = [mount["name"] for mount in container["volumeMounts"] if mount["mountPath"] == path]
    assert {"name": volume, "persistentVolumeClaim": {"claimName": "datasets"}} in worker["volumes"]
