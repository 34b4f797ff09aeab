"""Reject a config that contains a secret, because MLflow and the manifest record the config, and
`ps` shows the config during a run."""

import re
from collections.abc import Callable, Collection

from argolocal.common.addresses import AFTER_HOST, SECRET_NAME
from argolocal.common.environment import is_secret_name
from rekindle.errors import ConfigError, without_secrets
from rekindle.sections import Section, iterate_leaves

# Matches a URL with a password, or with a signature or token in its query, fragment or path; a
# variable such as $(PASSWORD) is not a match. The password in a URL may contain slashes and spaces;
# the host of an address without a scheme may precede the digest of an image.
PASSWORD_URL = re.compile(
    rf"""
    (?:(?<=:)|(?<!\S))//[^\s/?#@:]*:(?!\$\(|{AFTER_HOST})[^\n@][^\n]*@[\w.\[-]
    | ^[^\s/?#@:]+:(?!\$\()[^\s/@]+@(?!sha(?:256|512):)[\w.-]+(?:[:/]|$)
    | [?&;\#]{SECRET_NAME}=(?!\$\()[^&\s]
    """,
    re.IGNORECASE | re.VERBOSE,
)


def reject_secrets(
    config: Section, own_sections: Collection[str], find_origin: Callable[[str], str]
) -> None:
    """Raise ConfigError for a URL with a password or signature, and for a secret in `own_sections`,
    the sections that the workload and the pipeline define. `find_origin`: function that returns the
    origin of the value of a key, for the error message."""
    for dotted_key, setting_value in iterate_leaves(config, ""):
        key = dotted_key.lstrip(".")
        if isinstance(setting_value, str) and PASSWORD_URL.search(setting_value):
            raise ConfigError(
                f"{without_secrets(find_origin(key))}: {key} is a URL with a password or"
                " a signature, which everyone can read who can read the manifest or MLflow:"
                " remove it. A step can read a password from its environment, which has the keys of"
                " the Secret rekindle-s3."
            )
        if key.partition(".")[0] in own_sections and _is_secret(key, setting_value):
            raise ConfigError(
                f"{omit_flag_value(find_origin(key))}: {key} is a secret, which"
                " everyone can read who can read the manifest or MLflow: remove it. A step can read"
                " it from its environment, which has the keys of the Secret rekindle-s3."
            )


def omit_flag_value(value_origin: str) -> str:
    """Return the origin of a config value, such as `--set data.password=VALUE`, without the
    value."""
    if value_origin.startswith("--set "):
        return value_origin.partition("=")[0]
    return value_origin


def _is_secret(setting_key: str, setting_value: object) -> bool:
    """Return True if the name of `setting_key` is that of a secret, and `setting_value` is a text
    other than a variable such as $(PASSWORD)."""
    is_text = (
        isinstance(setting_value, str) and setting_value and not setting_value.startswith("$(")
    )
    return bool(is_text) and is_secret_name(setting_key.rpartition(".")[2])
