"""Names of Kubernetes objects and of their parts, and the rules of the API server for them.

    object_names.check_object_name("ConfigMap", "cache-feature/login")     # raises ConfigError

A name may contain a template tag, whose value is known only at run time. Since a tag's value is
known late, each name is checked when an object or a file is created. The behaviour follows
Kubernetes' apimachinery/pkg/util/validation (validation.go) and apis/core/validation.
"""

import base64
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from argolocal.errors import ConfigError

DATA_KINDS = ("ConfigMap", "Secret")
DATA_FIELDS = ("data", "binaryData", "stringData")
# maximum number of characters of an invalid name that a message shows
MAX_SHOWN_CHARACTERS = 300


@dataclass(frozen=True)
class NameRule:
    """A rule for names: the regular expression and maximum length of a name, and the rule as
    text."""

    pattern: re.Pattern[str]
    max_length: int
    description: str

    def allows(self, name: object) -> bool:
        """Return True if `name` is a string that follows the rule."""
        return (
            isinstance(name, str)
            and len(name) <= self.max_length
            and bool(self.pattern.fullmatch(name))
        )

    def check(self, name: object, message_prefix: str) -> None:
        """Raise ConfigError if `name` breaks the rule. The message starts with `message_prefix`."""
        if not self.allows(name):
            shown_name = f"{name!r:.{MAX_SHOWN_CHARACTERS}}"
            raise ConfigError(
                f"{message_prefix}: Invalid value: {shown_name}: {self.description}. Choose"
                " another name."
            )


SUBDOMAIN_RULE = NameRule(
    re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*"),
    253,
    "a lowercase RFC 1123 subdomain must consist of at most 253 lower case alphanumeric characters,"
    " '-' or '.', and must start and end with an alphanumeric character",
)
LABEL_RULE = NameRule(
    re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"),
    63,
    "a lowercase RFC 1123 label must consist of at most 63 lower case alphanumeric characters or"
    " '-', and must start and end with an alphanumeric character",
)
SERVICE_NAME_RULE = NameRule(
    re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?"),
    63,
    "a DNS-1035 label must consist of at most 63 lower case alphanumeric characters or '-', start"
    " with an alphabetic character, and end with an alphanumeric character",
)
PATH_SEGMENT_RULE = NameRule(
    re.compile(r"(?!\.\.?$)[^/%\0]+"), 253, "a name must not be '.' or '..', or contain '/' or '%'"
)
DATA_KEY_RULE = NameRule(
    re.compile(r"(?!\.\.)(?!\.$)[-._a-zA-Z0-9]+"),
    253,
    "a valid config key must consist of at most 253 alphanumeric characters, '-', '_' or '.', and"
    " must not start with '..'",
)
LABEL_VALUE_RULE = NameRule(
    re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?"),
    63,
    "a valid label must be an empty string or consist of at most 63 alphanumeric characters, '-',"
    " '_' or '.', and must start and end with an alphanumeric character",
)
QUALIFIED_NAME_RULE = NameRule(
    re.compile(
        rf"(?:(?=[^/]{{1,253}}/){SUBDOMAIN_RULE.pattern.pattern}/)?[A-Za-z0-9](?:[-A-Za-z0-9_.]{{0,61}}[A-Za-z0-9])?"
    ),
    317,
    "a qualified name must consist of at most 63 alphanumeric characters, '-', '_' or '.', must"
    " start and end with an alphanumeric character, and may have a DNS subdomain and '/' in front",
)
# The rule combines the rules of Amazon S3 and MinIO. Bucket names that were created before 2018 may
# contain upper case letters and underscores.
BUCKET_NAME_RULE = NameRule(
    re.compile(r"[A-Za-z0-9][-A-Za-z0-9._]*"),
    255,
    "a bucket's name must consist of letters, digits, '-', '.' or '_', and must start with a letter"
    " or digit",
)
NAME_RULES: Mapping[str, NameRule] = {
    "Service": SERVICE_NAME_RULE,
    **dict.fromkeys(
        ("Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding"), PATH_SEGMENT_RULE
    ),
}


def find_name_rule(kind: str) -> NameRule:
    """Return the rule for `metadata.name` of objects of this kind."""
    return NAME_RULES.get(kind, SUBDOMAIN_RULE)


def check_object_name(kind: str, name: object) -> None:
    """Raise ConfigError for a `metadata.name` that the API server rejects."""
    find_name_rule(kind).check(
        name, f'{kind} "{name!s:.{MAX_SHOWN_CHARACTERS}}" is invalid: metadata.name'
    )


def check_labels(labels: Mapping[object, object] | None, message_prefix: str) -> None:
    """Raise ConfigError for a label that the API server rejects."""
    for key, value in _require_items(labels, message_prefix):
        QUALIFIED_NAME_RULE.check(key, message_prefix)
        LABEL_VALUE_RULE.check(value, f"{message_prefix}.{key}")


def check_annotations(annotations: Mapping[object, object] | None, message_prefix: str) -> None:
    """Raise ConfigError for an annotation that the API server rejects. Keys of annotations may
    contain upper case letters in their prefix."""
    for key, value in _require_items(annotations, message_prefix):
        QUALIFIED_NAME_RULE.check(key.lower() if isinstance(key, str) else key, message_prefix)
        if not isinstance(value, str):
            raise ConfigError(
                f"{message_prefix}.{key} is {value!r}: it must be a string. Quote it."
            )


def check_data(kubernetes_object: Mapping[str, Any], kind: str, name: str) -> None:
    """Raise ConfigError for the data of a ConfigMap or Secret that the API server rejects."""
    for data_field in DATA_FIELDS:
        is_encoded = data_field == "binaryData" or (data_field == "data" and kind == "Secret")
        for key, value in _require_items(
            kubernetes_object.get(data_field), f"{kind} {name}.{data_field}"
        ):
            DATA_KEY_RULE.check(key, f'{kind} "{name}" is invalid: data')
            if not isinstance(value, str):
                raise ConfigError(f"{kind} {name}.{data_field}.{key} is not a string: quote it.")

            try:
                base64.b64decode(value if is_encoded else "", validate=True)
            except ValueError:
                hint = (
                    "Encode the value, or move the plain text to stringData (of a ConfigMap: data)."
                )
                raise ConfigError(
                    f"{kind} {name}.{data_field}.{key} is not base64. {hint}"
                ) from None


def _require_items(
    mapping: Mapping[object, object] | None, message_prefix: str
) -> Iterable[tuple[object, object]]:
    """Return the keys and values of a mapping, or none for None. Raises ConfigError for another
    type."""
    if mapping and not isinstance(mapping, Mapping):
        raise ConfigError(
            f"{message_prefix} is {mapping!r:.{MAX_SHOWN_CHARACTERS}}: it must map names to values."
        )
    return (mapping or {}).items()
