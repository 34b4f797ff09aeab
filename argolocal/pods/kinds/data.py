"""Run data templates. Their result is a JSON list of the keys in a bucket, transformed by
expressions.

    phase, message, outputs = transform(template["data"], store)

Source: Argo's workflow/data, workflow/artifacts/s3 (ListObjects) and cmd/argoexec data; v4.1.
"""

import posixpath
from collections.abc import Callable, Mapping
from typing import Any

from argolocal.errors import ConfigError, StorageError
from argolocal.language import gofmt
from argolocal.language.expr import ExprError, evaluate

Result = tuple[str, str, dict[str, Any] | None]  # (phase, message, outputs) of a node


def transform(data: Mapping[str, Any], store: Callable[[dict[str, Any]], Any]) -> Result:
    """List the keys and apply the transformations. Any error, such as a missing bucket, fails the
    node."""
    try:
        result = _list_keys(data["source"]["artifactPaths"]["s3"], store)
    except (StorageError, ConfigError) as error:
        return _failed(f"unable to process data source: unable to source artifact paths: {error}")

    for index, step in enumerate(data.get("transformation") or []):
        try:
            if step.get("expression"):
                result = evaluate(step["expression"], {"data": result})
        except ExprError as error:
            return _failed(
                f"unable to process data transformation: error processing data step {index}:"
                f" {error}"
            )

    return "Succeeded", "", {"result": gofmt.dumps(result), "exitCode": "0"}


def _list_keys(s3: dict[str, Any], store: Callable[[dict[str, Any]], Any]) -> list[str]:
    """Return all keys below the key of `s3`. Raises StorageError, for example if no such key
    exists."""
    if not s3.get("bucket"):
        # as in Argo, the bucket of the artifact repository is not the default here
        raise StorageError("Bucket name cannot be empty")
    key = s3.get("key") or ""
    bucket = store(s3)
    prefix = f"{posixpath.normpath(key)}/" if key else ""
    keys = [entry.key for entry in bucket.list(prefix) if not entry.key.endswith("/")]
    if not keys and not next(iter(bucket.list(key)), None):
        raise StorageError(f"no key found of name {key}")
    return keys


def _failed(reason: str) -> Result:
    message = f"main: Error (exit code 64): unable to process data template: {reason}"
    return "Failed", message, {"exitCode": "64"}
