"""Read numbers and tokens from environment variables, and remove secrets from the environment of
processes that outlive a command, such as servers."""

import math
import os
import re
from collections.abc import Mapping

from argolocal.common.checked_names import show
from argolocal.errors import ConfigError

# names of variables that contain secrets, such as HF_TOKEN, DB_PASSWORD or NOTIFY_URL (a webhook)
SECRET = re.compile(
    r"TOKEN|SECRET|PASSW|CREDENTIAL|API_?KEY|PRIVATE_?KEY|ACCESS_?KEY|WEBHOOK|NOTIFY_URL",
    re.IGNORECASE,
)
# names of the variables that configure the object store and MLflow
SERVICE_VARIABLE = re.compile(r"(AWS|MLFLOW|S3)_")
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
    """Return `text`, a token, if it is valid as the value of a header. Raises ConfigError, which
    names the `source` of the token, but not the token itself, unlike the errors of HTTP clients."""
    if is_header_text(text):
        return text
    raise ConfigError(
        f"{source} must be one line of text of printable ASCII characters, exactly as its server"
        " has issued it."
    )


def remove_secrets(environ: Mapping[str, str], needs_services: bool = True) -> dict[str, str]:
    """Return the environment without variables that look like secrets.

    `needs_services`: keep the variables of the object store and MLflow, including credentials.
    """
    return {
        name: value
        for name, value in environ.items()
        if not SECRET.search(name) or (needs_services and SERVICE_VARIABLE.match(name))
    }
