"""All versions of all models in MLflow, and the addresses of their files.

Retention keeps the files and the runs to which any version refers, also a version that another
client has registered.
"""

import re
from collections.abc import Iterable
from functools import cache
from urllib.parse import unquote

from rekindle import tracking
from rekindle.mlflow_api import (
    DownloadAddress,
    ModelAnswer,
    ModelVersion,
    RequestRefused,
    VersionsPage,
    send_request,
)
from rekindle.names import parse_s3_address, split_address
from rekindle.release.retention.decision import Release
from rekindle.release.retention.mlflow_records import search_all_pages
from rekindle.storage import Store

# matches the id of an MLflow run in an artifact address
RUN_ID_PATTERN = re.compile("[0-9a-f]{32}")


def has_alias(model_name: str, version: str) -> bool:
    """Return True if an alias refers to the version."""
    model_answer = send_request(
        "GET", "mlflow/registered-models/get", ModelAnswer, params={"name": model_name}
    )
    return any(
        model_alias.version == version for model_alias in model_answer.registered_model.aliases
    )


def has_other_version(object_store: Store, release: Release) -> bool:
    """Return True if another version, of this model or any other model, has the same files as a
    release."""
    return RegisteredVersions().has_other_reference(
        object_store, release.prefix, (release.model, str(release.version))
    )


class RegisteredVersions:
    """All versions of all models in MLflow, and the addresses of their files."""

    def __init__(self) -> None:
        version_pages = search_all_pages("model-versions", VersionsPage)
        self.rows = [
            model_version
            for version_page in version_pages
            for model_version in version_page.model_versions
        ]

    def group_by_model(self) -> dict[str, list[ModelVersion]]:
        """Return the versions by the name of their model."""
        versions_by_model: dict[str, list[ModelVersion]] = {}
        for model_version in self.rows:
            versions_by_model.setdefault(model_version.name, []).append(model_version)
        return versions_by_model

    def has_other_reference(
        self, object_store: Store, key_prefix: str, except_version: tuple[str, str]
    ) -> bool:
        """Return True if a version other than `except_version` has files below `key_prefix`, or
        in a folder that contains `key_prefix`."""
        return any(
            _is_below_prefix(address, key_prefix)
            or _is_above_prefix(address, object_store, key_prefix)
            for model_version in self.rows
            if (model_version.name, model_version.version) != except_version
            for address in list_addresses(model_version)
        )

    def list_run_ids(self, releases: Iterable[Release]) -> set[str]:
        """Return the ids of the MLflow runs to which versions other than `releases` refer."""
        released_versions = {(release.model, str(release.version)) for release in releases}
        other_versions = [
            model_version
            for model_version in self.rows
            if (model_version.name, model_version.version) not in released_versions
        ]
        referred_ids = {model_version.run_id for model_version in other_versions}
        return referred_ids.union(
            *(
                RUN_ID_PATTERN.findall(address)
                for model_version in other_versions
                for address in list_addresses(model_version)
            )
        )


def list_addresses(model_version: ModelVersion) -> set[str]:
    """Return all addresses of a version's files, which are the addresses in its record and the
    address that MLflow resolves them to."""
    found_addresses = {model_version.source, model_version.tags.get(tracking.URI, "")}
    if split_address(model_version.source).scheme in ("models", "runs"):
        found_addresses.add(_fetch_download_address(model_version.name, model_version.version))
    return {
        address_text
        for address in found_addresses - {""}
        for address_text in (address, unquote(address))
    }


@cache
def _fetch_download_address(model_name: str, version: str) -> str:
    """Return the address of a version's files, as MLflow resolves it; "" if the version was
    deleted. The address of a version's files never changes, so the address is cached."""
    try:
        address_answer = send_request(
            "GET",
            "mlflow/model-versions/get-download-uri",
            DownloadAddress,
            params={"name": model_name, "version": version},
        )
    except RequestRefused as error:
        if error.code != "RESOURCE_DOES_NOT_EXIST":
            raise
        return ""

    return address_answer.artifact_uri


def _is_below_prefix(address: str, parent_prefix: str) -> bool:
    """Return True if an address of files is `parent_prefix` or below `parent_prefix`.

    The servers and buckets in the addresses are not compared, since several addresses can refer to
    one object store.
    """
    return f"/{parent_prefix.strip('/')}/" in f"/{address}/"


def _is_above_prefix(address: str, object_store: Store, child_prefix: str) -> bool:
    """Return True if an address of files is the whole bucket, or a folder of the bucket that
    contains `child_prefix`."""
    s3_address = parse_s3_address(address)
    if not s3_address or s3_address.bucket != object_store.bucket:
        return False
    return not s3_address.key or child_prefix.startswith(f"{s3_address.key.rstrip('/')}/")
