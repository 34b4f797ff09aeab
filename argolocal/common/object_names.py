"""Names of Kubernetes objects and of their parts, and the rules of the API server for them.

    object_names.check_object("ConfigMap", "cache-feature/login")     # raises ConfigError

A name may contain a template tag, whose value is known only at run time. Therefore each name is
checked when an object or a file is created. Source: Kubernetes' apimachinery/pkg/util/validation
(validation.go) and apis/core/validation.
"""

import base64
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from argolocal.errors import ConfigError

DATA_KINDS = ("ConfigMap", "Secret")
DATA_FIELDS = ("data", "binaryData", "stringData")
MAX_SHOWN_CHARACTERS = 300  # maximum number of characters of an invalid name that a message shows


@dataclass(frozen=True)
class Rule:
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

    def check(self, name: object, where: str) -> None:
        """Raise ConfigError if `name` breaks the rule. The message starts with `where`."""
        if not self.allows(name):
            shown_name = f"{name!r:.{MAX_SHOWN_CHARACTERS}}"
            raise ConfigError(
                f"{where}: Invalid value: {shown_name}: {self.description}. Choose another name."
            )


SUBDOMAIN = Rule(
    re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*"),
    253,
    "a lowercase RFC 1123 subdomain must consist of at most 253 lower case alphanumeric characters,"
    " '-' or '.', and must start and end with an alphanumeric character",
)
LABEL = Rule(
    re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"),
    63,
    "a lowercase RFC 1123 label must consist of at most 63 lower case alphanumeric characters or"
    " '-', and must start and end with an alphanumeric character",
)
SERVICE = Rule(
    re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?"),
    63,
    "a DNS-1035 label must consist of at most 63 lower case alphanumeric characters or '-', start"
    " with an alphabetic character, and end with an alphanumeric character",
)
PATH_SEGMENT = Rule(
    re.compile(r"(?!\.\.?$)[^/%\0]+"), 253, "a name must not be '.' or '..', or contain '/' or '%'"
)
DATA_KEY = Rule(
    re.compile(r"(?!\.\.)(?!\.$)[-._a-zA-Z0-9]+"),
    253,
    "a valid config key must consist of at most 253 alphanumeric characters, '-', '_' or '.', and"
    " must not start with '..'",
)
LABEL_VALUE = Rule(
    re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?"),
    63,
    "a valid label must be an empty string or consist of at most 63 alphanumeric characters, '-',"
    " '_' or '.', and must start and end with an alphanumeric character",
)
QUALIFIED_NAME = Rule(
    re.compile(
        rf"(?:(?=[^/]{{1,253}}/){SUBDOMAIN.pattern.pattern}/)?[A-Za-z0-9](?:[-A-Za-z0-9_.]{{0,61}}[A-Za-z0-9])?"
    ),
    317,
    "a qualified name must consist of at most 63 alphanumeric characters, '-', '_' or '.', must"
    " start and end with an alphanumeric character, and may have a DNS subdomain and '/' in front",
)
# Source: the rules of Amazon S3 and MinIO. Names of older buckets may contain upper case letters
# and underscores.
BUCKET = Rule(
    re.compile(r"[A-Za-z0-9][-A-Za-z0-9._]*"),
    255,
    "a bucket's name must consist of letters, digits, '-', '.' or '_', and must start with a letter"
    " or digit",
)
RULES: Mapping[str, Rule] = {
    "Service": SERVICE,
    **dict.fromkeys(("Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding"), PATH_SEGMENT),
}


def rule_of(kind: str) -> Rule:
    """Return the rule for `metadata.name` of objects of this kind."""
    return RULES.get(kind, SUBDOMAIN)


def check_object(kind: str, name: object) -> None:
    """Raise ConfigError for a `metadata.name` that the API server rejects."""
    rule_of(kind).check(
        name, f'{kind} "{name!s:.{MAX_SHOWN_CHARACTERS}}" is invalid: metadata.name'
    )


def check_labels(labels: Mapping[object, object] | None, where: str) -> None:
    """Raise ConfigError for a label that the API server rejects."""
    for key, value in _items(labels, where):
        QUALIFIED_NAME.check(key, where)
        LABEL_VALUE.check(value, f"{where}.{key}")


def check_annotations(annotations: Mapping[object, object] | None, where: str) -> None:
    """Raise ConfigError for an annotation that the API server rejects. Keys of annotations may
    contain upper case letters in their prefix."""
    for key, value in _items(annotations, where):
        QUALIFIED_NAME.check(key.lower() if isinstance(key, str) else key, where)
        if not isinstance(value, str):
            raise ConfigError(f"{where}.{key} is {value!r}: it must be a string. Quote it.")


def check_data(obj: Mapping[str, Any], kind: str, name: str) -> None:
    """Raise ConfigError for the data of a ConfigMap or Secret that the API server rejects."""
    for field in DATA_FIELDS:
        is_encoded = field == "binaryData" or (field == "data" and kind == "Secret")
        for key, value in _items(obj.get(field), f"{kind} {name}.{field}"):
            DATA_KEY.check(key, f'{kind} "{name}" is invalid: data')
            if not isinstance(value, str):
                raise ConfigError(f"{kind} {name}.{field}.{key} is not a string: quote it.")

            try:
                base64.b64decode(value if is_encoded else "", validate=True)
            except ValueError:
                hint = (
                    "Encode the value, or move the plain text to stringData (of a ConfigMap: data)."
                )
                raise ConfigError(f"{kind} {name}.{field}.{key} is not base64. {hint}") from None


def _items(values: Mapping[object, object] | None, where: str) -> Iterable[tuple[object, object]]:
    if values and not isinstance(values, Mapping):
        raise ConfigError(
            f"{where} is {values!r:.{MAX_SHOWN_CHARACTERS}}: it must map names to values."
        )
    return (values or {}).items()
