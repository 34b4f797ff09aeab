"""A job of another framework whose pods run a training program: each pod runs the agent of the
program, and the leading pod also runs the coordinator.

The number of pods is fixed, since the environment that the training operator sets for the framework
names all pods. If a pod is lost, all pods start the program again from its newest checkpoint.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from argolocal.manifest.training_jobs import JOB_API_VERSION, JOB_KINDS, make_pod_name
from rekindle.blocks.jobs import gang
from rekindle.blocks.jobs.kubeflow import (
    FRAMEWORKS,
    Replica,
    build_replica_spec,
    build_role_pod,
    build_run_policy,
    check_replicas,
    omit_account,
)
from rekindle.blocks.jobs.members import (
    METRICS_PORTS,
    MemberCommands,
    build_member_spec,
    coordinator_variables,
)
from rekindle.blocks.pod_settings import Manifest
from rekindle.blocks.settings import ClusterConfig, PodConfig
from rekindle.kubernetes_names import REKINDLE_COORDINATOR, REKINDLE_ROLE_RANK, REKINDLE_SERVER
from rekindle.training.spec import TrainConfig

# Unless its restartPolicy is OnFailure, a Launcher that exits fails the MPIJob. With OnFailure, the
# kubelet restarts the Launcher after every error, and the MPIJob fails after LAUNCHER_RESTARTS
# restarts.
LAUNCHER_RESTARTS = 3


@dataclass(frozen=True)
class ProgramJob:
    """The settings of one job of another framework; `kind` is the kind of the Kubernetes object.
    `counts`: number of pods by role; `pod`: settings of the pods; `spec`: additional fields of the
    job's spec."""

    kind: str
    counts: Mapping[str, int]
    pod: PodConfig
    spec: Mapping[str, object]

    @property
    def roles(self) -> list[str]:
        """The roles whose pods run the program, in the order of their ranks: first the roles whose
        programs end by themselves."""
        framework = FRAMEWORKS[self.kind]
        completing_roles = [role for role in framework.completing_roles if self.counts.get(role)]
        other_roles = [
            role
            for role, role_limits in framework.roles.items()
            if role not in completing_roles and self.counts.get(role) and not role_limits.is_idle
        ]
        return [*completing_roles, *other_roles]

    @property
    def members(self) -> int:
        """Number of pods that run the training program."""
        return sum(self.counts[role] for role in self.roles)

    def check(self, name: str) -> None:
        """Raise ConfigError if the operator would reject the job `name`, or if the job could never
        complete."""
        check_replicas(self.kind, name, self._replicas())

    def manifest(
        self, name: str, train_config: TrainConfig, cluster: ClusterConfig, commands: MemberCommands
    ) -> Manifest:
        """Return the job `name`. The name has at most 50 characters, because the names of the pods
        are longer."""
        run_policy_fields = build_run_policy(cluster, self.pod)
        # the coordinator enforces the time limit of an attempt
        run_policy_fields["activeDeadlineSeconds"] = 3600 * cluster.deadline_hours
        if self.kind == "MPIJob":
            run_policy_fields["backoffLimit"] = LAUNCHER_RESTARTS

        replica_specs: dict[str, Manifest] = {}
        for role, replica in self._replicas().items():
            if role in self.roles:
                member_pod = self._member_spec(name, role, cluster, commands)
            else:
                member_pod = build_role_pod(self.kind, role, replica, cluster)
            restart_policy = "OnFailure" if role == "Launcher" else "ExitCode"
            replica_specs[role] = build_replica_spec(
                replica.count, restart_policy, self.pod, member_pod
            )

        return {
            "apiVersion": JOB_API_VERSION,
            "kind": self.kind,
            "metadata": gang.job_metadata(name, cluster),
            "spec": {
                "runPolicy": run_policy_fields,
                JOB_KINDS[self.kind].replicas_field: replica_specs,
                **self.spec,
            },
        }

    def _replicas(self) -> dict[str, Replica]:
        return {role: Replica(self.pod, [], pod_count) for role, pod_count in self.counts.items()}

    def _member_spec(
        self, job_name: str, role: str, cluster: ClusterConfig, commands: MemberCommands
    ) -> Manifest:
        """Return the PodSpec of a role whose pods run the program."""
        leading_role = self.roles[0]
        previous_roles = self.roles[: self.roles.index(role)]
        variables = {
            REKINDLE_COORDINATOR: make_pod_name(job_name, leading_role),
            REKINDLE_ROLE_RANK: str(sum(self.counts[role] for role in previous_roles)),
        }
        if role not in FRAMEWORKS[self.kind].completing_roles:
            variables[REKINDLE_SERVER] = "yes"

        container_ports: list[Manifest] = []
        if role == leading_role:
            variables.update(coordinator_variables(self.pod, commands))
            container_ports = METRICS_PORTS

        job_description = JOB_KINDS[self.kind]
        pod_config = self.pod.on_demand() if role in job_description.leader_roles else self.pod
        pod_spec = build_member_spec(
            job_name,
            pod_config,
            cluster,
            commands,
            job_description.container_name,
            variables,
            ports=container_ports,
        )
        return omit_account(self.kind, role, pod_spec)
