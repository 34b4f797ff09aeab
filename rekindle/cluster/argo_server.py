"""Submits workflows through an Argo server, for users who cannot reach the Kubernetes API.

    server = ArgoServer.from_url("https://argo.example.com", "models")   # or from ARGO_SERVER
    server.submit(workflow)

Like the `argo` command, the class reads ARGO_TOKEN, ARGO_SECURE and ARGO_INSECURE_SKIP_VERIFY.
"""

import os
from typing import Any

from argolocal.common.environment import require_header_text
from argolocal.manifest.object_labels import COMPLETED
from argolocal.manifest.types import Object
from rekindle.cluster.kubernetes_api import (
    MAX_ANSWER_BYTES,
    TIMEOUTS_S,
    WORKFLOWS,
    describe_name,
    parse_object,
)
from rekindle.cluster.objects.validation import find_fault
from rekindle.cluster.workflows import has_same_manifest, result_parameters
from rekindle.errors import (
    ConfigError,
    RekindleError,
    describe_cause,
    format_address,
    innermost,
    say,
    without_secrets,
)
from rekindle.names import PathName, show


class ArgoServer:
    """One namespace of an Argo server. Workflows are handled as plain data, because Hera's models
    would drop unknown fields."""

    def __init__(self, url: str, namespace: str) -> None:
        from rekindle.content.http_answers import Session

        if os.environ.get("ARGO_SECURE", "true").lower() == "false":
            scheme = "http"
        else:
            scheme = "https"

        self.address = (url if "://" in url else f"{scheme}://{url}").rstrip("/")
        self.url = format_address(self.address)
        self.namespace = namespace
        self.session = Session()
        self.verify = os.environ.get("ARGO_INSECURE_SKIP_VERIFY", "false").lower() != "true"

        token = os.environ.get("ARGO_TOKEN", "").strip()
        if token:
            require_header_text(token, "ARGO_TOKEN")
            self.session.set_token(token if " " in token else f"Bearer {token}")

    @classmethod
    def from_url(cls, url: str | None, namespace: str) -> "ArgoServer | None":
        """Return the server at `url` or, if `url` is empty, at ARGO_SERVER; None if both are
        empty."""
        url = url or os.environ.get("ARGO_SERVER")
        if url:
            return cls(url, namespace)
        return None

    def submit(self, workflow: Object) -> None:
        """Create a workflow. Raises ConfigError if the server rejects the workflow, RekindleError
        for other errors."""
        self._request("POST", json={"workflow": workflow})

    def find_duplicate(self, workflow: Object) -> str | None:
        """Return the name of an active run with the same manifest and parameters, or None."""
        for active_run in self._list(f"{COMPLETED}!=true", metadata_only=False):
            if has_same_manifest(active_run, workflow) and result_parameters(
                active_run
            ) == result_parameters(workflow):
                return str(active_run["metadata"]["name"])
        return None

    def list_runs(self, labels: str) -> list[Object]:
        """Return the runs that a label selector matches, including archived runs, without their
        nodes."""
        return self._list(labels, metadata_only=True)

    def read(self, name: str) -> Object:
        """Return a run with its nodes, from the cluster or Argo's archive. Raises RekindleError,
        also if the run is malformed."""
        run = self._request("GET", name)
        fault = find_fault(WORKFLOWS.plural, run)
        if fault:
            raise RekindleError(
                f"{self.url} answered with the malformed run {name}: {fault}. Delete the run, or"
                " correct it."
            )
        return run

    def _list(self, labels: str, metadata_only: bool) -> list[Object]:
        """Return the runs that a label selector matches. A malformed run is left out with a
        warning."""
        answer = self._request("GET", params={"listOptions.labelSelector": labels})
        items = answer.get("items")
        # an Argo server returns null instead of an empty list
        if items is None:
            items = []
        if not isinstance(items, list):
            raise RekindleError(
                f"{self.url} does not answer as an Argo server (items: it must be a list): correct"
                " --argo-server (or ARGO_SERVER); without it, the Kubernetes API is used."
            )

        runs = []
        for item in items:
            fault = find_fault(WORKFLOWS.plural, item, metadata_only)
            if fault:
                say(f"warning: the run {describe_name(item)} of {self.url} is passed over: {fault}")
            else:
                runs.append(item)
        return runs

    def _request(self, method: str, name: str = "", **options: Any) -> Object:
        """Send a request. Raises ConfigError if the server rejects the workflow, RekindleError for
        other errors."""
        from requests import RequestException

        from rekindle.content.http_answers import send

        names = [PathName(self.namespace, "the namespace")]
        if name:
            names.append(PathName(name, "the name of a run"))
        url = "/".join([f"{self.address}/api/v1/workflows", *(part.quoted for part in names)])

        try:
            # pass `verify` with each request, because REQUESTS_CA_BUNDLE would override the
            # `verify` of the session
            response = send(
                self.session,
                method,
                url,
                max_bytes=MAX_ANSWER_BYTES,
                timeout=TIMEOUTS_S[1],
                verify=self.verify,
                **options,
            )
            answer = parse_object(response.content)
            if response.ok and answer is not None:
                return answer
        except RequestException as error:
            cause = describe_cause(innermost(error), self.address)
            raise RekindleError(
                f"{self.url} does not answer as an Argo server ({cause}):"
                " correct --argo-server (or ARGO_SERVER); without it, the Kubernetes API is used."
            ) from error

        if response.ok:
            raise RekindleError(
                f"{self.url} does not answer as an Argo server ({show(response.text)}): correct"
                " --argo-server (or ARGO_SERVER); without it, the Kubernetes API is used."
            )

        message = (answer or {}).get("message")
        if not isinstance(message, str):
            message = response.text[:500]

        message = without_secrets(f"{response.status_code} {response.reason}: {message}")
        if response.status_code in (401, 403):
            raise RekindleError(
                f"{self.url} refuses: {message}. Set ARGO_TOKEN (`argo auth token` prints one)."
            )

        if response.status_code == 429 or response.status_code >= 500:
            raise RekindleError(
                f"the Argo server {self.url} failed: {message}. Submit again when the server works;"
                " without --argo-server (or ARGO_SERVER), the Kubernetes API is used."
            )

        raise ConfigError(f"{self.url} refuses the workflow: {message}")
