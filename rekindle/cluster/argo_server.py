"""Submits workflows through an Argo server, for users who cannot reach the Kubernetes API.

    server = ArgoServer.from_url("https://argo.example.com", "models")   # or from ARGO_SERVER
    server.submit(workflow)

Like the `argo` command, the class ArgoServer reads ARGO_TOKEN, ARGO_SECURE and
ARGO_INSECURE_SKIP_VERIFY.
"""

import os
from typing import Any

from argolocal.common.environment import require_header_text
from argolocal.manifest.object_labels import COMPLETED_LABEL
from argolocal.manifest.types import Object
from rekindle.cluster.kubernetes_api import (
    MAX_ANSWER_BYTES,
    TIMEOUTS_S,
    WORKFLOWS,
    describe_name,
    parse_object,
)
from rekindle.cluster.objects.validation import find_fault
from rekindle.cluster.workflows import has_same_manifest, list_result_parameters
from rekindle.errors import (
    ConfigError,
    RekindleError,
    describe_cause,
    find_innermost_cause,
    format_address,
    without_secrets,
    write_stderr,
)
from rekindle.names import PathName, format_untrusted


class ArgoServer:
    """One namespace of an Argo server. Workflows are plain data, because Hera's models would drop
    unknown fields."""

    def __init__(self, url: str, namespace: str) -> None:
        from rekindle.content.http_answers import Session

        if os.environ.get("ARGO_SECURE", "true").lower() == "false":
            url_scheme = "http"
        else:
            url_scheme = "https"

        self.address = (url if "://" in url else f"{url_scheme}://{url}").rstrip("/")
        self.url = format_address(self.address)
        self.namespace = namespace
        self.session = Session()
        self.verify = os.environ.get("ARGO_INSECURE_SKIP_VERIFY", "false").lower() != "true"

        access_token = os.environ.get("ARGO_TOKEN", "").strip()
        if access_token:
            require_header_text(access_token, "ARGO_TOKEN")
            self.session.set_token(
                access_token if " " in access_token else f"Bearer {access_token}"
            )

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
        for active_run in self._list(f"{COMPLETED_LABEL}!=true", is_metadata_only=False):
            if has_same_manifest(active_run, workflow) and list_result_parameters(
                active_run
            ) == list_result_parameters(workflow):
                return str(active_run["metadata"]["name"])
        return None

    def list_runs(self, label_selector: str) -> list[Object]:
        """Return the runs that a label selector matches, including archived runs, without their
        nodes."""
        return self._list(label_selector, is_metadata_only=True)

    def read(self, workflow_name: str) -> Object:
        """Return a run with its nodes, from the cluster or from Argo's archive. Raises
        RekindleError if the server does not answer, or if the run is malformed."""
        workflow_object = self._request("GET", workflow_name)
        object_fault = find_fault(WORKFLOWS.plural, workflow_object)
        if object_fault:
            raise RekindleError(
                f"{self.url} answered with the malformed run {workflow_name}: {object_fault}."
                " Delete the run, or correct it."
            )
        return workflow_object

    def _list(self, label_selector: str, is_metadata_only: bool) -> list[Object]:
        """Return the runs that a label selector matches. A malformed run is left out, and a warning
        is printed."""
        list_answer = self._request("GET", params={"listOptions.labelSelector": label_selector})
        listed_runs = list_answer.get("items")
        # an Argo server returns null instead of an empty list
        if listed_runs is None:
            listed_runs = []
        if not isinstance(listed_runs, list):
            raise RekindleError(
                f"{self.url} does not answer as an Argo server (items: it must be a list): correct"
                " --argo-server (or ARGO_SERVER); without it, the Kubernetes API is used."
            )

        valid_runs = []
        for listed_run in listed_runs:
            object_fault = find_fault(WORKFLOWS.plural, listed_run, is_metadata_only)
            if object_fault:
                write_stderr(
                    f"warning: the run {describe_name(listed_run)} of {self.url} is passed over:"
                    f" {object_fault}"
                )
            else:
                valid_runs.append(listed_run)
        return valid_runs

    def _request(self, method: str, workflow_name: str = "", **request_options: Any) -> Object:
        """Send a request to the Argo server. Raises ConfigError if the server rejects the workflow,
        RekindleError for other errors."""
        from requests import RequestException

        from rekindle.content.http_answers import send

        path_names = [PathName(self.namespace, "the namespace")]
        if workflow_name:
            path_names.append(PathName(workflow_name, "the name of a run"))
        url = "/".join(
            [f"{self.address}/api/v1/workflows", *(path_name.quoted for path_name in path_names)]
        )

        try:
            # pass `verify` with each request, because REQUESTS_CA_BUNDLE would override the
            # `verify` of the session
            response = send(
                self.session,
                method,
                url,
                max_bytes=MAX_ANSWER_BYTES,
                timeout_s=TIMEOUTS_S[1],
                verify=self.verify,
                **request_options,
            )
            answer_object = parse_object(response.content)
            if response.ok and answer_object is not None:
                return answer_object
        except RequestException as error:
            error_cause = describe_cause(find_innermost_cause(error), self.address)
            raise RekindleError(
                f"{self.url} does not answer as an Argo server ({error_cause}):"
                " correct --argo-server (or ARGO_SERVER); without it, the Kubernetes API is used."
            ) from error

        if response.ok:
            raise RekindleError(
                f"{self.url} does not answer as an Argo server"
                f" ({format_untrusted(response.text)}): correct"
                " --argo-server (or ARGO_SERVER); without it, the Kubernetes API is used."
            )

        error_message = (answer_object or {}).get("message")
        if not isinstance(error_message, str):
            error_message = response.text[:500]

        error_message = without_secrets(
            f"{response.status_code} {response.reason}: {error_message}"
        )
        if response.status_code in (401, 403):
            raise RekindleError(
                f"{self.url} refuses: {error_message}. Set ARGO_TOKEN (`argo auth token` prints"
                " one)."
            )

        if response.status_code == 429 or response.status_code >= 500:
            raise RekindleError(
                f"the Argo server {self.url} failed: {error_message}. Submit again when the server"
                " works; without --argo-server (or ARGO_SERVER), the Kubernetes API is used."
            )

        raise ConfigError(f"{self.url} refuses the workflow: {error_message}")
