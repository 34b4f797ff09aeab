"""Presents this machine as a cluster with the embedded services and the controllers of training
jobs.

    cluster = LocalCluster(Path(".rekindle")); cluster.prefetch();
    cluster.configmap("rekindle")["S3_ENDPOINT_URL"]

The embedded services store `services/`, `s3/` and `mlflow.db` in the home.
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
from rekindle.local.services.services import BUCKET, SERVICES, Services

if TYPE_CHECKING:
    from argolocal.controllers.controller_kinds import Kinds
    from rekindle.storage import Store


class LocalCluster(cluster.LocalCluster):
    """The cluster with its state in `home` (default: the home of commands); `images` maps image
    names to local equivalents (default: images.yaml)."""

    bucket = BUCKET
    modules = ("rekindle",)

    def __init__(self, home: Path | None = None, images: Mapping[str, Image] | None = None) -> None:
        super().__init__(home, images)
        self.services = Services(self.home)
        self._store: Store | None = None

    @property
    def path(self) -> str:
        return os.environ.get(project.PATH, str(project.REFERENCE))

    @cached_property
    def kinds(self) -> "Kinds":
        from rekindle.local.jobs.job_kinds import kinds

        return kinds()

    def prefetch(self) -> None:
        """Start the services and restart dead deployments in the background. Returns
        immediately."""
        self.services.store_serving_token()
        self.services.start()
        self.revive()

    def ready(self, timeout: float = 60) -> None:
        """Wait until the services answer. Raises StorageError or TrackingError."""
        self.services.ready(timeout)

    def keep_running(self) -> None:
        """Restart dead services and deployments. Raises StorageError or TrackingError."""
        self.services.restart_dead()
        super().keep_running()

    def built_in(self) -> Mapping[tuple[str, str], Callable[[], Mapping[str, str]]]:
        """Return the built-in ConfigMap and Secrets. Model servers get the same keys as other pods,
        because all processes on this machine run as the same user."""
        services = self.services
        return {
            ("ConfigMap", CONFIG_MAP): services.environment,
            ("Secret", STORE_SECRET): lambda: services.credentials() | services.login(),
            ("Secret", SERVING_SECRET): services.credentials,
            ("Secret", NOTIFY_SECRET): lambda: self._webhook() | services.login(),
            ("Secret", PROGRAM_SECRET): lambda: services.environ,
            ("Secret", TOKEN_SECRET): services.serving_token,
        }

    def _webhook(self) -> dict[str, str]:
        """Return the content of the Secret with the notification URL: $NOTIFY_URL or, if it is not
        set, the content of `notify-url` in the home directory; {} without a URL."""
        file = self.home / "notify-url"
        url = self.services.environ.get(NOTIFY_URL) or (
            file.read_text().strip() if file.exists() else ""
        )
        if url:
            return {NOTIFY_URL: url}
        return {}

    def store(self, s3: Mapping[str, Any] | None = None) -> "Store":
        """Return the object store that pods use or, with `s3`, the store that an artifact
        specifies. Raises ConfigError, KeyError."""
        from rekindle.storage import Store

        # this method needs only the keys, so it does not start MLflow
        keys = self.services.credentials()

        if s3 and (s3.get("bucket") or s3.get("endpoint")):
            url = (
                s3.get("endpoint")
                and f"{'http' if s3.get('insecure') else 'https'}://{s3['endpoint']}"
            )
            references = [
                (s3.get("accessKeySecret"), AWS_ACCESS_KEY_ID),
                (s3.get("secretKeySecret"), AWS_SECRET_ACCESS_KEY),
            ]
            access, secret = (self._key(ref) if ref else keys.get(name) for ref, name in references)

            return Store(s3.get("bucket") or BUCKET, url or self.services.url("s3"), access, secret)

        if not self._store:
            access = keys.get(AWS_ACCESS_KEY_ID)
            secret = keys.get(AWS_SECRET_ACCESS_KEY)
            self._store = Store(
                self.services.environ.get(S3_BUCKET, BUCKET),
                self.services.url("s3"),
                access,
                secret,
            )

        return self._store

    def _key(self, reference: Mapping[str, str]) -> str:
        try:
            return self.secret(reference["name"])[reference["key"]]
        except KeyError:
            raise ConfigError(
                f"the Secret {reference.get('name')!r} with the key {reference.get('key')!r} does"
                " not exist: add it to the Workflow's file, separated by ---."
            ) from None

    def down(self) -> list[str]:
        """Stop the deployments and then the services, wait until they have ended, and return their
        names. Raises Busy while a run is active."""
        return super().down() + self.services.down()

    def overview(self) -> list[dict[str, Any]]:
        """Return the kind, name, address and state of each service and deployment. Restarts dead
        deployments."""
        records = [record for name in SERVICES if (record := self.services.find(name))]
        services = [
            {"kind": "service", "name": record.name, "address": record.url, "running": record.alive}
            for record in records
        ]
        return services + super().overview()
