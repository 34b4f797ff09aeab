"""Read numbers and tokens from environment variables, and remove secrets from the environment of
processes that outlive a command, such as servers."""

import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from argolocal.common.checked_names import format_untrusted
from argolocal.errors import ConfigError

# names of variables that contain secrets, such as HF_TOKEN, DB_PASSWORD or NOTIFY_URL (a webhook)
SECRET_WORD = re.compile(
    r"TOKEN|SECRET|PASSW|CREDENTIAL|API_?KEY|PRIVATE_?KEY|ACCESS_?KEY|WEBHOOK|NOTIFY_URL",
    re.IGNORECASE,
)
# names of variables, flags and settings whose values are secrets. SECRET_NAME matches fewer names
# than SECRET_WORD, because a configuration with a literal value for such a name is rejected.
SECRET_NAME = re.compile(
    r"(.*(PASSWORD|PASSWD|PASSPHRASE|SECRET|SECRET_KEY|ACCESS_KEY|API_?KEY|PRIVATE_KEY"
    r"|CREDENTIALS?)|(.*_)?(PASS|TOKEN)|.+_PWD|NOTIFY_URL)",
    re.IGNORECASE,
)
# names of settings for the special tokens of a tokenizer, which are not secrets
VOCABULARY_TOKEN_NAME = re.compile(
    r"(.*_)?(PAD|EOS|BOS|UNK|MASK|SEP|CLS|NEW|MAX|MIN|START|STOP|END|SPECIAL)_TOKEN", re.IGNORECASE
)
# names of the variables that configure the object store and MLflow
SERVICE_VARIABLE = re.compile(r"(AWS|MLFLOW|S3)_")
FLAG_AND_VALUE = re.compile(r"--([A-Za-z][\w-]{0,100})(?:=|\s+)(\S+)")
WHOLE_NUMBER = re.compile("[0-9]{1,9}")
MAX_PORT = 65535


def read_integer(name: str, default_value: int, min_value: int, max_value: int) -> int:
    """Return the whole number in the environment variable `name`, or `default_value` if the
    variable is unset or empty. Raises ConfigError."""
    variable_text = os.environ.get(name, "").strip()
    if not variable_text:
        return default_value
    if WHOLE_NUMBER.fullmatch(variable_text) and min_value <= int(variable_text) <= max_value:
        return int(variable_text)
    raise ConfigError(
        f"{name} is {format_untrusted(variable_text)}: it must be a whole number from {min_value}"
        f" to {max_value}. Correct the environment variable, or unset it."
    )


def read_seconds(name: str, default_seconds: float, remedy: str) -> float:
    """Return the positive number of seconds in the environment variable `name`, or
    `default_seconds` if the variable is unset or empty. Raises ConfigError, whose message ends
    with the sentence `remedy`."""
    variable_text = os.environ.get(name, "").strip()
    if not variable_text:
        return default_seconds

    try:
        seconds = float(variable_text)
    except ValueError:
        seconds = math.nan

    if 0 < seconds < math.inf:
        return seconds

    raise ConfigError(
        f"{name} is {format_untrusted(variable_text)}: it must be a positive number of seconds."
        f" {remedy}"
    )


def is_header_text(text: str) -> bool:
    """Return True if every HTTP client can send the text as the value of a header."""
    return text.isascii() and text.isprintable()


def require_header_text(token: str, token_source: str) -> str:
    """Return `token` if HTTP clients can send it in a header. If a client cannot send the token,
    raise a ConfigError that names only the origin of the token, `token_source`: the error of an
    HTTP client would show the token itself."""
    if is_header_text(token):
        return token
    raise ConfigError(
        f"{token_source} must be one line of text of printable ASCII characters, exactly as its"
        " server has issued it."
    )


def is_secret_name(name: str) -> bool:
    """Return True if the value of a variable, flag or setting with this name is a secret: True for
    HF_TOKEN, False for `eos_token`, a special token of a tokenizer."""
    name = name.replace("-", "_")
    return bool(SECRET_NAME.fullmatch(name)) and not VOCABULARY_TOKEN_NAME.fullmatch(name)


def find_secret_flags(command_words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield name and value of each command-line flag with a secret value, such as `--api-key=VALUE`
    or `--api-key VALUE`."""
    flags = [
        flag for command_word in command_words for flag in FLAG_AND_VALUE.findall(command_word)
    ]
    flags += [(flag[2:], value) for flag, value in pairwise(command_words) if flag.startswith("--")]
    for name, value in flags:
        if not value.startswith("-") and is_secret_name(name):
            yield name, value


def remove_secrets(environment: Mapping[str, str], needs_services: bool = True) -> dict[str, str]:
    """Return the environment without variables that look like secrets.

    With `needs_services`, the variables of the object store and MLflow are kept, including
    credentials.
    """
    return {
        name: value
        for name, value in environment.items()
        if not SECRET_WORD.search(name) or (needs_services and SERVICE_VARIABLE.match(name))
    }
