"""The `cluster:` section of a config: what the pods get on Kubernetes. A run on this machine ignores all of it."""

from typing import Any, Literal

from pydantic import ConfigDict, Field

from steps.workload import Section

CPU = r"^(\d+(\.\d+)?|\d+m)?$"
MEMORY = r"^\d+(\.\d+)?([kMGTPE]|[KMGTPE]i)?$"
PodName = Literal["prepare", "train", "coordinator", "evaluate", "release", "serve", "verify", "report"]


class PodConfig(Section):
    """What one kind of pod gets. Whatever is not set here has a default of its kind."""

    model_config = ConfigDict(coerce_numbers_to_str=True)

    image: str = Field("", description="image of these pods (empty: cluster.image)")
    cpu: str = Field("1", pattern=CPU, description="cores requested, such as 2 or 500m (train, empty: train.threads)")
    memory: str = Field("2Gi", pattern=MEMORY, description="memory requested, such as 8Gi, and the most they may use")
    gpus: int = Field(0, ge=0, description="NVIDIA GPUs")
    node_selector: dict[str, str] = Field(default_factory=dict, description="labels of the nodes these pods may run on")
    tolerations: list[dict[str, Any]] = Field(default_factory=list, description="taints they tolerate, as in a PodSpec")
    priority_class: str = Field("", description="PriorityClass (empty: the cluster's default)")
    deadline_minutes: int = Field(120, ge=1, description="one attempt may take this long")


DEFAULTS: dict[str, dict[str, Any]] = {
    "prepare": {"cpu": "2", "memory": "8Gi"},
    "train": {"cpu": "", "memory": "8Gi", "deadline_minutes": 24 * 60},
    "coordinator": {"cpu": "250m", "memory": "512Mi"},
    "evaluate": {"cpu": "2", "memory": "8Gi"},
    "verify": {"memory": "4Gi"},
    "report": {"cpu": "250m", "memory": "1Gi", "deadline_minutes": 10},
}


class ClusterConfig(Section):
    """Where and as whom the pods run."""

    image: str = Field("rekindle:0.1", description="image of every pod; name it by digest to record what ran")
    namespace: str = Field("", description="namespace of the workflow (empty: that of the kubectl context)")
    service_account: str = Field("rekindle", description="of the workflow's pods; may manage what a workflow applies")
    pod_account: str = Field("default", description="ServiceAccount of training and serving pods, which get no token")
    pods: dict[PodName, PodConfig] = Field(default_factory=dict, description="by kind of pod: image, resources, nodes")
    retries: int = Field(4, ge=0, description="times a failed step is tried again, after 2, 6, 18, 54 seconds")
    deadline_hours: int = Field(48, ge=1, description="a whole workflow may take this long")
    keep_days: int = Field(14, ge=1, description="a finished workflow is removed from the cluster after this time")

    def pod(self, name: PodName) -> PodConfig:
        """The settings of one kind of pod, defaults filled in."""
        given = self.pods[name].model_dump(exclude_unset=True) if name in self.pods else {}
        return PodConfig.model_validate({"image": self.image} | DEFAULTS.get(name, {}) | given)
