"""Verify a deployment: replay test transactions, compare the served with the offline scores, then promote the version.

    rekindle step steps.verify --name=fraud --endpoint=http://127.0.0.1:8080 --dataset=dataset/ --report=report/ \\
        --model-sha256=... --version=3

Only if every score agrees, the version becomes the `champion`. Otherwise the step fails, and the pipeline restores the
release that served before.
"""

import sys
import time
from typing import TYPE_CHECKING

from pydantic import Field

from rekindle import Artifact, DataError, StepInputs, StepOutputs

if TYPE_CHECKING:
    from rekindle.serving.compare import Comparison


class Inputs(StepInputs):
    workload: str = Field(default="steps.fraud", description="module that knows how to replay its test data")
    name: str = Field(description="registered model")
    endpoint: str = Field(
        default="", description="URL of the service (default: http://NAME:8080; $REKINDLE_ENDPOINT wins)"
    )
    dataset: Artifact = Field(description="what prepare made")
    report: Artifact = Field(description="what evaluate made, with the offline scores")
    model_sha256: str = Field(description="weights that must serve")
    version: str = Field(description="version to promote")
    run_id: str = Field(default="", description="MLflow run to record it on (empty: none)")
    sample: int = Field(default=200, ge=1, description="test transactions to replay, about")
    tolerance: float = Field(default=1e-5, ge=0, description="largest difference between a served and an offline score")
    max_batch: int = Field(default=1000, ge=1, description="what the server takes: serve.max_batch")
    max_history: int = Field(default=100_000, ge=0, description="what the server takes: serve.max_history")
    wait_seconds: float = Field(default=180.0, gt=0, description="for the service to serve these weights")


class Outputs(StepOutputs):
    max_difference: float = Field(description="largest difference of the scores")
    replayed: int = Field(description="transactions replayed")
    endpoint: str = Field(description="URL of the service")


def run(inputs: Inputs) -> Outputs:
    """Wait, replay, compare, promote. Raises DataError if a score differs, RekindleError if nothing serves."""
    from rekindle import tracking
    from rekindle.serving.client import ScoringClient, resolve
    from rekindle.serving.compare import Comparison, compare
    from rekindle.workload import load

    endpoint = resolve(inputs.endpoint or f"http://{inputs.name}:8080")
    client = ScoringClient(endpoint, inputs.model_sha256, time.monotonic() + inputs.wait_seconds)
    client.wait()
    comparison = Comparison(inputs.tolerance)
    replay = getattr(load(inputs.workload), "replay", None)
    if replay:
        seed = int(inputs.model_sha256[:15], 16)
        limits = (inputs.max_batch, inputs.max_history)
        requests = replay(inputs.dataset, inputs.report, inputs.sample, seed, *limits)
        comparison = compare(client, requests, inputs.tolerance)
        check(comparison, inputs, endpoint)
    else:
        sys.stderr.write(f"{inputs.workload} defines no replay: only the identity of the weights was checked\n")
    tracking.promote(inputs.name, inputs.version)
    if inputs.run_id:
        metrics = {"verify.max_difference": comparison.max_difference, "verify.replayed": comparison.replayed}
        tracking.log(inputs.run_id, metrics=metrics, tags={"rekindle.promoted": f"{inputs.name} {inputs.version}"})
    return Outputs(max_difference=comparison.max_difference, replayed=comparison.replayed, endpoint=endpoint)


def check(comparison: "Comparison", inputs: Inputs, endpoint: str) -> None:
    """Raises DataError unless something was replayed and all of it agreed."""
    if not comparison.replayed:
        raise DataError(
            f"no test transaction could be replayed with at most {inputs.max_history:,} rows of history, and "
            f"{comparison.too_large} were too large for the server: raise serve.max_history or serve.max_bytes. "
            f"Version {inputs.version} is not promoted; what served before is put back."
        )
    if comparison.differing:
        raise DataError(
            f"{comparison.differing} of {comparison.replayed} replayed transactions score differently at {endpoint} "
            f"than offline (by more than {inputs.tolerance:g}); the worst is transaction {comparison.worst}. Version "
            f"{inputs.version} is not promoted; what served before is put back."
        )
