"""Read numbers and tokens from environment variables, and remove secrets from the environment of
processes that outlive a command, such as servers."""

import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from argolocal.common.checked_names import show
from argolocal.errors import ConfigError

# names of variables that contain secrets, such as HF_TOKEN, DB_PASSWORD or NOTIFY_URL (a webhook)
SECRET = re.compile(
    r"TOKEN|SECRET|PASSW|CREDENTIAL|API_?KEY|PRIVATE_?KEY|ACCESS_?KEY|WEBHOOK|NOTIFY_URL",
    re.IGNORECASE,
)
# names of variables, flags and settings whose values are secrets. The pattern matches fewer names
# than SECRET, because a literal value of such a name is an error.
SECRET_NAME = re.compile(
    r"(.*(PASSWORD|PASSWD|PASSPHRASE|SECRET|SECRET_KEY|ACCESS_KEY|API_?KEY|PRIVATE_KEY"
    r"|CREDENTIALS?)|(.*_)?(PASS|TOKEN)|.+_PWD|NOTIFY_URL)",
    re.IGNORECASE,
)
VOCABULARY_TOKEN_NAME = re.compile(
    r"(.*_)?(PAD|EOS|BOS|UNK|MASK|SEP|CLS|NEW|MAX|MIN|START|STOP|END|SPECIAL)_TOKEN", re.IGNORECASE
)
# names of the variables that configure the object store and MLflow
SERVICE_VARIABLE = re.compile(r"(AWS|MLFLOW|S3)_")
FLAG = re.compile(r"--([A-Za-z][\w-]{0,100})(?:=|\s+)(\S+)")
WHOLE_NUMBER = re.compile("[0-9]{1,9}")
MAX_PORT = 65535


def read_integer(name: str, default: int, lowest: int, highest: int) -> int:
    """Return the whole number in the environment variable `name`, or `default` if the variable is
    unset or empty. Raises ConfigError."""
    text = os.environ.get(name, "").strip()
    if not text:
        return default
    if WHOLE_NUMBER.fullmatch(text) and lowest <= int(text) <= highest:
        return int(text)
    raise ConfigError(
        f"{name} is {show(text)}: it must be a whole number from {lowest} to {highest}. Correct the"
        " environment variable, or unset it."
    )


def read_seconds(name: str, default: float, remedy: str) -> float:
    """Return the positive number of seconds in the environment variable `name`, or `default` if the
    variable is unset or empty. Raises ConfigError, whose message ends with the sentence
    `remedy`."""
    text = os.environ.get(name, "").strip()
    if not text:
        return default

    try:
        number = float(text)
    except ValueError:
        number = math.nan

    if 0 < number < math.inf:
        return number

    raise ConfigError(f"{name} is {show(text)}: it must be a positive number of seconds. {remedy}")


def is_header_text(text: str) -> bool:
    """Return True if every HTTP client can send the text as the value of a header."""
    return text.isascii() and text.isprintable()


def require_header_text(text: str, source: str) -> str:
    """Return `text`, a token, if it is valid as the value of a header. Otherwise raise a
    ConfigError that names the `source` of the token. The errors of HTTP clients would show the
    token itself."""
    if is_header_text(text):
        return text
    raise ConfigError(
        f"{source} must be one line of text of printable ASCII characters, exactly as its server"
        " has issued it."
    )


def names_secret(name: str) -> bool:
    """Return True if a variable, flag or setting with this name contains a secret. HF_TOKEN does;
    `eos_token`, a word of a vocabulary, does not."""
    name = name.replace("-", "_")
    return bool(SECRET_NAME.fullmatch(name)) and not VOCABULARY_TOKEN_NAME.fullmatch(name)


def secret_flags(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield name and value of each command-line flag with a secret value, such as `--api-key=VALUE`
    or `--api-key VALUE`."""
    flags = [flag for text in words for flag in FLAG.findall(text)]
    flags += [(flag[2:], value) for flag, value in pairwise(words) if flag.startswith("--")]
    for name, value in flags:
        if not value.startswith("-") and names_secret(name):
            yield name, value


def remove_secrets(environ: Mapping[str, str], needs_services: bool = True) -> dict[str, str]:
    """Return the environment without variables that look like secrets.

    `needs_services`: True keeps the variables of the object store and MLflow, including
    credentials.
    """
    return {
        name: value
        for name, value in environ.items()
        if not SECRET.search(name) or (needs_services and SERVICE_VARIABLE.match(name))
    }
