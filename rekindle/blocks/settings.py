"""The `cluster:` section of a config: what the pods get on Kubernetes. A run on this machine ignores all of it."""

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, ConfigDict, Field, model_validator

from rekindle.blocks.presets import find, merged, presets
from rekindle.sections import Section

CPU = r"^(\d+(\.\d+)?|\d+m)?$"
MEMORY = r"^\d+(\.\d+)?([kMGTPE]|[KMGTPE]i)?$"
# labels of nodes whose GPUs are shared: GKE's, and that of NVIDIA's plugin
GKE_PARTS = {"cloud.google.com/gke-gpu-sharing-strategy", "cloud.google.com/gke-gpu-partition-size"}
SHARING = "nvidia.com/gpu.sharing-strategy"
Names = Annotated[list[str], BeforeValidator(lambda value: [value] if isinstance(value, str) else value)]


class PodConfig(Section):
    """What one kind of pod gets. Whatever is not set here has a default of its kind."""

    model_config = ConfigDict(coerce_numbers_to_str=True)

    preset: Names = Field(default_factory=list, description="name or names of presets (rekindle/blocks/presets.yaml)")
    image: str = Field("", description="image of these pods (empty: cluster.image)")
    cpu: str = Field(
        "1",
        pattern=CPU,
        description="cores requested, such as 2 or 500m (empty: train.threads, or serve.processes times serve.threads)",
    )
    memory: str = Field("2Gi", pattern=MEMORY, description="memory requested, such as 8Gi, and the most they may use")
    disk: str = Field(
        "2Gi", pattern=MEMORY, description="local disk requested, such as 20Gi, and the most they may keep in /tmp"
    )
    gpus: int = Field(0, ge=0, description="NVIDIA GPUs")
    gpu_resource: str = Field("nvidia.com/gpu", description="what a GPU is called, such as nvidia.com/mig-1g.10gb")
    node_selector: dict[str, str] = Field(default_factory=dict, description="labels of the nodes these pods may run on")
    preemptible: dict[str, str] = Field(
        default_factory=dict,
        description="labels of preemptible nodes, on which these pods run; those that lead a job never do",
    )
    avoid: dict[str, str] = Field(default_factory=dict, description="labels of nodes these pods must not run on")
    tolerations: list[dict[str, Any]] = Field(default_factory=list, description="taints they tolerate, as in a PodSpec")
    spread: list[str] = Field(default_factory=list, description="node labels over whose values the pods are spread")
    node_lost_seconds: int | None = Field(None, ge=0, description="after this time a silent node's pods are replaced")
    priority_class: str = Field("", description="PriorityClass (empty: the cluster's default)")
    labels: dict[str, str] = Field(default_factory=dict, description="labels of the pods, beside ours")
    annotations: dict[str, str] = Field(default_factory=dict, description="annotations of the pods")
    grace_seconds: int = Field(
        60, ge=1, description="pods of jobs: from SIGTERM to SIGKILL; preemptible nodes may give less than this"
    )
    notice: Literal["", "aws", "azure"] = Field(
        "", description="workers leave when this cloud's metadata service says that their node is about to be taken"
    )
    deadline_minutes: int = Field(
        120, ge=1, description="one attempt may take this long; the time in which it waits for nodes does not count"
    )

    def steady(self) -> "PodConfig":
        """The same for the pod that leads a job: never on preemptible nodes."""
        nodes = {key: value for key, value in self.node_selector.items() if key not in self.preemptible}
        changes = {"node_selector": nodes, "preemptible": {}, "avoid": self.avoid | self.preemptible}
        return self.model_copy(update=changes)


SEVERAL = ("train", "coordinator", "serve")  # kinds of which more than one pod runs, or beside its workers
STEADY = ("coordinator", "executor")  # kinds that outlive the workers
DEFAULTS: dict[str, dict[str, Any]] = {
    "prepare": {"cpu": "2", "memory": "8Gi", "disk": "4Gi"},
    "train": {"cpu": "", "memory": "8Gi", "disk": "4Gi", "deadline_minutes": 24 * 60, "node_lost_seconds": 30},
    "coordinator": {"cpu": "250m", "memory": "512Mi", "disk": "100Mi", "node_lost_seconds": 30},
    # Argo's own, which applies an object and watches a job
    "executor": {"cpu": "50m", "memory": "256Mi", "disk": "100Mi", "node_lost_seconds": 30},
    "evaluate": {"cpu": "2", "memory": "8Gi", "disk": "4Gi"},
    "release": {},
    "serve": {"cpu": "", "spread": ["kubernetes.io/hostname"]},
    "verify": {"memory": "4Gi"},
    "canary": {"cpu": "250m", "memory": "1Gi", "deadline_minutes": 24 * 60},
    "report": {"cpu": "250m", "memory": "1Gi", "deadline_minutes": 10},
    "notify": {"cpu": "250m", "memory": "1Gi", "deadline_minutes": 10},
}


class ClusterConfig(Section):
    """Where and as whom the pods run."""

    image: str = Field("rekindle:0.1", description="image of every pod; name it by digest to record what ran")
    namespace: str = Field("", description="namespace of the workflow (empty: that of the kubectl context)")
    service_account: str = Field("rekindle", description="of the workflow's pods; may manage what a workflow applies")
    pod_account: str = Field("default", description="ServiceAccount of training pods, which get no token")
    serving_account: str = Field("rekindle-serving", description="ServiceAccount of what serves, which gets no token")
    presets: dict[str, PodConfig] = Field(default_factory=dict, description="presets of your own, by name")
    pods: dict[str, PodConfig] = Field(
        default_factory=dict,
        description=f"by kind of pod ({', '.join(DEFAULTS)}, or the name of a step): image, resources, nodes",
    )
    backend: Literal["pytorchjob", "jobset", "trainjob"] = Field(
        "pytorchjob",
        description="kind of the training job: Kubeflow's training operator 1.9, JobSet 0.12, or Kubeflow Trainer 2.3",
    )
    restart_job: bool = Field(
        False, description="JobSet's feature gate RestartJob is on: a lost pod is back after 1-3 seconds instead of 10"
    )
    gang: str = Field("", description="start a job whole: volcano, coscheduling or kueue (empty: as they come)")
    queue: str = Field("", description="the queue of Volcano or Kueue that jobs wait in")
    queue_priority: str = Field("", description="Kueue's WorkloadPriorityClass of the jobs (empty: its default)")
    harvest: bool = Field(
        False, description="workers beyond train.min_workers are pods beside the job, which take what is idle"
    )
    harvest_priority: str = Field(
        "", description="of those pods: Kueue's WorkloadPriorityClass, without cluster.gang a PriorityClass"
    )
    cache: str = Field("", description="PersistentVolumeClaim that keeps datasets near the training pods (empty: none)")
    retries: int = Field(4, ge=0, description="times a failed step is tried again, after 2, 6, 18, 54 seconds")
    deadline_hours: int = Field(
        168, ge=1, description="a whole workflow may take this long, with all that it waits for nodes and queues"
    )
    keep_days: int = Field(14, ge=1, description="a finished workflow is removed from the cluster after this time")

    def pod(self, name: str) -> PodConfig:
        """The settings of one kind of pod: its own, over its presets, over the defaults."""
        own = self.pods[name].model_dump(exclude_unset=True) if name in self.pods else {}
        known = presets()["pods"] | {key: pod.model_dump(exclude_unset=True) for key, pod in self.presets.items()}
        layers = [find(preset, f"cluster.pods.{name}.preset", known) for preset in own.get("preset", ())]
        values = merged({"image": self.image}, DEFAULTS.get(name, {}), *layers, own)
        if name in STEADY:
            train = self.pod("train")
            values = merged({"priority_class": train.priority_class}, values, {"avoid": train.preemptible})
        values["node_selector"] = values.get("node_selector", {}) | values.get("preemptible", {})
        return PodConfig.model_validate(values)

    def origin(self, name: str, field: str) -> str:
        """Where a field of `pod(name)` comes from; "" if from cluster.pods itself."""
        own = self.pods.get(name, PodConfig.model_validate({}))
        if field in own.model_fields_set:
            return ""
        known = presets()["pods"] | {key: pod.model_dump(exclude_unset=True) for key, pod in self.presets.items()}
        for preset in reversed(own.preset):
            if field in known[preset] or (field == "node_selector" and "preemptible" in known[preset]):
                return f"preset {preset}"
        if field == "image":
            return "cluster.image"
        derived = name in STEADY and field in ("avoid", "priority_class") and getattr(self.pod(name), field)
        return "cluster.pods.train" if derived else "default"

    @model_validator(mode="after")
    def _sound(self) -> Self:
        """What the presets come to, told while the config is read and not when it is rendered."""
        if self.restart_job and self.backend != "jobset":
            raise ValueError(
                f"cluster.restart_job is for JobSet, and cluster.backend is {self.backend}. Leave one of them out"
            )
        if self.harvest_priority and not self.harvest:
            raise ValueError(
                f"cluster.harvest_priority is {self.harvest_priority}, and cluster.harvest is off. Set it to true, or "
                "leave the priority out"
            )
        if self.harvest and self.gang not in ("", "kueue"):
            raise ValueError(
                f"cluster.harvest is on, and cluster.gang is {self.gang}: only Kueue queues pods one by one beside a "
                "job. Set cluster.gang to kueue, or leave it out"
            )
        if self.queue_priority and self.gang != "kueue":
            raise ValueError(
                f"cluster.queue_priority is {self.queue_priority}: it is Kueue's. Set cluster.gang to kueue, or "
                "cluster.pods.train.priority_class, which is a PriorityClass of pods"
            )
        if self.gang and "labels" in find(self.gang, "cluster.gang", presets()["gang"]) and not self.queue:
            raise ValueError(f"cluster.gang is {self.gang}: it needs cluster.queue, the queue that jobs wait in")
        for name in self.pods:
            pod = self.pod(name)
            part = "/mig-" in pod.gpu_resource or ".shared" in pod.gpu_resource or GKE_PARTS & pod.node_selector.keys()
            if pod.gpus > 1 and part:
                raise ValueError(
                    f"cluster.pods.{name}.gpus is {pod.gpus}: of {pod.gpu_resource}, a part of a GPU, a pod gets one. "
                    "Set it to 1, and start more workers"
                )
            # source: NVIDIA's device plugin, internal/plugin/mps.go; members.SHARED_MOUNT
            if name == "train" and pod.node_selector.get(SHARING) == "mps":
                raise ValueError(
                    "cluster.pods.train is to share its GPU by MPS, whose memory NVIDIA's device plugin mounts at "
                    "/dev/shm of the container, where a worker keeps its newest states. Take gpu-time-slicing or a mig "
                    "preset; gpu-mps is for the other pods"
                )
            if pod.spread and name not in SEVERAL:
                raise ValueError(
                    f"cluster.pods.{name} is to be spread over {', '.join(pod.spread)}: it is one pod, with nothing to "
                    f"be kept apart from. Leave its preset or spread out; {', '.join(SEVERAL)} can have it"
                )
            if name in STEADY and pod.preemptible:
                raise ValueError(
                    f"cluster.pods.{name} is to run on preemptible nodes ({pod.preemptible}): it is what outlives "
                    "them. Leave its preset out"
                )
        for name in {"train", *self.pods}:
            if (minutes := self.pod(name).deadline_minutes) > 60 * self.deadline_hours:
                raise ValueError(
                    f"cluster.deadline_hours is {self.deadline_hours}: a whole workflow would end before the "
                    f"{minutes} minutes of cluster.pods.{name}.deadline_minutes. Raise it, or lower the other"
                )
        return self
