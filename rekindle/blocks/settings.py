"""The section `cluster` of a config: settings for Kubernetes, which a run on this machine
ignores."""

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, ConfigDict, Field, field_serializer, model_validator

from rekindle.blocks.presets import find_preset, merge_mappings, read_presets
from rekindle.kubernetes_names import SERVING_ACCOUNT
from rekindle.sections import Section

CPU_PATTERN = r"^(\d+(\.\d+)?|\d+m)?$"
MEMORY_PATTERN = r"^\d+(\.\d+)?([kMGTPE]|[KMGTPE]i)?$"
LABEL_PATTERN = r"^([a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?)?$"
# labels of nodes with shared GPUs, set by GKE and by NVIDIA's device plugin
GKE_SHARING_LABELS = {
    "cloud.google.com/gke-gpu-sharing-strategy",
    "cloud.google.com/gke-gpu-partition-size",
}
SHARING_LABEL = "nvidia.com/gpu.sharing-strategy"
Names = Annotated[
    list[str], BeforeValidator(lambda value: [value] if isinstance(value, str) else value)
]


class PodConfig(Section):
    """Settings of one kind of pod. Each kind of pod has its own defaults."""

    model_config = ConfigDict(coerce_numbers_to_str=True)

    preset: Names = Field(
        default_factory=list, description="name or names of presets (rekindle/blocks/presets.yaml)"
    )
    image: str = Field("", description="image of these pods (empty: cluster.image)")
    cpu: str = Field(
        "1",
        pattern=CPU_PATTERN,
        description=(
            "CPU request in cores, such as 2 or 500m (empty: train.threads or serve.processes ×"
            " serve.threads)"
        ),
    )
    memory: str = Field(
        "2Gi", pattern=MEMORY_PATTERN, description="memory request and limit, such as 8Gi"
    )
    disk: str = Field(
        "2Gi",
        pattern=MEMORY_PATTERN,
        description="local disk request and size limit of /tmp, such as 20Gi",
    )
    gpus: int = Field(0, ge=0, description="number of NVIDIA GPUs")
    gpu_resource: str = Field(
        "nvidia.com/gpu",
        description="resource name of a GPU or of a part of a GPU, such as nvidia.com/mig-1g.10gb",
    )
    node_selector: dict[str, str] = Field(
        default_factory=dict, description="labels of the nodes to run on"
    )
    preemptible: dict[str, str] = Field(
        default_factory=dict,
        description=(
            "labels of preemptible nodes to run on; the leading pod of a job is never placed there"
        ),
    )
    on_demand_after_minutes: int | None = Field(
        None,
        ge=1,
        description=(
            "pods of a training with preemptible: minutes without train.min_workers workers on"
            " preemptible nodes, after which workers on other nodes replace them (empty: never)"
        ),
    )
    avoid: dict[str, str] = Field(default_factory=dict, description="labels of nodes to avoid")
    tolerations: list[dict[str, Any]] = Field(
        default_factory=list, description="tolerations, as in a PodSpec"
    )
    spread: list[str] = Field(
        default_factory=list,
        description="node labels to spread the pods over, such as kubernetes.io/hostname",
    )
    node_lost_seconds: int | None = Field(
        None,
        ge=0,
        description=(
            "seconds until the pods of an unreachable node are replaced (empty: Kubernetes' 300)"
        ),
    )
    priority_class: str = Field("", description="PriorityClass (empty: the cluster's default)")
    labels: dict[str, str] = Field(
        default_factory=dict, description="additional labels of the pods"
    )
    annotations: dict[str, str] = Field(default_factory=dict, description="annotations of the pods")
    grace_seconds: int = Field(
        60,
        ge=1,
        description=(
            "pods of jobs: seconds from SIGTERM to SIGKILL; preemptible nodes may grant less"
        ),
    )
    notice: Literal["", "aws", "azure"] = Field(
        "",
        description=(
            "cloud whose interruption notices the workers poll, so that they leave the training"
            " before SIGTERM"
        ),
    )
    deadline_minutes: int = Field(
        120, ge=1, description="time limit of one attempt, excluding time waiting for nodes"
    )

    def shares_gpu(self) -> bool:
        """Return whether a pod of this kind gets only part of a GPU."""
        return (
            "/mig-" in self.gpu_resource
            or ".shared" in self.gpu_resource
            or not GKE_SHARING_LABELS.isdisjoint(self.node_selector)
        )

    def on_demand(self) -> "PodConfig":
        """Return these settings for the leading pod of a job, which never runs on preemptible
        nodes."""
        node_labels = {
            key: value for key, value in self.node_selector.items() if key not in self.preemptible
        }
        changed_fields = {
            "node_selector": node_labels,
            "preemptible": {},
            "avoid": self.avoid | self.preemptible,
        }
        return self.model_copy(update=changed_fields)


# kinds of pods that can be spread over nodes, because their job or Deployment has several pods
SPREADABLE_KINDS = ("train", "coordinator", "serve")
# pods that must outlive the workers
ON_DEMAND_KINDS = ("coordinator", "executor")
# kinds of pods that cluster.unqueued cannot name
JOB_POD_KINDS = ("train", "coordinator", "executor", "serve")
DEFAULT_IMAGE = "rekindle:0.1"
POD_DEFAULTS: dict[str, dict[str, Any]] = {
    "prepare": {"cpu": "2", "memory": "8Gi", "disk": "4Gi"},
    "train": {
        "cpu": "",
        "memory": "8Gi",
        "disk": "4Gi",
        "deadline_minutes": 24 * 60,
        "node_lost_seconds": 30,
    },
    "coordinator": {"cpu": "250m", "memory": "512Mi", "disk": "100Mi", "node_lost_seconds": 30},
    # Argo's pod that applies an object and then watches it, for example a job
    "executor": {"cpu": "50m", "memory": "256Mi", "disk": "100Mi", "node_lost_seconds": 30},
    "evaluate": {"cpu": "2", "memory": "8Gi", "disk": "4Gi"},
    "release": {},
    "serve": {"cpu": "", "spread": ["kubernetes.io/hostname"]},
    "verify": {"memory": "4Gi"},
    "canary": {"cpu": "250m", "memory": "1Gi", "deadline_minutes": 24 * 60},
    "report": {"cpu": "250m", "memory": "1Gi", "deadline_minutes": 10},
    "notify": {"cpu": "250m", "memory": "1Gi", "deadline_minutes": 10},
}


class CacheConfig(Section):
    """Limits of the cache. Each run ends by removing the oldest cache entries that exceed the
    limits of this section."""

    keep_days: float = Field(
        90,
        gt=0,
        le=90,
        description="number of days to keep an entry; after 90 days, no entry is valid",
    )
    keep_entries: int = Field(10_000, ge=0, description="number of entries to keep")
    keep_size: str = Field(
        "1Ti",
        pattern=MEMORY_PATTERN,
        description="total size of the artifacts of the entries, such as 100Gi",
    )


class ClusterConfig(Section):
    """Settings for Kubernetes."""

    image: str = Field(
        DEFAULT_IMAGE,
        min_length=1,
        description="image of all pods; pin it by digest to record the exact code",
    )
    namespace: str = Field(
        "",
        pattern=LABEL_PATTERN,
        description="namespace of the workflow: a DNS label (empty: as in the kubectl context)",
    )
    service_account: str = Field(
        "rekindle",
        description=(
            "ServiceAccount of the workflow's pods; may manage the objects that a workflow applies"
        ),
    )
    pod_account: str = Field(
        "default", description="ServiceAccount of training pods; no token is mounted"
    )
    signal_account: str = Field(
        "",
        description=(
            "ServiceAccount of coordinators that write the time of the newest durable checkpoint to"
            " the pods and the job, for schedulers, and that scale workers on on-demand nodes"
            " (empty: neither; no token is mounted)"
        ),
    )
    serving_account: str = Field(
        SERVING_ACCOUNT, description="ServiceAccount of model servers; no token is mounted"
    )
    presets: dict[str, PodConfig] = Field(
        default_factory=dict, description="your own presets, by name"
    )
    pods: dict[str, PodConfig] = Field(
        default_factory=dict,
        description=(
            f"image, resources and nodes by kind of pod ({', '.join(POD_DEFAULTS)}, or the name of"
            " a step)"
        ),
    )
    backend: Literal["pytorchjob", "jobset", "trainjob"] = Field(
        "pytorchjob",
        description=(
            "kind of the training job: of Kubeflow's training operator 1.9, JobSet 0.12, or"
            " Kubeflow Trainer 2.3"
        ),
    )
    restart_job: bool = Field(
        False,
        description=(
            "use JobSet's feature gate RestartJob: a lost pod is replaced in 1-3 seconds instead"
            " of 10"
        ),
    )
    gang: str = Field(
        "",
        description=(
            "gang scheduler: volcano, coscheduling or kueue (empty: pods of a job start one by one)"
        ),
    )
    queue: str = Field(
        "",
        pattern=LABEL_PATTERN,
        description=(
            "queue of Volcano for the jobs, or of Kueue for all pods of a run: a DNS label"
        ),
    )
    queue_priority: str = Field(
        "",
        description=(
            "Kueue's WorkloadPriorityClass of the jobs and of the pods of steps (empty: Kueue's"
            " default)"
        ),
    )
    unqueued: Names = Field(
        default_factory=list,
        description=(
            "kinds of pods (such as notify) whose steps start without waiting in Kueue's queue"
        ),
    )
    harvest: bool = Field(
        False,
        description=(
            "run the workers beyond train.min_workers as extra pods on idle capacity, outside"
            " the job"
        ),
    )
    harvest_priority: str = Field(
        "",
        description=(
            "priority of the extra pods of cluster.harvest: Kueue's WorkloadPriorityClass, or a"
            " PriorityClass without cluster.gang"
        ),
    )
    cache: str = Field(
        "",
        description=(
            "PersistentVolumeClaim that caches datasets for training pods (empty: no cache)"
        ),
    )
    retries: int = Field(
        4, ge=0, description="number of retries of a failed step, after 2, 6, 18, 54 seconds"
    )
    deadline_hours: int = Field(
        168,
        ge=1,
        description=(
            "time limit of a workflow, including the time waiting for nodes; with cluster.queue,"
            " cluster.queue_hours are added"
        ),
    )
    queue_hours: int = Field(
        672,
        ge=0,
        description=(
            "hours that the jobs of a workflow may wait in cluster.queue, in addition to"
            " cluster.deadline_hours"
        ),
    )
    keep_days: int = Field(
        14, ge=1, description="days until a finished workflow is removed from the cluster"
    )

    @field_serializer("pods", "presets")
    def _dump_set_fields(self, pod_configs: dict[str, PodConfig]) -> dict[str, Any]:
        """Dump only the fields that the user has set. The defaults of the other fields depend on
        the kind of pod, and a recorded config must render to the same manifest."""
        return {
            name: pod_config.model_dump(mode="json", exclude_unset=True)
            for name, pod_config in pod_configs.items()
        }

    @property
    def workflow_hours(self) -> int:
        """Time limit of a workflow in hours. Argo also counts the time that a workflow waits in a
        queue."""
        return self.deadline_hours + (self.queue_hours if self.queue else 0)

    def pod(self, pod_kind: str) -> PodConfig:
        """Return the settings of one kind of pod: cluster.pods overrides its presets, which
        override the defaults."""
        if pod_kind in self.pods:
            pod_settings = self.pods[pod_kind].model_dump(exclude_unset=True)
        else:
            pod_settings = {}

        available_presets = self._pod_presets()
        preset_layers = [
            find_preset(preset_name, f"cluster.pods.{pod_kind}.preset", available_presets)
            for preset_name in pod_settings.get("preset", ())
        ]
        merged_values = merge_mappings(
            {"image": self.image}, POD_DEFAULTS.get(pod_kind, {}), *preset_layers, pod_settings
        )

        if pod_kind in ON_DEMAND_KINDS:
            train_pod = self.pod("train")
            merged_values = merge_mappings(
                {"priority_class": train_pod.priority_class},
                merged_values,
                {"avoid": train_pod.preemptible},
            )

        merged_values["node_selector"] = merged_values.get("node_selector", {}) | merged_values.get(
            "preemptible", {}
        )
        return PodConfig.model_validate(merged_values)

    def _pod_presets(self) -> dict[str, Any]:
        return read_presets()["pods"] | {
            key: pod_config.model_dump(exclude_unset=True)
            for key, pod_config in self.presets.items()
        }

    def origin(self, pod_kind: str, field_name: str) -> str:
        """Return the name of the setting or preset that determines the field `field_name` of
        `pod(pod_kind)`; "" if cluster.pods sets the field."""
        pod_settings = self.pods.get(pod_kind, PodConfig.model_validate({}))
        if field_name in pod_settings.model_fields_set:
            return ""

        available_presets = self._pod_presets()
        for preset_name in reversed(pod_settings.preset):
            if field_name in available_presets[preset_name] or (
                field_name == "node_selector" and "preemptible" in available_presets[preset_name]
            ):
                return f"preset {preset_name}"

        if field_name == "image":
            return "cluster.image"

        is_derived = (
            pod_kind in ON_DEMAND_KINDS
            and field_name in ("avoid", "priority_class")
            and getattr(self.pod(pod_kind), field_name)
        )
        if is_derived:
            return "cluster.pods.train"

        return "default"

    # The validators check the cluster settings with presets applied, so that `render` cannot fail
    # later.
    @model_validator(mode="after")
    def _check_jobs(self) -> Self:
        if self.restart_job and self.backend != "jobset":
            raise ValueError(
                f"cluster.restart_job requires JobSet, but cluster.backend is {self.backend}."
                " Remove one of these settings"
            )

        if self.harvest_priority and not self.harvest:
            raise ValueError(
                f"cluster.harvest_priority is {self.harvest_priority}, but cluster.harvest is off."
                " Set cluster.harvest to true, or remove the priority"
            )

        if self.harvest and self.gang not in ("", "kueue"):
            raise ValueError(
                f"cluster.harvest is on, but cluster.gang is {self.gang}: only Kueue admits single"
                " pods in addition to a job. Set cluster.gang to kueue, or remove cluster.gang"
            )

        if self.queue_priority and self.gang != "kueue":
            raise ValueError(
                f"cluster.queue_priority is {self.queue_priority}: only Kueue has such priorities."
                " Set cluster.gang to kueue, or use cluster.pods.train.priority_class, the"
                " PriorityClass of the pods"
            )

        if self.unqueued and self.gang != "kueue":
            raise ValueError(
                f"cluster.unqueued is {', '.join(self.unqueued)}: only Kueue queues the pods of"
                " steps. Set cluster.gang to kueue, or remove cluster.unqueued"
            )

        job_kinds = [kind for kind in self.unqueued if kind in JOB_POD_KINDS]
        if job_kinds:
            raise ValueError(
                f"cluster.unqueued names {', '.join(job_kinds)}: jobs and trials always wait in the"
                " queue, executors and model servers never do. Name the kinds of other steps, such"
                " as report"
            )

        if self.gang:
            gang_preset = find_preset(self.gang, "cluster.gang", read_presets()["gang"])
            if "labels" in gang_preset and not self.queue:
                raise ValueError(
                    f"cluster.gang is {self.gang}: it requires cluster.queue, the name of the queue"
                )

        return self

    @model_validator(mode="after")
    def _check_pods(self) -> Self:
        for name in self.pods:
            pod_config = self.pod(name)
            if pod_config.gpus > 1 and pod_config.shares_gpu():
                raise ValueError(
                    f"cluster.pods.{name}.gpus is {pod_config.gpus}: a pod can have only one"
                    f" {pod_config.gpu_resource}, which is a part of a GPU. Set gpus to 1, and"
                    " start more workers"
                )

            # source: NVIDIA's device plugin mounts over /dev/shm (internal/plugin/mps.go); see also
            # members.SHARED_MOUNT
            if name == "train" and pod_config.node_selector.get(SHARING_LABEL) == "mps":
                raise ValueError(
                    "cluster.pods.train shares its GPU by MPS, which is not supported for training:"
                    " NVIDIA's device plugin mounts over /dev/shm, where workers keep their"
                    " snapshots. Use gpu-time-slicing or a mig preset; gpu-mps is for other pods"
                )

            if pod_config.spread and name not in SPREADABLE_KINDS:
                raise ValueError(
                    f"cluster.pods.{name} is spread over {', '.join(pod_config.spread)}, but it is"
                    f" a single pod. Remove its preset or spread; only"
                    f" {', '.join(SPREADABLE_KINDS)} can be spread"
                )

            if pod_config.on_demand_after_minutes is not None:
                self._check_on_demand_workers(name, pod_config)

            if name in ON_DEMAND_KINDS and pod_config.preemptible:
                raise ValueError(
                    f"cluster.pods.{name} is on preemptible nodes ({pod_config.preemptible}): it"
                    " must outlive the workers, which may be preempted. Remove its preset"
                )

        for name in ("train", *self.pods):
            deadline_minutes = self.pod(name).deadline_minutes
            if deadline_minutes > 60 * self.deadline_hours:
                raise ValueError(
                    f"cluster.deadline_hours is {self.deadline_hours}: the workflow would end"
                    f" before the {deadline_minutes} minutes of"
                    f" cluster.pods.{name}.deadline_minutes have"
                    " passed. Raise the hours or lower the minutes"
                )

        return self

    def _check_on_demand_workers(self, pod_kind: str, pod_config: PodConfig) -> None:
        """Raise ValueError unless workers on on-demand nodes can replace workers on preemptible
        nodes."""
        key = f"cluster.pods.{pod_kind}.on_demand_after_minutes"
        if pod_kind != "train":
            raise ValueError(
                f"{key} is {pod_config.on_demand_after_minutes}: only the workers of a training can"
                " be replaced by workers on other nodes. Remove it, or set it for train"
            )
        if not pod_config.preemptible:
            raise ValueError(
                f"{key} is {pod_config.on_demand_after_minutes}, but these pods do not run on"
                " preemptible nodes. Add a preset such as gke-spot, or remove it"
            )
        if not self.signal_account:
            raise ValueError(
                f"{key} is {pod_config.on_demand_after_minutes}, so the coordinator needs a"
                " ServiceAccount that may scale a Deployment: render the platform with `--with"
                " signals`, and set cluster.signal_account to rekindle-coordinator"
            )
        if self.gang not in ("", "kueue"):
            raise ValueError(
                f"{key} is {pod_config.on_demand_after_minutes}, but cluster.gang is {self.gang}:"
                " only Kueue admits single pods in addition to a job. Set cluster.gang to kueue, or"
                " remove cluster.gang"
            )
