"""Submits through an Argo server, for users who cannot reach the Kubernetes API.

    server = ArgoServer.configured("https://argo.example.com", "models")   # or from ARGO_SERVER
    server.submit(workflow)

It reads ARGO_TOKEN, ARGO_SECURE and ARGO_INSECURE_SKIP_VERIFY as the `argo` command does.
"""

import os
from typing import Any

from argolocal.manifest.names import COMPLETED
from rekindle.cluster.api import Object
from rekindle.cluster.workflows import arguments, same_manifest
from rekindle.errors import ConfigError, RekindleError, without_user


class ArgoServer:
    """One namespace of an Argo server. Workflows are plain data: Hera's models would drop unknown fields."""

    def __init__(self, url: str, namespace: str) -> None:
        from requests import Session

        scheme = "http" if os.environ.get("ARGO_SECURE", "true").lower() == "false" else "https"
        self.address = (url if "://" in url else f"{scheme}://{url}").rstrip("/")
        self.url, self.namespace, self.session = without_user(self.address), namespace, Session()
        self.verify = os.environ.get("ARGO_INSECURE_SKIP_VERIFY", "false").lower() != "true"
        if token := os.environ.get("ARGO_TOKEN", "").strip():
            if not token.isprintable():  # requests would print it in its error
                raise ConfigError("ARGO_TOKEN must be one line of text, as `argo auth token` prints it.")
            self.session.headers["Authorization"] = token if " " in token else f"Bearer {token}"

    @classmethod
    def configured(cls, url: str | None, namespace: str) -> "ArgoServer | None":
        """The server of --argo-server or of ARGO_SERVER."""
        url = url or os.environ.get("ARGO_SERVER")
        return cls(url, namespace) if url else None

    def submit(self, workflow: Object) -> None:
        """Raises ConfigError if the server rejects the workflow, RekindleError if it is unavailable."""
        self._request("POST", json={"workflow": workflow})

    def find_duplicate(self, workflow: Object) -> str | None:
        """The name of an active run with equal manifest and parameters."""
        active = self._request("GET", params={"listOptions.labelSelector": f"{COMPLETED}!=true"})
        for running in active.get("items") or []:
            if same_manifest(running, workflow) and arguments(running) == arguments(workflow):
                return str(running["metadata"]["name"])
        return None

    def _request(self, method: str, **options: Any) -> Object:
        """Raises RekindleError for errors of access or of the server, ConfigError for those of the workflow."""
        from requests import RequestException

        try:
            # `verify` of the session would not prevail over REQUESTS_CA_BUNDLE
            url = f"{self.address}/api/v1/workflows/{self.namespace}"
            response = self.session.request(method, url, verify=self.verify, **options)
            if response.ok:
                return response.json()
        except RequestException as error:
            raise RekindleError(
                f"{self.url} does not answer as an Argo server ({without_user(str(error))}): is --argo-server (or "
                "ARGO_SERVER) right? Without it, the Kubernetes API is used."
            ) from error
        try:
            message = response.json()["message"]
        except (ValueError, KeyError, TypeError):
            message = response.text[:500]
        message = f"{response.status_code} {response.reason}: {message}"
        if response.status_code in (401, 403):
            raise RekindleError(f"{self.url} refuses: {message}. Set ARGO_TOKEN (`argo auth token` prints one).")
        if response.status_code == 429 or response.status_code >= 500:
            raise RekindleError(
                f"the Argo server {self.url} is in trouble: {message}. Submit again when it works; without "
                "--argo-server (or ARGO_SERVER), the Kubernetes API is used."
            )
        raise ConfigError(f"{self.url} refuses the workflow: {message}")
