"""The cluster that kubectl would talk to: that of KUBECONFIG, of ~/.kube/config, or of the pod this runs in.

    settings, context, namespace = chosen(None)     # for the kubernetes client; names of the context and its namespace

What cannot be used is one ConfigError that names the file, whatever the client's own reader makes of it.
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

from rekindle.errors import ConfigError, did_you_mean

IN_POD = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
ANEW = "your provider's `get-credentials` command writes one anew; `kubectl cluster-info` shows whether it works."
# what the client's reader raises for files that are not as it takes for granted
UNREADABLE = (config.ConfigException, OSError, ValueError, TypeError, AttributeError, KeyError, yaml.YAMLError)


class Settings(client.Configuration):
    """The client's, with a token as kubectl sends it."""

    def get_api_key_with_prefix(self, identifier: str, alias: str | None = None) -> str:
        """Without the line break at the end of a file. A plugin that fails now is heard of by the server's 401."""
        with _heard():
            return str(super().get_api_key_with_prefix(identifier, alias) or "").strip()


def chosen(context: str | None) -> tuple[Settings, str, str]:
    """Raises ConfigError."""
    settings, files = Settings(), _files()
    if context is None and not files and IN_POD.exists():
        with _named("the ServiceAccount of this pod"):
            config.load_incluster_config(client_configuration=settings)
        return settings, "in-cluster", IN_POD.read_text().strip()
    if not files:
        raise ConfigError(
            "no cluster is configured: neither KUBECONFIG nor ~/.kube/config names a file that is there; " + ANEW
        )
    source = os.pathsep.join(files)
    with _named(f"the kubeconfig {source}", files):
        found: tuple[Any, Any] = config.list_kube_config_contexts(source)
        known, current = found
        names: dict[str, Any] = {each["name"]: each.get("context") or {} for each in known}
        name = context or str(current["name"])
        if name not in names:
            hint = did_you_mean(name, set(names)) or f" There are: {', '.join(names)}."
            raise ConfigError(f"--context {name}: the kubeconfig has no such context.{hint}")
        with _heard() as said:
            config.load_kube_config(source, context=name, client_configuration=settings)
        if said:  # the client goes on as nobody
            raise ValueError(f"the credential plugin of context {name} failed ({said[-1]})")
        if not settings.host.startswith(("https://", "http://")):
            raise ValueError(f"the server of context {name} must be https://HOST[:PORT]")
        if not settings.get_api_key_with_prefix("BearerToken").isprintable():
            raise ValueError(f"the token of context {name} must be one line of text")
    return settings, name, str(names[name].get("namespace") or "default")


@contextmanager
def _named(source: str, files: list[str] | None = None) -> Iterator[None]:
    """What cannot be used as one ConfigError."""
    try:
        yield
    except ConfigError:
        raise
    except UNREADABLE as error:
        for file in files or []:
            if problem := _problem(file):
                raise ConfigError(f"the kubeconfig {file} cannot be used: {problem}. Correct it; {ANEW}") from error
        raise ConfigError(f"{source} cannot be used: {_words(error)}. Correct it; {ANEW}") from error


def _problem(file: str) -> str:
    """What is wrong with one file, without its values: they are credentials."""
    try:
        found = yaml.safe_load(Path(file).expanduser().read_text())
    except yaml.MarkedYAMLError as error:
        line = f" in line {error.problem_mark.line + 1}" if error.problem_mark else ""
        return f"it must be YAML, and{line} {error.problem or 'is not'}"
    except UNREADABLE as error:
        return _words(error)
    if not isinstance(found, dict):
        return "it must have clusters, users and contexts, and has nothing but text" if found else "it is empty"
    for kind in ("cluster", "user", "context"):
        entries = found.get(f"{kind}s") or []
        if not isinstance(entries, list) or not all(isinstance(each, dict) and "name" in each for each in entries):
            return f"{kind}s must be a list of entries with a name"
        for each in entries:
            if not isinstance(each.get(kind) or {}, dict):
                return f"{kind}s: what {each['name']} has as its {kind} must have fields"
            for key, value in (each.get(kind) or {}).items():
                if key.endswith("-data") and not _is_base64(value):
                    return f"{kind}s: {key} of {each['name']} must be base64, and is not"
    return ""


def _is_base64(value: Any) -> bool:
    try:
        base64.standard_b64decode(value)
    except (ValueError, TypeError):
        return False
    return True


def _words(error: BaseException) -> str:
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {error.strerror}"
    if isinstance(error, UnicodeDecodeError | yaml.YAMLError):
        return "it must be text"
    return str(error).removeprefix("Invalid kube-config file. ")


@contextmanager
def _heard() -> Iterator[list[str]]:
    """What the client would print for itself, as it does for a plugin that fails."""
    said: list[str] = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger().addHandler(handler)
    try:
        yield said
    finally:
        logging.getLogger().removeHandler(handler)


def _files() -> list[str]:
    """Those that kubectl would read, as far as they are there."""
    paths = os.environ.get("KUBECONFIG") or str(Path.home() / ".kube/config")
    return [each for each in paths.split(os.pathsep) if Path(each).expanduser().is_file()]
