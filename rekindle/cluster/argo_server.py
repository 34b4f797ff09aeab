"""Submits through an Argo server, for users who cannot reach the Kubernetes API.

    server = ArgoServer.configured("https://argo.example.com", "models")   # or from ARGO_SERVER
    server.submit(workflow)

It reads ARGO_TOKEN, ARGO_SECURE and ARGO_INSECURE_SKIP_VERIFY as the `argo` command does.
"""

import os
from contextlib import suppress
from typing import Any

from rekindle.argo.names import COMPLETED
from rekindle.cluster.api import Object
from rekindle.cluster.workflows import arguments, same_manifest
from rekindle.errors import ConfigError, RekindleError, without_user


class ArgoServer:
    """Hera's client for one namespace of an Argo server."""

    def __init__(self, url: str, namespace: str) -> None:
        from hera.workflows import WorkflowsService

        scheme = "http" if os.environ.get("ARGO_SECURE", "true").lower() == "false" else "https"
        address = url if "://" in url else f"{scheme}://{url}"
        self.url, self.namespace = without_user(address), namespace
        verify = os.environ.get("ARGO_INSECURE_SKIP_VERIFY", "false").lower() != "true"
        token = os.environ.get("ARGO_TOKEN", "").strip() or None
        if not (token or "").isprintable():  # the client would print it in its error
            raise ConfigError("ARGO_TOKEN must be one line of text, as `argo auth token` prints it.")
        # urljoin keeps the path of the address only if it ends with a slash
        self.service = WorkflowsService(host=address.rstrip("/") + "/", verify_ssl=verify, token=token)
        self.service.session.hooks["response"] = [self._raise_for_status]

    @classmethod
    def configured(cls, url: str | None, namespace: str) -> "ArgoServer | None":
        """The server of --argo-server or of ARGO_SERVER."""
        url = url or os.environ.get("ARGO_SERVER")
        return cls(url, namespace) if url else None

    def submit(self, workflow: Object) -> None:
        """Raises ConfigError if the server rejects the workflow, RekindleError if it is unavailable."""
        from hera.workflows.models import WorkflowCreateRequest
        from pydantic import ValidationError

        class UncheckedRequest(WorkflowCreateRequest):
            workflow: Any = None  # Hera's model would drop unknown fields

        with suppress(ValidationError):  # the workflow is submitted; Hera's model only rejects the response
            self._call(self.service.create_workflow, UncheckedRequest(workflow=workflow), namespace=self.namespace)

    def equal(self, workflow: Object) -> str | None:
        """The name of an active run with equal manifest and parameters. Hera's models reject some workflows."""
        service = self.service
        response = self._call(
            service.session.get,
            f"{service.host}api/v1/workflows/{self.namespace}",
            params={"listOptions.labelSelector": f"{COMPLETED}!=true"},
            headers={"Authorization": service.token},
            verify=service.verify_ssl,
        )
        for running in self._call(response.json).get("items") or []:
            if same_manifest(running, workflow) and arguments(running) == arguments(workflow):
                return str(running["metadata"]["name"])
        return None

    def _call(self, call: Any, *args: Any, **options: Any) -> Any:
        from requests import RequestException

        try:
            return call(*args, **options)
        except RequestException as error:
            raise RekindleError(
                f"{self.url} does not answer as an Argo server ({without_user(str(error))}): is --argo-server (or "
                "ARGO_SERVER) right? Without it, the Kubernetes API is used."
            ) from error

    def _raise_for_status(self, response: Any, **_: Any) -> None:
        """Raise RekindleError for errors of access or of the server, ConfigError for those of the workflow."""
        if response.ok:
            return
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
