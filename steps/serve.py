"""Serve a released model over HTTP until SIGTERM.

    rekindle step steps.serve --model=releases/fraud/0123456789ab/ --host=127.0.0.1 --port=8080

    curl -s 127.0.0.1:8080/v1/models/fraud/example | curl -s 127.0.0.1:8080/v1/models/fraud:predict -d @-

`GET /v1/models/NAME` says what serves, `/health/live` and `/health/ready` (200 once every process has predicted the
example) are for probes, `/metrics` for Prometheus, `/openapi.json` and the page at `/` for people. SIGTERM: not ready
at once, new requests are still answered for `drain_seconds`, those in flight and of kept connections for
`grace_seconds`; the exit code is 0.
"""

import os

from rekindle.release.config import ServerSettings
from rekindle.step import StepOutputs


class Inputs(ServerSettings):
    """One server."""


class Outputs(StepOutputs):
    """Nothing: it answers requests."""


def run(inputs: Inputs) -> Outputs:
    """Serve until a signal. Raises ConfigError (address in use), StorageError or DataError (no such model)."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "POLARS_MAX_THREADS"):  # of the processes with the model
        os.environ[name] = str(inputs.threads)
    from rekindle.serving.server import serve

    serve(inputs)
    return Outputs()
