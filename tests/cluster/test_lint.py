"""Lint and a real API server with its webhooks agree on applied objects ; the API server checks the
objects in a dry run."""

import json
import subprocess
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.argolocal.validate.objects import INVALID_OBJECTS, VALID_OBJECTS

# mistakes in objects that the API server accepts, but with which no pod can be created, or the
# operator or torchrun crashes
ACCEPTED = {"no container", "no image", "restart", "job name", "rdzvConf", "standalone"}


def get_refusal(obj: Any) -> str:
    """Return the message of the API server if it refuses an object, or ""."""
    command = [
        "kubectl",
        "create",
        "--namespace=default",
        "--dry-run=server",
        "--validate=strict",
        "-f",
        "-",
    ]

    completed = subprocess.run(
        command, input=json.dumps(obj), capture_output=True, text=True, timeout=60
    )
    if completed.returncode:
        return completed.stderr

    return ""


def test_the_api_server_accepts_valid_objects_and_rejects_invalid_objects() -> None:
    invalid_objects = {
        mistake: VALID_OBJECTS[kind]() for mistake, (kind, *_) in INVALID_OBJECTS.items()
    }
    for mistake, obj in invalid_objects.items():
        INVALID_OBJECTS[mistake][1](obj)
    with ThreadPoolExecutor(4) as pool:
        valid_objects = dict(
            zip(
                VALID_OBJECTS,
                pool.map(lambda make: get_refusal(make()), VALID_OBJECTS.values()),
                strict=True,
            )
        )
        answers = dict(
            zip(invalid_objects, pool.map(get_refusal, invalid_objects.values()), strict=True)
        )
    assert valid_objects == dict.fromkeys(VALID_OBJECTS, "")
    assert {mistake for mistake, answer in answers.items() if not answer} == ACCEPTED
