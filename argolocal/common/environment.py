"""The environment of processes that outlive a command, such as servers: the secrets of the user are not passed on."""

import re
from collections.abc import Mapping

# variables with secrets by their names, such as HF_TOKEN, GITHUB_TOKEN, DB_PASSWORD or NOTIFY_URL (a webhook)
SECRET = re.compile(
    r"TOKEN|SECRET|PASSW|CREDENTIAL|API_?KEY|PRIVATE_?KEY|ACCESS_?KEY|WEBHOOK|NOTIFY_URL", re.IGNORECASE
)
# variables of the services that a process may use
SERVICE_VARIABLE = re.compile(r"(AWS|MLFLOW|S3)_")


def without_secrets(environ: Mapping[str, str], needs_services: bool = True) -> dict[str, str]:
    """Return the environment without variables that look like secrets; `needs_services`: except keys of services."""
    return {
        name: value
        for name, value in environ.items()
        if not SECRET.search(name) or (needs_services and SERVICE_VARIABLE.match(name))
    }
