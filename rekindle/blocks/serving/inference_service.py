"""KServe: the same server as a Deployment's, with a canary's share of the traffic and nothing running when idle.

Both need KServe's Knative mode ("Serverless"), and Knative takes few fields of a pod: security is therefore said on the
container, and placement (nodes, tolerations, priority) only where Knative's feature flags allow it.
Source: KServe 0.13 to 0.20, serving.kserve.io/v1beta1 InferenceService and its ModelStatus.
"""

from rekindle.blocks.pod import CONTAINER_SECURITY, POD_SECURITY, Manifest, affinity, metadata, tolerations, volumes
from rekindle.blocks.serving.deployment import SCORING, server, server_pod
from rekindle.blocks.settings import ClusterConfig
from rekindle.release.config import ServeConfig

# its conditions are sorted by name, and which there are depends on KServe: the model's own status tells more
SUCCESS = "status.modelStatus.transitionStatus == UpToDate,status.modelStatus.states.activeModelState == Loaded"
FAILURE = ("status.modelStatus.transitionStatus in (BlockedByFailedLoad,InvalidSpec)",)

NAME = "kserve-container"  # the container whose end KServe takes for that of the model
USER = {key: POD_SECURITY[key] for key in ("runAsNonRoot", "runAsUser", "runAsGroup", "seccompProfile")}


def inference_service(
    name: str,
    serve: ServeConfig,
    cluster: ClusterConfig,
    flags: list[str],
    canary: int | None = None,
    idle: bool = False,
    requests: int = 10,
) -> Manifest:
    """`rekindle step steps.serve FLAGS --host=0.0.0.0`, for Knative's proxy reaches it by the loopback address.

    A new version gets `canary` percent of the traffic until it is applied again without; `idle`: no pod while there
    are no requests. A pod more is started when each has `requests` at once.
    """
    pod = server_pod(serve, cluster)
    runs = server(NAME, pod, [*flags, "--host=0.0.0.0"], port="http1")  # the name by which Knative finds it
    del runs["env"]  # the pod's own address, which Knative does not tell by default
    runs["securityContext"] = CONTAINER_SECURITY | USER
    predictor = {
        "minReplicas": 0 if idle else serve.min_replicas,
        "maxReplicas": serve.max_replicas,
        "scaleMetric": "concurrency",
        "scaleTarget": requests,
        "canaryTrafficPercent": canary,
        "timeout": 60,
        "serviceAccountName": cluster.serving_account,
        "automountServiceAccountToken": False,
        "nodeSelector": pod.node_selector,
        "affinity": affinity(pod),
        "tolerations": tolerations(pod),
        "priorityClassName": pod.priority_class,
        "containers": [runs],
        "volumes": volumes(pod),
        **metadata(pod, SCORING),
    }
    return {
        "apiVersion": "serving.kserve.io/v1beta1",
        "kind": "InferenceService",
        "metadata": {"name": name, "annotations": {"serving.kserve.io/deploymentMode": "Serverless"}},
        "spec": {"predictor": {key: value for key, value in predictor.items() if value not in (None, {}, [], "")}},
    }
