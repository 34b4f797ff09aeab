"""Writes the time of the newest durable checkpoint to annotations of the pods and the job of a
training, so that a scheduler can evict pods first that lose the least work.

    rekindle.dev/last-checkpoint-time: 20261130T153000Z        valid as the value of a label, too
    volcano.sh/last-checkpoint-time: "2026-11-30T15:30:00Z"    pods only

Source: the second annotation is read by the scheduler plugin `checkpoint` that is proposed for
Volcano (volcano-sh/volcano#5999), from pods, as RFC 3339 in UTC.

The coordinator has a token for the Kubernetes API only if `cluster.signal_account` is set. A
problem with the API is reported once, and never disturbs the training.
"""

import http.client
import json
import os
import ssl
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from argolocal.common.json_text import to_json
from argolocal.manifest.object_labels import JOB_NAME_LABEL
from rekindle.errors import write_stderr
from rekindle.kubernetes_names import KUBERNETES_SERVICE_HOST, REKINDLE_JOB

CHECKPOINT_ANNOTATION = "rekindle.dev/last-checkpoint-time"
VOLCANO_ANNOTATION = "volcano.sh/last-checkpoint-time"
ACCOUNT_FOLDER = Path("/var/run/secrets/kubernetes.io/serviceaccount")
# minimum time between two updates
SIGNAL_INTERVAL_S = 30.0
REQUEST_TIMEOUT_S = 10.0
REFUSED_STATUSES = (401, 403)


class CheckpointSignal:
    """Annotates the pods and the job of one training. `job_path`: path of the job in the API,
    such as kubeflow.org/v1/pytorchjobs/NAME; `account_folder`: folder with the token, the namespace
    and the certificate of the API."""

    def __init__(self, address: str, account_folder: Path, job_path: str) -> None:
        self.address = address
        self.account_folder = account_folder
        self.job_path = job_path
        self.is_refused = False
        self._has_reported = False
        self._written_at = float("-inf")

    @classmethod
    def from_environment(cls) -> "CheckpointSignal | None":
        """Return the signal of this pod; None if the pod may not use the Kubernetes API."""
        job_path = os.environ.get(REKINDLE_JOB, "")
        host = os.environ.get(KUBERNETES_SERVICE_HOST, "")
        if not (job_path and host and (ACCOUNT_FOLDER / "token").exists()):
            return None

        host = f"[{host}]" if ":" in host else host
        port = os.environ.get("KUBERNETES_SERVICE_PORT", "443")
        return cls(f"https://{host}:{port}", ACCOUNT_FOLDER, job_path)

    def compute_delay(self) -> float:
        """Return the seconds until the next update is due."""
        return max(0.0, self._written_at + SIGNAL_INTERVAL_S - time.monotonic())

    def write(self, checkpoint_time_s: float) -> None:
        """Annotate all pods and the job. Print the first problem; never raise. After a refusal, do
        nothing."""
        if self.is_refused:
            return
        self._written_at = time.monotonic()
        try:
            self._annotate(checkpoint_time_s)
        except _ApiRefusal as refusal:
            self.is_refused = True
            self._report(
                f"{refusal} Schedulers will not see the times of checkpoints: render the platform"
                " with `--with signals`, or unset cluster.signal_account."
            )
        except (OSError, ValueError, KeyError, TypeError, http.client.HTTPException) as error:
            self._report(
                f"the time of the checkpoint was not written to the pods ({error!r}). Trying again"
                " after the next checkpoint."
            )

    def _report(self, text: str) -> None:
        if not self._has_reported:
            self._has_reported = True
            write_stderr(text)

    def _annotate(self, checkpoint_time_s: float) -> None:
        namespace = quote((self.account_folder / "namespace").read_text().strip(), safe="")
        api_version, plural, job_name = self.job_path.rsplit("/", 2)
        utc_time = time.gmtime(checkpoint_time_s)
        annotations = {CHECKPOINT_ANNOTATION: time.strftime("%Y%m%dT%H%M%SZ", utc_time)}
        pod_annotations = {
            **annotations,
            VOLCANO_ANNOTATION: time.strftime("%Y-%m-%dT%H:%M:%SZ", utc_time),
        }

        pods_path = f"/api/v1/namespaces/{namespace}/pods"
        selector = quote(f"{JOB_NAME_LABEL}={job_name}", safe="")
        for pod in self._call("GET", f"{pods_path}?labelSelector={selector}")["items"]:
            pod_path = f"{pods_path}/{quote(pod['metadata']['name'], safe='')}"
            self._call("PATCH", pod_path, {"metadata": {"annotations": pod_annotations}})

        job_path = f"/apis/{api_version}/namespaces/{namespace}/{plural}/{quote(job_name, safe='')}"
        self._call("PATCH", job_path, {"metadata": {"annotations": annotations}})

    def _call(self, method: str, path: str, patch: dict[str, Any] | None = None) -> Any:
        """Return the answer of the API, {} if the object does not exist. Raises _ApiRefusal,
        OSError, ValueError, HTTPException."""
        address_parts = urlsplit(self.address)
        host_and_port = address_parts.netloc
        connection: http.client.HTTPConnection
        if address_parts.scheme == "https":
            tls = ssl.create_default_context(cafile=str(self.account_folder / "ca.crt"))
            connection = http.client.HTTPSConnection(
                host_and_port, timeout=REQUEST_TIMEOUT_S, context=tls
            )
        else:
            connection = http.client.HTTPConnection(host_and_port, timeout=REQUEST_TIMEOUT_S)

        # the kubelet renews the token, so it is read for each request
        token = (self.account_folder / "token").read_text().strip()
        headers = {
            "Authorization": f"Bearer {token}",
            "Content-Type": "application/merge-patch+json",
            "Accept": "application/json",
        }
        try:
            connection.request(method, path, to_json(patch) if patch else None, headers)
            response = connection.getresponse()
            response_body = response.read()
        finally:
            connection.close()

        if response.status in REFUSED_STATUSES:
            raise _ApiRefusal(f"the Kubernetes API refuses {method} {path} ({response.status}).")
        # a pod that has been deleted since it was listed
        if response.status == 404:
            return {}
        if response.status >= 300:
            raise ValueError(f"{method} {path}: HTTP {response.status}")
        return json.loads(response_body)


class _ApiRefusal(Exception):
    """The service account may not do this."""
