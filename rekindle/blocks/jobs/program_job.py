"""A job of another framework whose pods run a training program: each pod runs the agent of the
program, and the leading pod also runs the coordinator.

The number of pods is fixed, since the environment that the training operator sets for the framework
names all of them. If a pod is lost, all pods start the program again from its newest checkpoint.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from argolocal.manifest.training_jobs import JOB_VERSION, JOBS, pod_name
from rekindle.blocks.jobs import gang
from rekindle.blocks.jobs.kubeflow import (
    FRAMEWORKS,
    Replica,
    check_replicas,
    omit_account,
    replica_spec,
    role_pod,
    run_policy,
)
from rekindle.blocks.jobs.members import (
    METRICS_PORTS,
    MemberCommands,
    coordinator_variables,
    member_spec,
)
from rekindle.blocks.pod_settings import Manifest
from rekindle.blocks.settings import ClusterConfig, PodConfig
from rekindle.kubernetes_names import REKINDLE_COORDINATOR, REKINDLE_ROLE_RANK, REKINDLE_SERVER
from rekindle.training.spec import TrainConfig

# Unless its restartPolicy is OnFailure, a Launcher that exits fails the MPIJob. With OnFailure, the
# kubelet restarts the Launcher after every error, and the job fails after this number of restarts.
LAUNCHER_RESTARTS = 3


@dataclass(frozen=True)
class ProgramJob:
    """The settings of one job. `counts`: number of pods by role; `pod`: settings of the pods;
    `spec`: additional fields of the job's spec."""

    kind: str
    counts: Mapping[str, int]
    pod: PodConfig
    spec: Mapping[str, object]

    @property
    def roles(self) -> list[str]:
        """The roles whose pods run the program, in the order of ranks. Roles whose programs end by
        themselves come first."""
        framework = FRAMEWORKS[self.kind]
        completing = [role for role in framework.completing_roles if self.counts.get(role)]
        others = [
            role
            for role, rule in framework.roles.items()
            if role not in completing and self.counts.get(role) and not rule.is_idle
        ]
        return [*completing, *others]

    @property
    def members(self) -> int:
        """Number of pods that run the program."""
        return sum(self.counts[role] for role in self.roles)

    def check(self, name: str) -> None:
        """Raise ConfigError if the operator would reject the job `name`, or if the job could never
        complete."""
        check_replicas(self.kind, name, self._replicas())

    def manifest(
        self, name: str, train: TrainConfig, cluster: ClusterConfig, commands: MemberCommands
    ) -> Manifest:
        """Return the job `name`, which has at most 50 characters, because the names of its pods are
        longer."""
        policy = run_policy(cluster, self.pod)
        # the coordinator enforces the time limit of an attempt
        policy["activeDeadlineSeconds"] = 3600 * cluster.deadline_hours
        if self.kind == "MPIJob":
            policy["backoffLimit"] = LAUNCHER_RESTARTS

        specs: dict[str, Manifest] = {}
        for role, replica in self._replicas().items():
            if role in self.roles:
                pod_spec = self._member_spec(name, role, cluster, commands)
            else:
                pod_spec = role_pod(self.kind, role, replica, cluster)
            restarts = "OnFailure" if role == "Launcher" else "ExitCode"
            specs[role] = replica_spec(replica.count, restarts, self.pod, pod_spec)

        return {
            "apiVersion": JOB_VERSION,
            "kind": self.kind,
            "metadata": gang.job_metadata(name, cluster),
            "spec": {"runPolicy": policy, JOBS[self.kind].replicas_field: specs, **self.spec},
        }

    def _replicas(self) -> dict[str, Replica]:
        return {role: Replica(self.pod, [], count) for role, count in self.counts.items()}

    def _member_spec(
        self, name: str, role: str, cluster: ClusterConfig, commands: MemberCommands
    ) -> Manifest:
        """Return the PodSpec of a role whose pods run the program."""
        leader = self.roles[0]
        previous_roles = self.roles[: self.roles.index(role)]
        variables = {
            REKINDLE_COORDINATOR: pod_name(name, leader),
            REKINDLE_ROLE_RANK: str(sum(self.counts[role] for role in previous_roles)),
        }
        if role not in FRAMEWORKS[self.kind].completing_roles:
            variables[REKINDLE_SERVER] = "yes"

        ports: list[Manifest] = []
        if role == leader:
            variables.update(coordinator_variables(self.pod))
            ports = METRICS_PORTS

        job = JOBS[self.kind]
        pod = self.pod.on_demand() if role in job.leader_roles else self.pod
        spec = member_spec(name, pod, cluster, commands, job.container_name, variables, ports=ports)
        return omit_account(self.kind, role, spec)
