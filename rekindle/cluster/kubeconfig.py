"""Find the cluster that kubectl would use: from KUBECONFIG, ~/.kube/config, or the ServiceAccount
of the current pod.

    # `settings` is the configuration of the kubernetes client
    settings, context, namespace = load_settings(None)

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
from rekindle.errors import ConfigError, suggest_similar

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
    """The configuration of the kubernetes client. A line break at the end of a token is removed, as
    kubectl does."""

    def get_api_key_with_prefix(self, identifier: str, alias: str | None = None) -> str:
        # do not print the error of a failed credential plugin, because the server then answers 401,
        # which is reported
        with _capture_errors():
            return str(super().get_api_key_with_prefix(identifier, alias) or "").strip()


def load_settings(requested_context: str | None) -> tuple[Settings, str, str]:
    """Return the settings, context and namespace that kubectl would use. `requested_context` is
    None for the current context. Raises ConfigError."""
    settings = Settings()

    kubeconfig_files = _list_existing_files()
    if requested_context is None and not kubeconfig_files and NAMESPACE_FILE.exists():
        with _convert_errors("the ServiceAccount of this pod"):
            config.load_incluster_config(client_configuration=settings)

        return settings, "in-cluster", NAMESPACE_FILE.read_text().strip()

    if not kubeconfig_files:
        raise ConfigError(
            "no cluster is configured: neither KUBECONFIG nor ~/.kube/config names an existing"
            " file; " + REGENERATE_HINT
        )

    kubeconfig_paths = os.pathsep.join(kubeconfig_files)
    with _convert_errors(f"the kubeconfig {kubeconfig_paths}", kubeconfig_files):
        # parse the files first, because the client's own parser does not limit the size of a file
        for file in kubeconfig_files:
            _parse_file(file)

        contexts_and_current: tuple[Any, Any] = config.list_kube_config_contexts(kubeconfig_paths)
        context_entries, current_context = contexts_and_current
        contexts_by_name: dict[str, Any] = {
            context_entry["name"]: context_entry.get("context") or {}
            for context_entry in context_entries
        }

        name = requested_context or str(current_context["name"])
        if name not in contexts_by_name:
            hint = (
                suggest_similar(name, set(contexts_by_name))
                or f" Known contexts: {', '.join(contexts_by_name)}."
            )
            raise ConfigError(f"--context {name}: the kubeconfig does not contain it.{hint}")

        with _capture_errors() as logged_errors:
            config.load_kube_config(kubeconfig_paths, context=name, client_configuration=settings)

        # the client only logs errors of a credential plugin, and continues without credentials
        if logged_errors:
            raise ValueError(
                f"the credential plugin of context {name} failed ({logged_errors[-1]})"
            )
        if not settings.host.startswith(("https://", "http://")):
            raise ValueError(f"the server of context {name} must be https://HOST[:PORT]")
        if not is_header_text(settings.get_api_key_with_prefix("BearerToken")):
            raise ValueError(f"the token of context {name} must be one line of printable ASCII")

    return settings, name, str(contexts_by_name[name].get("namespace") or "default")


@contextmanager
def _convert_errors(
    config_source: str, kubeconfig_files: list[str] | None = None
) -> Iterator[None]:
    """Convert errors that the client raises in this context to ConfigError."""
    try:
        yield
    except ConfigError:
        raise
    except INVALID_FILE_ERRORS as error:
        file_problems = (
            (f"the kubeconfig {file}", _find_problem(file)) for file in kubeconfig_files or []
        )
        faulty_source, fault_cause = next(
            (source_and_problem for source_and_problem in file_problems if source_and_problem[1]),
            (config_source, _describe_error(error)),
        )
        raise ConfigError(
            f"{faulty_source} cannot be used: {fault_cause}. Correct it; {REGENERATE_HINT}"
        ) from error


def _parse_file(file: str) -> Any:
    """Return the content of a YAML file. Raises OSError if the file cannot be read, ValueError if
    the file is malformed."""
    try:
        return parse_one(read_text(Path(file).expanduser()), "it")
    except ConfigError as error:
        raise ValueError(str(error).removesuffix(".")) from None


def _find_problem(file: str) -> str:
    """Describe the first problem of a kubeconfig file; return "" if it is valid. The description
    contains no values, because they may be credentials."""
    try:
        file_content = _parse_file(file)
    except INVALID_FILE_ERRORS as error:
        return _describe_error(error)

    if not isinstance(file_content, dict):
        if file_content:
            return "it must have clusters, users and contexts, but is plain text"
        return "it is empty"

    for entry_kind in ("cluster", "user", "context"):
        kind_entries = file_content.get(f"{entry_kind}s") or []
        if not isinstance(kind_entries, list) or not all(
            isinstance(kind_entry, dict) and "name" in kind_entry for kind_entry in kind_entries
        ):
            return f"{entry_kind}s must be a list of entries with a name"

        for kind_entry in kind_entries:
            entry_fields = kind_entry.get(entry_kind) or {}
            if not isinstance(entry_fields, dict):
                return f"{entry_kind}s: the {entry_kind} of {kind_entry['name']} must have fields"

            for key, field_value in entry_fields.items():
                if key.endswith("-data") and not _is_base64(field_value):
                    return f"{entry_kind}s: {key} of {kind_entry['name']} must be base64"

    return ""


def _is_base64(encoded_value: Any) -> bool:
    try:
        base64.standard_b64decode(encoded_value)
    except (ValueError, TypeError):
        return False
    return True


def _describe_error(error: BaseException) -> str:
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {error.strerror}"
    if isinstance(error, UnicodeDecodeError | yaml.YAMLError):
        return "it must be text"
    return str(error).removeprefix("Invalid kube-config file. ")


@contextmanager
def _capture_errors() -> Iterator[list[str]]:
    """Collect the errors that the client logs, such as failures of a credential plugin, instead of
    printing them."""
    error_messages: list[str] = []
    log_handler = logging.Handler(logging.ERROR)
    log_handler.emit = lambda record: error_messages.append(record.getMessage())
    logging.getLogger().addHandler(log_handler)
    try:
        yield error_messages
    finally:
        logging.getLogger().removeHandler(log_handler)


def _list_existing_files() -> list[str]:
    """List the existing files that kubectl would read."""
    path_list = os.environ.get("KUBECONFIG") or str(Path.home() / ".kube/config")
    return [path for path in path_list.split(os.pathsep) if Path(path).expanduser().is_file()]
