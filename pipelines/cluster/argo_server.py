"""Submits through an Argo server instead of the Kubernetes API, for those who reach no other.

    server = ArgoServer.configured("https://argo.example.com", "models")   # or from ARGO_SERVER, as the argo command
    server.submit(workflow)

The token is ARGO_TOKEN's; ARGO_SECURE=false and ARGO_INSECURE_SKIP_VERIFY=true mean what they mean to `argo`.
"""

import os
from typing import Any

from pipelines.cluster.api import Object
from pipelines.cluster.workflows import COMPLETED, arguments, same_manifest
from steps.errors import ConfigError, RekindleError


class ArgoServer:
    """Hera's client of one Argo server, for one namespace."""

    def __init__(self, url: str, namespace: str) -> None:
        from hera.workflows import WorkflowsService

        scheme = "http" if os.environ.get("ARGO_SECURE", "true").lower() == "false" else "https"
        self.url = url if "://" in url else f"{scheme}://{url}"
        self.namespace = namespace
        verify = os.environ.get("ARGO_INSECURE_SKIP_VERIFY", "false").lower() != "true"
        token = os.environ.get("ARGO_TOKEN") or None
        # urljoin takes a path of the address only with a slash at its end
        self.service = WorkflowsService(host=self.url.rstrip("/") + "/", verify_ssl=verify, token=token)

    @classmethod
    def configured(cls, url: str | None, namespace: str) -> "ArgoServer | None":
        """The one of the flag or of ARGO_SERVER."""
        url = url or os.environ.get("ARGO_SERVER")
        return cls(url, namespace) if url else None

    def submit(self, workflow: Object) -> None:
        """Raises ConfigError for what the server refuses, RekindleError where it cannot be asked."""
        from hera.workflows.models import WorkflowCreateRequest

        class AsItIs(WorkflowCreateRequest):
            workflow: Any = None  # Hera's model of it would drop the fields that it does not know

        self._call(self.service.create_workflow, AsItIs(workflow=workflow))

    def equal(self, workflow: Object) -> str | None:
        """The name of a run that has not ended and does the same."""
        found = self._call(self.service.list_workflows, label_selector=f"{COMPLETED}!=true")
        for each in (item.model_dump(by_alias=True, exclude_none=True) for item in found.items or []):
            if same_manifest(each, workflow) and arguments(each) == arguments(workflow):
                return str(each["metadata"]["name"])
        return None

    def _call(self, call: Any, *args: Any, **options: Any) -> Any:
        from hera import exceptions
        from requests import RequestException

        try:
            return call(*args, namespace=self.namespace, **options)
        except RequestException as error:
            raise RekindleError(
                f"the Argo server {self.url} does not answer ({error}): is --argo-server (or ARGO_SERVER) right? "
                "Without it, the Kubernetes API is used."
            ) from error
        except (exceptions.Unauthorized, exceptions.Forbidden) as error:
            raise RekindleError(
                f"{self.url} refuses: {error}. Set ARGO_TOKEN (`argo auth token` prints one)."
            ) from error
        except exceptions.HeraException as error:
            raise ConfigError(f"{self.url} refuses the workflow: {error}") from error
