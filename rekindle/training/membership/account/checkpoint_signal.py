"""Writes the time of the newest durable checkpoint to annotations of the pods and the job of a
training, so that a scheduler can evict pods first that lose the least work.

    rekindle.dev/last-checkpoint-time: 20261130T153000Z        valid as the value of a label, too
    volcano.sh/last-checkpoint-time: "2026-11-30T15:30:00Z"    pods only

Source: the second annotation is read by the scheduler plugin `checkpoint` that is proposed for
Volcano (volcano-sh/volcano#5999), from pods, as RFC 3339 in UTC.

The coordinator has a token for the Kubernetes API only if `cluster.signal_account` is set. A
problem with the Kubernetes API is reported once, and never disturbs the training.
"""

import os
import time
from urllib.parse import quote

from argolocal.manifest.object_labels import JOB_NAME_LABEL
from rekindle.kubernetes_names import REKINDLE_JOB
from rekindle.training.membership.account.account_api import API_ERRORS, AccountApi, ApiRefusal

CHECKPOINT_ANNOTATION = "rekindle.dev/last-checkpoint-time"
VOLCANO_ANNOTATION = "volcano.sh/last-checkpoint-time"
# minimum number of seconds between two updates
SIGNAL_INTERVAL_S = 30.0


class CheckpointSignal:
    """Annotates the pods and the job of one training. `job_path`: path of the job in the API,
    such as kubeflow.org/v1/pytorchjobs/NAME."""

    def __init__(self, api: AccountApi, job_path: str) -> None:
        self.api = api
        self.job_path = job_path
        self._written_at = float("-inf")

    @classmethod
    def from_environment(cls) -> "CheckpointSignal | None":
        """Return the CheckpointSignal of this pod; None if the pod may not use the Kubernetes
        API."""
        job_path = os.environ.get(REKINDLE_JOB, "")
        api = AccountApi.from_environment()
        if job_path and api:
            return cls(api, job_path)
        return None

    def compute_delay(self) -> float:
        """Return the seconds until the next update of the annotations is due."""
        return max(0.0, self._written_at + SIGNAL_INTERVAL_S - time.monotonic())

    def write(self, checkpoint_time_s: float) -> None:
        """Annotate all pods and the job. The first problem is printed, and no error is raised.
        After the API has refused a request, `write` does nothing."""
        if self.api.is_refused:
            return
        self._written_at = time.monotonic()
        try:
            self._annotate(checkpoint_time_s)
        except ApiRefusal as refusal:
            self.api.report_first(
                f"{refusal} Schedulers will not see the times of checkpoints: render the platform"
                " with `--with signals`, or unset cluster.signal_account."
            )
        except (*API_ERRORS, KeyError, TypeError) as error:
            self.api.report_first(
                f"the time of the checkpoint was not written to the pods ({error!r}). Trying again"
                " after the next checkpoint."
            )

    def _annotate(self, checkpoint_time_s: float) -> None:
        namespace = self.api.read_namespace()
        api_version, plural, job_name = self.job_path.rsplit("/", 2)
        utc_time = time.gmtime(checkpoint_time_s)
        annotations = {CHECKPOINT_ANNOTATION: time.strftime("%Y%m%dT%H%M%SZ", utc_time)}
        pod_annotations = {
            **annotations,
            VOLCANO_ANNOTATION: time.strftime("%Y-%m-%dT%H:%M:%SZ", utc_time),
        }

        pods_path = f"/api/v1/namespaces/{namespace}/pods"
        selector = quote(f"{JOB_NAME_LABEL}={job_name}", safe="")
        for pod in self.api.call("GET", f"{pods_path}?labelSelector={selector}")["items"]:
            pod_path = f"{pods_path}/{quote(pod['metadata']['name'], safe='')}"
            self.api.call("PATCH", pod_path, {"metadata": {"annotations": pod_annotations}})

        job_path = f"/apis/{api_version}/namespaces/{namespace}/{plural}/{quote(job_name, safe='')}"
        self.api.call("PATCH", job_path, {"metadata": {"annotations": annotations}})
