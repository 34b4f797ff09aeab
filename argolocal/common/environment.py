"""The environment of processes that outlive a command, such as servers: the secrets of the user are
not passed on."""

import re
from collections.abc import Mapping

# names of variables that contain secrets, such as HF_TOKEN, GITHUB_TOKEN, DB_PASSWORD or NOTIFY_URL
# (a webhook)
SECRET = re.compile(
    r"TOKEN|SECRET|PASSW|CREDENTIAL|API_?KEY|PRIVATE_?KEY|ACCESS_?KEY|WEBHOOK|NOTIFY_URL",
    re.IGNORECASE,
)
# variables of the services that a process may use
SERVICE_VARIABLE = re.compile(r"(AWS|MLFLOW|S3)_")


def remove_secrets(environ: Mapping[str, str], needs_services: bool = True) -> dict[str, str]:
    """Return the environment without variables that look like secrets.

    `needs_services`: keep the variables of the object store and MLflow, also their keys.
    """
    return {
        name: value
        for name, value in environ.items()
        if not SECRET.search(name) or (needs_services and SERVICE_VARIABLE.match(name))
    }
