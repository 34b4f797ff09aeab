"""Run data templates. The result of a data template is a JSON list of the keys in a bucket,
transformed by expressions.

    phase, message, outputs = run_data_template(template["data"], open_store)

The behaviour follows Argo's workflow/data, workflow/artifacts/s3 (ListObjects) and cmd/argoexec
data; v4.1.
"""

import posixpath
from collections.abc import Callable, Mapping
from typing import Any

from argolocal.errors import ConfigError, StorageError
from argolocal.language import gofmt
from argolocal.language.expr import ExprError, evaluate

# (phase, message, outputs) of a node
Result = tuple[str, str, dict[str, Any] | None]


def run_data_template(
    data_template: Mapping[str, Any], open_store: Callable[[dict[str, Any]], Any]
) -> Result:
    """List the keys and apply the transformations. Return the phase, message and outputs of the
    node. After any error, such as a missing bucket, the phase is Failed."""
    try:
        listed_values = _list_keys(data_template["source"]["artifactPaths"]["s3"], open_store)
    except (StorageError, ConfigError) as error:
        return _make_failure(
            f"unable to process data source: unable to source artifact paths: {error}"
        )

    for index, transformation in enumerate(data_template.get("transformation") or []):
        try:
            if transformation.get("expression"):
                listed_values = evaluate(transformation["expression"], {"data": listed_values})
        except ExprError as error:
            return _make_failure(
                f"unable to process data transformation: error processing data step {index}:"
                f" {error}"
            )

    return "Succeeded", "", {"result": gofmt.dumps(listed_values), "exitCode": "0"}


def _list_keys(
    s3_location: dict[str, Any], open_store: Callable[[dict[str, Any]], Any]
) -> list[str]:
    """Return all keys below the key of `s3_location`. Raises StorageError, for example if no key
    exists below the key of `s3_location`."""
    if not s3_location.get("bucket"):
        # as in Argo, the bucket of the artifact repository is not the default here
        raise StorageError("Bucket name cannot be empty")
    base_key = s3_location.get("key") or ""
    object_store = open_store(s3_location)
    key_prefix = f"{posixpath.normpath(base_key)}/" if base_key else ""
    keys = [
        listed_object.key
        for listed_object in object_store.list(key_prefix)
        if not listed_object.key.endswith("/")
    ]
    if not keys and not next(iter(object_store.list(base_key)), None):
        raise StorageError(f"no key found of name {base_key}")
    return keys


def _make_failure(reason: str) -> Result:
    message = f"main: Error (exit code 64): unable to process data template: {reason}"
    return "Failed", message, {"exitCode": "64"}
