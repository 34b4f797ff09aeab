"""Find the cluster that kubectl would use: from KUBECONFIG, ~/.kube/config, or the ServiceAccount
of the current pod.

    settings, context, namespace = load(None)    # settings for the kubernetes client

Errors of the kubernetes client become a ConfigError that names the kubeconfig file.
"""

import base64
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from kubernetes import client, config

from argolocal.common.environment import is_header_text
from argolocal.language.yaml_text import parse_one, read_text
from rekindle.errors import ConfigError, did_you_mean

NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
REGENERATE_HINT = (
    "your provider's `get-credentials` command writes a new one; `kubectl cluster-info` tests it."
)
# exceptions that the kubernetes client raises for malformed files
INVALID_FILE_ERRORS = (
    config.ConfigException,
    OSError,
    ValueError,
    TypeError,
    AttributeError,
    KeyError,
    yaml.YAMLError,
)


class Settings(client.Configuration):
    """Settings that strip the line break at the end of a token, as kubectl does."""

    def get_api_key_with_prefix(self, identifier: str, alias: str | None = None) -> str:
        # do not print the error of a failed credential plugin, because the server's answer 401 is
        # reported
        with _captured_errors():
            return str(super().get_api_key_with_prefix(identifier, alias) or "").strip()


def load_settings(context: str | None) -> tuple[Settings, str, str]:
    """Return the settings, context and namespace that kubectl would use. Raises ConfigError."""
    settings = Settings()

    files = _existing_files()
    if context is None and not files and NAMESPACE_FILE.exists():
        with _config_errors("the ServiceAccount of this pod"):
            config.load_incluster_config(client_configuration=settings)

        return settings, "in-cluster", NAMESPACE_FILE.read_text().strip()

    if not files:
        raise ConfigError(
            "no cluster is configured: neither KUBECONFIG nor ~/.kube/config names an existing"
            " file; " + REGENERATE_HINT
        )

    source = os.pathsep.join(files)
    with _config_errors(f"the kubeconfig {source}", files):
        # parse the files first, because the client's own parser does not limit the size of a file
        for file in files:
            _parse_file(file)

        contexts_and_current: tuple[Any, Any] = config.list_kube_config_contexts(source)
        entries, current = contexts_and_current
        contexts: dict[str, Any] = {entry["name"]: entry.get("context") or {} for entry in entries}

        name = context or str(current["name"])
        if name not in contexts:
            hint = did_you_mean(name, set(contexts)) or f" Known contexts: {', '.join(contexts)}."
            raise ConfigError(f"--context {name}: the kubeconfig does not contain it.{hint}")

        with _captured_errors() as errors:
            config.load_kube_config(source, context=name, client_configuration=settings)

        # raise the error here, because the client only logs errors of a credential plugin, and
        # continues without credentials
        if errors:
            raise ValueError(f"the credential plugin of context {name} failed ({errors[-1]})")
        if not settings.host.startswith(("https://", "http://")):
            raise ValueError(f"the server of context {name} must be https://HOST[:PORT]")
        if not is_header_text(settings.get_api_key_with_prefix("BearerToken")):
            raise ValueError(f"the token of context {name} must be one line of printable ASCII")

    return settings, name, str(contexts[name].get("namespace") or "default")


@contextmanager
def _config_errors(source: str, files: list[str] | None = None) -> Iterator[None]:
    """Convert errors that the client raises in this context to ConfigError."""
    try:
        yield
    except ConfigError:
        raise
    except INVALID_FILE_ERRORS as error:
        problems = ((f"the kubeconfig {file}", _find_problem(file)) for file in files or [])
        culprit, cause = next((pair for pair in problems if pair[1]), (source, _describe(error)))
        raise ConfigError(
            f"{culprit} cannot be used: {cause}. Correct it; {REGENERATE_HINT}"
        ) from error


def _parse_file(file: str) -> Any:
    """Parse a file. Raises OSError, ValueError."""
    try:
        return parse_one(read_text(Path(file).expanduser()), "it")
    except ConfigError as error:
        raise ValueError(str(error).removesuffix(".")) from None


def _find_problem(file: str) -> str:
    """Describe the first problem of a kubeconfig file; return "" if it is valid. The description
    contains no values, because they may be credentials."""
    try:
        content = _parse_file(file)
    except INVALID_FILE_ERRORS as error:
        return _describe(error)

    if not isinstance(content, dict):
        if content:
            return "it must have clusters, users and contexts, but is plain text"
        return "it is empty"

    for kind in ("cluster", "user", "context"):
        entries = content.get(f"{kind}s") or []
        if not isinstance(entries, list) or not all(
            isinstance(entry, dict) and "name" in entry for entry in entries
        ):
            return f"{kind}s must be a list of entries with a name"

        for entry in entries:
            fields = entry.get(kind) or {}
            if not isinstance(fields, dict):
                return f"{kind}s: the {kind} of {entry['name']} must have fields"

            for key, value in fields.items():
                if key.endswith("-data") and not _is_base64(value):
                    return f"{kind}s: {key} of {entry['name']} must be base64"

    return ""


def _is_base64(value: Any) -> bool:
    try:
        base64.standard_b64decode(value)
    except (ValueError, TypeError):
        return False
    return True


def _describe(error: BaseException) -> str:
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {error.strerror}"
    if isinstance(error, UnicodeDecodeError | yaml.YAMLError):
        return "it must be text"
    return str(error).removeprefix("Invalid kube-config file. ")


@contextmanager
def _captured_errors() -> Iterator[list[str]]:
    """Collect the errors that the client logs, such as failures of a credential plugin, instead of
    printing them."""
    messages: list[str] = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger().addHandler(handler)
    try:
        yield messages
    finally:
        logging.getLogger().removeHandler(handler)


def _existing_files() -> list[str]:
    """List the existing files that kubectl would read."""
    paths = os.environ.get("KUBECONFIG") or str(Path.home() / ".kube/config")
    return [path for path in paths.split(os.pathsep) if Path(path).expanduser().is_file()]
