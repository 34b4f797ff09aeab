"""What lint says of objects that are applied, and what a real API server says, with its webhooks: as a dry run."""

import json
import subprocess
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.argolocal.validate.test_lint import OBJECTS, WRONG_OBJECTS

# worse than refused: taken, and then no pod of it can be made, or the operator or torchrun crashes on it
TAKEN = {"no container", "no image", "restart", "job name", "rdzvConf", "standalone"}


def refused(thing: Any) -> str:
    """What the API server has against it, or ""."""
    command = ["kubectl", "create", "--namespace=default", "--dry-run=server", "--validate=strict", "-f", "-"]
    done = subprocess.run(command, input=json.dumps(thing), capture_output=True, text=True, timeout=60)
    return done.stderr if done.returncode else ""


def test_an_object_without_findings_is_taken_and_one_with_is_refused_or_worse() -> None:
    wrong = {mistake: OBJECTS[kind]() for mistake, (kind, *_) in WRONG_OBJECTS.items()}
    for mistake, thing in wrong.items():
        WRONG_OBJECTS[mistake][1](thing)
    with ThreadPoolExecutor(4) as pool:
        right = dict(zip(OBJECTS, pool.map(lambda make: refused(make()), OBJECTS.values()), strict=True))
        answers = dict(zip(wrong, pool.map(refused, wrong.values()), strict=True))
    assert right == dict.fromkeys(OBJECTS, "")
    assert {mistake for mistake, answer in answers.items() if not answer} == TAKEN
