"""The local runner as a user starts it, and what becomes of a workflow there.

with Here(folder) as here:
    outcome = here.run(path, name)
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Self

from rekindle.local.services.services import BUCKET, Services
from rekindle.storage import Store
from tests.conformance.outcome import REFUSED, Contents, Outcome, in_store, of_status

TIMEOUT = 600.0  # seconds: a workflow that waits for its retries takes its time on Argo too
BAD = 2  # the exit code of what is refused


class Here:
    """A home of its own, whose services end with it."""

    def __init__(self, home: Path, timeout: float = TIMEOUT) -> None:
        self.home, self.services, self.timeout = home, Services(home, {}), timeout
        self.environment = {key: value for key, value in os.environ.items() if not key.startswith(("S3_", "AWS_"))}
        self.environment |= {"REKINDLE_HOME": str(home)}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.services.down()

    def run(self, manifest: Path, name: str) -> Outcome:
        """The outcome. Fails with what was printed if the runner breaks or hangs."""
        program = Path(sys.executable).with_name("rekindle")
        command = [str(program), "run", "--manifest", str(manifest), "-o", "json", "--yes"]
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=self.timeout)
        assert done.returncode in (0, 1, BAD) and "Traceback" not in done.stderr, done.stderr
        if done.returncode == BAD:
            return {"phase": "Error", "message": f"{REFUSED}: {done.stdout.strip()}", "outputs": {}, "nodes": []}
        return of_status(name, json.loads(done.stdout)["status"], self._contents)

    @property
    def _contents(self) -> Contents:
        keys = self.services.credentials()
        return in_store(
            Store(BUCKET, self.services.url("s3"), keys["AWS_ACCESS_KEY_ID"], keys["AWS_SECRET_ACCESS_KEY"])
        )
