"""A cluster that passes every check of `rekindle platform check`; each test changes one part of
this cluster."""

import json
from pathlib import Path
from typing import Any

from rekindle.cluster.platform import Platform, render_platform
from tests.rekindle.cluster.server import ApiServer, Object, make_status

REVIEWS = "/apis/authorization.k8s.io/v1/"
PODS_AT = "/api/v1/namespaces/models/pods"
JOBS_AT = "/apis/kubeflow.org/v1/namespaces/models/pytorchjobs"
WEBHOOK = "validator.pytorchjob.training-operator.kubeflow.org"
ENDED_STATE = {"terminated": {"exitCode": 0}}
ANSWERS = {
    "object store": [True, "1 of 8 concurrent creates succeeded"],
    "MLflow": [True, "it answers"],
}


class HealthyCluster(ApiServer):
    """Argo, the training operator, and a namespace as `rekindle platform render` makes it."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.denied: set[tuple[str, str]] = set()  # resource, verb
        self.webhook = True
        # number of responses to the creation of a pod that this cluster loses
        self.lost = 0
        # image → state of the container in the pod that probes the services
        self.states: dict[str, Object] = {}
        self.unscheduled = ""

        for api, names in {
            "argoproj.io/v1alpha1": (
                "workflows",
                "workflowtemplates",
                "cronworkflows",
                "workflowtaskresults",
            ),
            "kubeflow.org/v1": ("pytorchjobs",),
        }.items():
            self.fixed[f"/apis/{api}"] = {"resources": [{"name": name} for name in names]}

        self.version_is("34")
        self.allocatable = {"cpu": "16", "memory": "64Gi", "pods": "110", "nvidia.com/gpu": "8"}

        node = {
            "metadata": {"name": "large"},
            "spec": {},
            "status": {"allocatable": self.allocatable},
        }

        self.fixed["/api/v1/nodes"] = {"items": [node], "metadata": {}}
        labels = {"pod-security.kubernetes.io/enforce": "restricted"}
        self.fixed["/api/v1/namespaces/models"] = {"metadata": {"name": "models", "labels": labels}}
        self.controller(
            "argo", {"app": "workflow-controller"}, "quay.io/argoproj/workflow-controller:v3.7.3"
        )
        operator = {"control-plane": "kubeflow-training-operator"}
        self.controller(
            "kubeflow", operator, "kubeflow/training-operator:v1.9.3", configMap={"name": "init"}
        )
        hardened = {"initContainer.yaml": "securityContext: {allowPrivilegeEscalation: false}"}
        self.put(
            "/api/v1/namespaces/kubeflow/configmaps",
            {"metadata": {"name": "init"}, "data": hardened},
        )

        for manifest in render_platform(
            Platform("models", endpoint="http://s3:9000", mlflow="http://mlflow")
        ):
            if manifest["kind"] in ("ConfigMap", "ServiceAccount"):
                self.put(f"/api/v1/namespaces/models/{manifest['kind'].lower()}s", manifest)

        keys = {"AWS_ACCESS_KEY_ID": "eA==", "AWS_SECRET_ACCESS_KEY": "eA=="}
        for name, data in {
            "rekindle.service-account-token": {"token": "eA=="},
            "rekindle-s3": keys,
            "rekindle-serving": {**keys, "AWS_ACCESS_KEY_ID": "eQ=="},
        }.items():
            self.put(
                "/api/v1/namespaces/models/secrets", {"metadata": {"name": name}, "data": data}
            )

    def version_is(self, minor: str) -> None:
        self.fixed["/version"] = {"major": "1", "minor": minor, "gitVersion": f"v1.{minor}.0"}

    def controller(self, namespace: str, labels: dict[str, str], image: str, **volume: Any) -> None:
        name = "-".join(labels.values())
        ready = [{"type": "Ready", "status": "True"}]
        spec = {"containers": [{"image": image}], "volumes": [{"name": "v", **volume}]}
        metadata = {"name": name, "namespace": namespace, "labels": labels}
        self.put(
            "/api/v1/pods", {"metadata": metadata, "spec": spec, "status": {"conditions": ready}}
        )

    def admit(self, path: str, body: Object, dry_run: bool) -> tuple[int, Object] | None:
        if path.startswith(REVIEWS):
            attributes = body["spec"]["resourceAttributes"]
            return 201, {
                "status": {
                    "allowed": (attributes["resource"], attributes["verb"]) not in self.denied
                }
            }

        if path == JOBS_AT and self.webhook and '"name": "pytorch"' not in json.dumps(body):
            message = (
                f'admission webhook "{WEBHOOK}" denied the request: a container must be named'
                " pytorch"
            )
            return 403, make_status(403, "Forbidden", message)

        if (
            path == PODS_AT
            and not dry_run
            and body["metadata"]["name"] not in self.objects.get(PODS_AT, {})
        ):
            self._start(body)
            self.lost -= 1
            if self.lost >= 0:
                return (503, make_status(503, "Unavailable", "lost"))
            return (201, body)

        return super().admit(path, body, dry_run)

    def _start(self, pod: Object) -> None:
        """Set the status of a pod to running and completed, as a kubelet does."""
        states = [
            {"name": container["name"], "state": self.states.get(container["image"], ENDED_STATE)}
            for container in pod["spec"]["containers"]
        ]
        if self.unscheduled:
            conditions = [{"type": "PodScheduled", "message": self.unscheduled}]
        else:
            conditions = []

        pod_status = {
            "conditions": conditions,
            "containerStatuses": [] if self.unscheduled else states,
        }
        self.put(PODS_AT, pod | {"status": pod_status})
        self.write_log(pod["metadata"]["name"], json.dumps(ANSWERS))
