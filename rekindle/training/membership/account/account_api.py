"""Requests of a coordinator to the Kubernetes API, with the token of its ServiceAccount
(`cluster.signal_account`)."""

import http.client
import json
import os
import ssl
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from argolocal.common.json_text import to_json
from rekindle.errors import write_stderr
from rekindle.kubernetes_names import KUBERNETES_SERVICE_HOST

ACCOUNT_FOLDER = Path("/var/run/secrets/kubernetes.io/serviceaccount")
REQUEST_TIMEOUT_S = 10.0
REFUSED_STATUSES = (401, 403)
# errors of a request that may succeed later
API_ERRORS = (OSError, ValueError, http.client.HTTPException)


class ApiRefusal(Exception):
    """The service account may not do this."""


class AccountApi:
    """The Kubernetes API. `account_folder`: folder with the token, the namespace and the
    certificate of the API. `is_refused` is True once the API has refused a request."""

    def __init__(self, address: str, account_folder: Path) -> None:
        self.address = address
        self.account_folder = account_folder
        self.is_refused = False
        self._has_reported = False

    def report_first(self, problem_text: str) -> None:
        """Print a problem, unless one was printed before."""
        if not self._has_reported:
            self._has_reported = True
            write_stderr(problem_text)

    @classmethod
    def from_environment(cls) -> "AccountApi | None":
        """Return the API of this pod's cluster; None if the pod has no token for it."""
        host = os.environ.get(KUBERNETES_SERVICE_HOST, "")
        if not (host and (ACCOUNT_FOLDER / "token").exists()):
            return None

        host = f"[{host}]" if ":" in host else host
        port = os.environ.get("KUBERNETES_SERVICE_PORT", "443")
        return cls(f"https://{host}:{port}", ACCOUNT_FOLDER)

    def read_namespace(self) -> str:
        """Return the namespace of this pod, quoted for a path. Raises OSError."""
        return quote((self.account_folder / "namespace").read_text().strip(), safe="")

    def call(self, method: str, path: str, patch: dict[str, Any] | None = None) -> Any:
        """Return the answer of the API, {} if the object does not exist. Raises ApiRefusal,
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
            self.is_refused = True
            raise ApiRefusal(f"the Kubernetes API refuses {method} {path} ({response.status}).")
        # a pod that has been deleted since it was listed
        if response.status == 404:
            return {}
        if response.status >= 300:
            raise ValueError(f"{method} {path}: HTTP {response.status}")
        return json.loads(response_body)
