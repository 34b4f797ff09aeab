"""Presents this machine as a cluster with the embedded services and the controllers of training
jobs.

    cluster = LocalCluster(Path(".rekindle"))
    cluster.prefetch()
    cluster.configmap("rekindle")["S3_ENDPOINT_URL"]

The embedded services keep their files in REKINDLE_HOME, in `services/`, `s3/` and `mlflow.db`.
"""

import os
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from argolocal.pods.container_images import Image
from argolocal.runner import cluster
from rekindle import project
from rekindle.errors import ConfigError
from rekindle.kubernetes_names import (
    AWS_ACCESS_KEY_ID,
    AWS_SECRET_ACCESS_KEY,
    CONFIG_MAP,
    NOTIFY_SECRET,
    NOTIFY_URL,
    PROGRAM_SECRET,
    S3_BUCKET,
    SERVING_SECRET,
    STORE_SECRET,
    TOKEN_SECRET,
)
from rekindle.local.services.services import DEFAULT_BUCKET, SERVICE_NAMES, Services

if TYPE_CHECKING:
    from argolocal.controllers.controller_kinds import Kinds
    from rekindle.storage import Store


class LocalCluster(cluster.LocalCluster):
    """This machine as a cluster, with its state in `home_folder` (by default REKINDLE_HOME).
    `images` maps the names of container images to local equivalents (default: images.yaml)."""

    bucket = DEFAULT_BUCKET
    modules = ("rekindle",)

    def __init__(
        self, home_folder: Path | None = None, images: Mapping[str, Image] | None = None
    ) -> None:
        super().__init__(home_folder, images)
        self.services = Services(self.home)
        self._store: Store | None = None

    @property
    def path(self) -> str:
        return os.environ.get(project.PATH_VARIABLE, str(project.REFERENCE))

    @cached_property
    def kinds(self) -> "Kinds":
        from rekindle.local.jobs.job_kinds import create_kinds

        return create_kinds()

    def prefetch(self) -> None:
        """Start the services and restart dead deployments in the background. Returns
        immediately."""
        self.services.store_serving_token()
        self.services.start()
        self.revive()

    def ready(self, timeout: float = 60) -> None:
        """Wait until the embedded services answer. Raises StorageError or TrackingError."""
        self.services.ready(timeout)

    def keep_running(self) -> None:
        """Restart services and deployments whose processes have ended. Raises StorageError or
        TrackingError."""
        self.services.restart_dead()
        super().keep_running()

    def built_in(self) -> Mapping[tuple[str, str], Callable[[], Mapping[str, str]]]:
        """Return, by kind and name, functions that return the content of the built-in ConfigMap and
        Secrets. Model servers get the same S3 keys as other pods, because all processes on this
        machine run as the same user."""
        services = self.services
        return {
            ("ConfigMap", CONFIG_MAP): services.environment,
            ("Secret", STORE_SECRET): lambda: services.credentials() | services.login(),
            ("Secret", SERVING_SECRET): services.credentials,
            ("Secret", NOTIFY_SECRET): lambda: self._read_webhook_secret() | services.login(),
            ("Secret", PROGRAM_SECRET): lambda: services.environ,
            ("Secret", TOKEN_SECRET): services.serving_token,
        }

    def _read_webhook_secret(self) -> dict[str, str]:
        """Return the content of the Secret with the notification URL: $NOTIFY_URL or, if it is not
        set, the content of `notify-url` in the home directory; {} without a URL."""
        url_file = self.home / "notify-url"
        webhook_url = self.services.environ.get(NOTIFY_URL) or (
            url_file.read_text().strip() if url_file.exists() else ""
        )
        if webhook_url:
            return {NOTIFY_URL: webhook_url}
        return {}

    def store(self, s3_location: Mapping[str, Any] | None = None) -> "Store":
        """Return the object store that pods use or, with `s3_location`, the store that an artifact
        specifies. Raises ConfigError, KeyError."""
        from rekindle.storage import Store

        # only the keys of the object store are needed here, so MLflow is not started
        store_credentials = self.services.credentials()

        if s3_location and (s3_location.get("bucket") or s3_location.get("endpoint")):
            endpoint_url = (
                s3_location.get("endpoint")
                and f"{'http' if s3_location.get('insecure') else 'https'}://{s3_location['endpoint']}"
            )
            secret_references = [
                (s3_location.get("accessKeySecret"), AWS_ACCESS_KEY_ID),
                (s3_location.get("secretKeySecret"), AWS_SECRET_ACCESS_KEY),
            ]
            access_key, secret_key = (
                self._read_secret_value(secret_reference)
                if secret_reference
                else store_credentials.get(variable_name)
                for secret_reference, variable_name in secret_references
            )

            return Store(
                s3_location.get("bucket") or DEFAULT_BUCKET,
                endpoint_url or self.services.url("s3"),
                access_key,
                secret_key,
            )

        if not self._store:
            access_key = store_credentials.get(AWS_ACCESS_KEY_ID)
            secret_key = store_credentials.get(AWS_SECRET_ACCESS_KEY)
            self._store = Store(
                self.services.environ.get(S3_BUCKET, DEFAULT_BUCKET),
                self.services.url("s3"),
                access_key,
                secret_key,
            )

        return self._store

    def _read_secret_value(self, secret_reference: Mapping[str, str]) -> str:
        try:
            return self.secret(secret_reference["name"])[secret_reference["key"]]
        except KeyError:
            raise ConfigError(
                f"the Secret {secret_reference.get('name')!r} with the key"
                f" {secret_reference.get('key')!r} does"
                " not exist: add it to the Workflow's file, separated by ---."
            ) from None

    def down(self) -> list[str]:
        """Stop the deployments and then the services, wait until they have ended, and return their
        names. Raises Busy while a run is active."""
        return super().down() + self.services.down()

    def overview(self) -> list[dict[str, Any]]:
        """Return the kind, name, address and state of each service and deployment. Restarts dead
        deployments."""
        service_records = map(self.services.find, SERVICE_NAMES)
        service_rows = [
            {
                "kind": "service",
                "name": service_record.name,
                "address": service_record.url,
                "running": service_record.alive,
            }
            for service_record in service_records
            if service_record
        ]
        return service_rows + super().overview()
