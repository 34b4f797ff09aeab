"""Start the local runner in the way that users start it, and return the outcome of a workflow.

with Here(folder) as here:
    outcome = here.run(path, name)
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Self

from rekindle.local.services.services import DEFAULT_BUCKET, Services
from rekindle.storage import Store
from tests.conformance.outcome import REJECTED_PREFIX, Contents, Outcome, in_store, of_status

# on Argo, a workflow that waits for its retries also takes long
TIMEOUT_S = 600.0
REJECTED_EXIT_CODE = 2


class LocalRunner:
    """The local runner with a new home (directory of runs), whose services are stopped at the
    end."""

    def __init__(self, home: Path, timeout: float = TIMEOUT_S) -> None:
        self.home = home
        self.services = Services(home, {})
        self.timeout = timeout
        self.environment = {
            key: value for key, value in os.environ.items() if not key.startswith(("S3_", "AWS_"))
        }
        self.environment["REKINDLE_HOME"] = str(home)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.services.down()

    def run(self, manifest: Path, name: str) -> Outcome:
        """Run a manifest and return its outcome. The test fails with the runner's stderr if the
        runner breaks or hangs."""
        program = Path(sys.executable).with_name("rekindle")
        command = [str(program), "run", "--manifest", str(manifest), "-o", "json", "--yes"]
        result = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=self.timeout
        )
        assert result.returncode in (0, 1, REJECTED_EXIT_CODE), result.stderr
        assert "Traceback" not in result.stderr, result.stderr

        if result.returncode == REJECTED_EXIT_CODE:
            return {
                "phase": "Error",
                "message": f"{REJECTED_PREFIX}: {result.stdout.strip()}",
                "outputs": {},
                "nodes": [],
            }

        return of_status(name, json.loads(result.stdout)["status"], self._contents)

    @property
    def _contents(self) -> Contents:
        keys = self.services.credentials()
        return in_store(
            Store(
                DEFAULT_BUCKET,
                self.services.url("s3"),
                keys["AWS_ACCESS_KEY_ID"],
                keys["AWS_SECRET_ACCESS_KEY"],
            )
        )
