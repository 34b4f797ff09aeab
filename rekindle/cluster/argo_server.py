"""Submits through an Argo server instead of the Kubernetes API, for those who reach no other.

    server = ArgoServer.configured("https://argo.example.com", "models")   # or from ARGO_SERVER, as the argo command
    server.submit(workflow)

The token is ARGO_TOKEN's; ARGO_SECURE=false and ARGO_INSECURE_SKIP_VERIFY=true mean what they mean to `argo`.
"""

import os
from contextlib import suppress
from typing import Any

from rekindle.argo.names import COMPLETED
from rekindle.cluster.api import Object
from rekindle.cluster.workflows import arguments, same_manifest
from rekindle.errors import ConfigError, RekindleError, without_user


class ArgoServer:
    """Hera's client of one Argo server, for one namespace."""

    def __init__(self, url: str, namespace: str) -> None:
        from hera.workflows import WorkflowsService

        scheme = "http" if os.environ.get("ARGO_SECURE", "true").lower() == "false" else "https"
        address = url if "://" in url else f"{scheme}://{url}"
        self.url, self.namespace = without_user(address), namespace
        verify = os.environ.get("ARGO_INSECURE_SKIP_VERIFY", "false").lower() != "true"
        token = os.environ.get("ARGO_TOKEN", "").strip() or None
        if not (token or "").isprintable():  # the client would say so, and print it
            raise ConfigError("ARGO_TOKEN must be one line of text, as `argo auth token` prints it.")
        # urljoin takes a path of the address only with a slash at its end
        self.service = WorkflowsService(host=address.rstrip("/") + "/", verify_ssl=verify, token=token)
        self.service.session.hooks["response"] = [self._refused]

    @classmethod
    def configured(cls, url: str | None, namespace: str) -> "ArgoServer | None":
        """The one of the flag or of ARGO_SERVER."""
        url = url or os.environ.get("ARGO_SERVER")
        return cls(url, namespace) if url else None

    def submit(self, workflow: Object) -> None:
        """Raises ConfigError for what the server refuses, RekindleError where it cannot be asked."""
        from hera.workflows.models import WorkflowCreateRequest
        from pydantic import ValidationError

        class AsItIs(WorkflowCreateRequest):
            workflow: Any = None  # Hera's model of it would drop the fields that it does not know

        with suppress(ValidationError):  # it is taken; only Hera's model does not know all of what comes back
            self._call(self.service.create_workflow, AsItIs(workflow=workflow), namespace=self.namespace)

    def equal(self, workflow: Object) -> str | None:
        """The name of a run that has not ended and does the same. Others' workflows may be more than Hera knows."""
        service = self.service
        found = self._call(
            service.session.get,
            f"{service.host}api/v1/workflows/{self.namespace}",
            params={"listOptions.labelSelector": f"{COMPLETED}!=true"},
            headers={"Authorization": service.token},
            verify=service.verify_ssl,
        )
        for each in self._call(found.json).get("items") or []:
            if same_manifest(each, workflow) and arguments(each) == arguments(workflow):
                return str(each["metadata"]["name"])
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

    def _refused(self, answer: Any, **_: Any) -> None:
        """What is no answer to what was asked, told apart by whose trouble it is."""
        if answer.ok:
            return
        try:
            said = answer.json()["message"]
        except (ValueError, KeyError, TypeError):
            said = answer.text[:500]
        said = f"{answer.status_code} {answer.reason}: {said}"
        if answer.status_code in (401, 403):
            raise RekindleError(f"{self.url} refuses: {said}. Set ARGO_TOKEN (`argo auth token` prints one).")
        if answer.status_code == 429 or answer.status_code >= 500:
            raise RekindleError(
                f"the Argo server {self.url} is in trouble: {said}. Submit again when it is well; without "
                "--argo-server (or ARGO_SERVER), the Kubernetes API is used."
            )
        raise ConfigError(f"{self.url} refuses the workflow: {said}")
