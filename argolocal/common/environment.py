"""The environment: numbers and tokens in its variables, and the environment of processes that
outlive a command, such as servers, to which the secrets of the user are not passed on."""

import math
import os
import re
from collections.abc import Mapping

from argolocal.common.checked_names import show
from argolocal.errors import ConfigError

# names of variables that contain secrets, such as HF_TOKEN, GITHUB_TOKEN, DB_PASSWORD or NOTIFY_URL
# (a webhook)
SECRET = re.compile(
    r"TOKEN|SECRET|PASSW|CREDENTIAL|API_?KEY|PRIVATE_?KEY|ACCESS_?KEY|WEBHOOK|NOTIFY_URL",
    re.IGNORECASE,
)
# variables of the services that a process may use
SERVICE_VARIABLE = re.compile(r"(AWS|MLFLOW|S3)_")
WHOLE_NUMBER = re.compile("[0-9]{1,9}")
MAX_PORT = 65535


def whole_number(name: str, default: int, lowest: int, highest: int) -> int:
    """Return the number in an environment variable; `default` if it is not set or empty. Raises
    ConfigError."""
    text = os.environ.get(name, "").strip()
    if not text:
        return default
    if WHOLE_NUMBER.fullmatch(text) and lowest <= int(text) <= highest:
        return int(text)
    raise ConfigError(
        f"{name} is {show(text)}: it must be a whole number from {lowest} to {highest}. Correct the"
        " environment variable, or unset it."
    )


def seconds(name: str, default: float, remedy: str) -> float:
    """Return the positive number of seconds in an environment variable; `default` if it is not set
    or empty. Raises ConfigError, whose last sentence is `remedy`."""
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
    """Return True if every client can send a text as the value of a header."""
    return text.isascii() and text.isprintable()


def header_text(text: str, source: str) -> str:
    """Return a token that may be the value of a header. Raises ConfigError, which names the source
    of the token, not the token: a client would show it in its own error, or raise none of its
    errors."""
    if is_header_text(text):
        return text
    raise ConfigError(
        f"{source} must be one line of text, of printable ASCII characters, as its server has"
        " issued it."
    )


def remove_secrets(environ: Mapping[str, str], needs_services: bool = True) -> dict[str, str]:
    """Return the environment without variables that look like secrets.

    `needs_services`: keep the variables of the object store and MLflow, also their keys.
    """
    return {
        name: value
        for name, value in environ.items()
        if not SECRET.search(name) or (needs_services and SERVICE_VARIABLE.match(name))
    }
