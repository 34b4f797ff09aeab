"""Kubeflow's jobs: replicas by role under one policy. What a kind is, is data (`Framework`), in a file of its own.

    train = cluster.pod("train")
    job = tf_job("{{workflow.name}}-train", {"Worker": Replica(train, ["-m", "cards.train"], count=4)}, cluster)
    apply("train", job, success=SUCCESS, failure=FAILURE, owned=True, retry=retries(5))

Source: Kubeflow training operator 1.9: common_types.go, common/job.go, common/pod.go, core/status.go, util/status.go.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from rekindle.blocks.jobs import gang
from rekindle.blocks.pod import OF_WORKFLOW, Manifest, container, pod_spec
from rekindle.blocks.settings import ClusterConfig, PodConfig
from rekindle.errors import ConfigError, did_you_mean

# Conditions are appended, Running and Restarting replace each other, Created is the first: Failed is one of 1..4.
FAILED = tuple(f"status.conditions.{i}.type == Failed" for i in range(1, 5))
GRACE = 60  # seconds in which a worker leaves in order
RESTARTS = 10  # of each pod in place, on average, until a job that nobody else judges is given up


@dataclass(frozen=True)
class Replica:
    """`count` pods that run `COMMAND ARGS`, with the image, resources and nodes of `pod`."""

    pod: PodConfig
    args: list[str]
    count: int = 1
    command: tuple[str, ...] = ("python",)


class Role(NamedTuple):
    """How many of a role there may be, and what is done about a pod that ends.

    OnFailure: the kubelet starts the container again, the operator makes a pod anew that was evicted. ExitCode: codes
    1-127 fail the job, 128 and above (a signal, a drain) make the pod anew.
    """

    restart: str = "OnFailure"
    least: int = 0
    most: int = 1000


@dataclass(frozen=True)
class Framework:
    """One kind of job. The pod that leads is never put on preemptible nodes."""

    kind: str
    replicas: str  # the key of its roles in `spec`
    container: str  # the name that its container must have
    roles: Mapping[str, Role]
    lead: str = ""  # the role on which the others depend


def replica(count: int, restart: str, pod: Manifest) -> Manifest:
    """One entry of a job's replica specs."""
    return {"replicas": count, "restartPolicy": restart, "template": {"metadata": {"labels": OF_WORKFLOW}, "spec": pod}}


def run_policy(cluster: ClusterConfig, workers: PodConfig, least: int | None = None) -> Manifest:
    """What ends a job. Its deadline is a backstop only: the workflow has one of its own."""
    policy = gang.policy(cluster, workers, least)
    return {
        "cleanPodPolicy": "Running",
        "activeDeadlineSeconds": 60 * workers.deadline_minutes,
        **({"schedulingPolicy": policy} if policy else {}),
    }


def metadata(name: str, cluster: ClusterConfig) -> Manifest:
    """Of a job's object."""
    return {"name": name, "labels": OF_WORKFLOW | gang.labels(cluster)}


def training_job(
    framework: Framework, name: str, replicas: Mapping[str, Replica], cluster: ClusterConfig, **spec: Any
) -> Manifest:
    """The job `name` (at most 50 characters: its pods' names are longer); `spec` are fields of the kind's own.

    Raises ConfigError for a role that the kind does not have, or not so often.
    """
    check(framework, name, replicas)
    specs = {
        role: replica(one.count, framework.roles[role].restart, pod(framework, role, one, cluster))
        for role, one in replicas.items()
    }
    workers = replicas.get("Worker") or next(iter(replicas.values()))
    limit = RESTARTS * sum(one.count for one in replicas.values())
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": framework.kind,
        "metadata": metadata(name, cluster),
        "spec": {
            "runPolicy": run_policy(cluster, workers.pod) | {"backoffLimit": limit},
            framework.replicas: specs,
            **spec,
        },
    }


def check(framework: Framework, name: str, replicas: Mapping[str, Replica]) -> None:
    """Raises ConfigError for what the operator would refuse, or never finish."""
    where = f"{framework.kind} {name}"
    for role in replicas.keys() - framework.roles.keys():
        known = f" It has {', '.join(framework.roles)}."
        raise ConfigError(f"{where} has no role {role}.{did_you_mean(role, set(framework.roles)) or known}")
    for role, rule in framework.roles.items():
        count = replicas[role].count if role in replicas else 0
        if not rule.least <= count <= rule.most:
            limits = f"{rule.least}" if rule.least == rule.most else f"at least {rule.least} and at most {rule.most}"
            raise ConfigError(f"{where} has {count} {role}: there must be {limits}.")


def pod(framework: Framework, role: str, one: Replica, cluster: ClusterConfig, **more: Any) -> Manifest:
    """The PodSpec of a role's pods."""
    config = one.pod.steady() if role == framework.lead else one.pod
    runs = container(framework.container, config, one.args, command=list(one.command))
    return pod_spec(config, cluster.pod_account, [runs], terminationGracePeriodSeconds=GRACE, **more)
