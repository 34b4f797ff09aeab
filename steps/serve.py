"""Serve a released model over HTTP until SIGTERM.

    rekindle step steps.serve --model=releases/fraud/0123456789ab/ --host=127.0.0.1 --port=8080

    curl -s 127.0.0.1:8080/v1/models/fraud/example | \\
      curl -s 127.0.0.1:8080/v1/models/fraud:predict -d @-

`GET /v1/models/NAME` describes the model. `/health/live` and `/health/ready` (200 once every
process has predicted the example) are for probes, `/metrics` is for Prometheus, `/openapi.json` and
the page at `/` are for people. On SIGTERM, the server reports that it is not ready, accepts new
connections for another `drain_seconds`, completes all requests on open connections within
`grace_seconds`, and exits with 0.
"""

import os

from rekindle.release.serve_config import ServerSettings
from rekindle.step import StepOutputs


class Inputs(ServerSettings):
    """Settings of one model server."""


class Outputs(StepOutputs):
    """The step has no outputs, because it answers requests until SIGTERM."""


def run(inputs: Inputs) -> Outputs:
    """Serve the model until SIGTERM. Raises ConfigError (address in use), StorageError or DataError
    (model not found)."""
    # the processes that run the model inherit these environment variables
    for variable_name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "POLARS_MAX_THREADS"):
        os.environ[variable_name] = str(inputs.threads)

    from rekindle.serving.model_server import serve

    serve(inputs)
    return Outputs()
