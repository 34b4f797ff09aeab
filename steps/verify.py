"""Verify a deployment: replay test rows, compare the served with the offline predictions, then promote the version.

    rekindle step steps.verify --name=demo --endpoint=http://127.0.0.1:8080 --report=report/ --model-sha256=... \\
        --version=3

Only if every prediction agrees, and the champion is still the one that the candidate was judged against, the version
becomes the `champion`. Otherwise the step fails, and what served before goes on serving.
"""

import time
from typing import TYPE_CHECKING, Any

from pydantic import Field

from rekindle import Artifact, DataError, StepInputs, StepOutputs

if TYPE_CHECKING:
    from rekindle.release.compare import Comparison


class Inputs(StepInputs):
    name: str = Field(description="registered model")
    endpoint: str = Field(
        default="", description="URL of the service (default: http://NAME:8080; $REKINDLE_ENDPOINT wins)"
    )
    report: Artifact = Field(description="what evaluate made, with requests and the predictions to expect")
    model_sha256: str = Field(description="weights that must serve")
    version: str = Field(description="version to promote")
    champion: str = Field(default="", description="version that it was judged against; empty: there was none")
    deployment: str = Field(default="", description="what serves it")
    promote: bool = Field(default=True, description="whether it becomes the champion now, or only after its canary")
    keep_releases: int = Field(default=3, ge=1, description="earlier releases whose Deployments stay for a rollback")
    run_id: str = Field(default="", description="MLflow run to record it on (empty: none)")
    sample: int = Field(default=200, ge=1, description="test rows of the report to replay, about")
    tolerance: float = Field(
        default=1e-5,
        ge=0,
        description="largest difference between a served and an offline number, relative for those above 1",
    )
    wait_seconds: float = Field(default=180.0, gt=0, description="for the service to serve these weights")


class Outputs(StepOutputs):
    max_difference: float = Field(description="largest difference of the predictions")
    replayed: int = Field(description="test rows replayed")
    endpoint: str = Field(description="URL of the service")
    former: str = Field(description="the Deployment that served before, or still does; empty if none did")
    retained: list[str] = Field(description="Deployments of the releases that are kept, its own among them")
    expired: list[str] = Field(description="Deployments of older releases, which are no longer kept")


def run(inputs: Inputs) -> Outputs:
    """Wait, replay, compare, promote. Raises DataError if a prediction differs, RekindleError if nothing serves."""
    from rekindle.errors import say
    from rekindle.release import promotion
    from rekindle.release.client import ModelClient, resolve
    from rekindle.release.compare import compare, read_predictions
    from rekindle.release.files import PREDICTIONS

    endpoint = resolve(inputs.endpoint or f"http://{inputs.name}:8080")
    target = inputs.name, inputs.version, inputs.champion, inputs.deployment
    if inputs.promote and promotion.superseded(*target):  # its servers may have no pods any more
        say(f"version {inputs.version} of {inputs.name} was promoted before, and another one has followed")
        return Outputs(
            max_difference=0, replayed=0, endpoint=endpoint, former="", retained=[inputs.deployment], expired=[]
        )
    client = ModelClient(endpoint, inputs.name, inputs.model_sha256, time.monotonic() + inputs.wait_seconds)
    client.wait()
    client.predict(client.example())
    requests = []
    if (inputs.report / PREDICTIONS).exists():
        requests = read_predictions(inputs.report, inputs.sample)
    else:
        say(f"the report has no {PREDICTIONS}: only the example was predicted")
    comparison = compare(client, requests, inputs.tolerance)
    if requests:
        check(comparison, inputs, endpoint)
    found = promotion.retry(lambda: record(inputs, comparison), client.deadline)  # a promotion is never left half done
    outputs = {"max_difference": comparison.max_difference, "replayed": comparison.replayed, "endpoint": endpoint}
    return Outputs(**outputs, **found)


def record(inputs: Inputs, comparison: "Comparison") -> dict[str, Any]:
    """Promote the version if that is asked for; gives what served before, and what is kept. Raises ChampionChanged."""
    from rekindle import Store, tracking
    from rekindle.release import promotion

    tags = {}
    if inputs.promote:
        former = promotion.promote(Store.from_env(), inputs.name, inputs.version, inputs.champion, inputs.deployment)
        tags = {"rekindle.promoted": f"{inputs.name} {inputs.version}"}
    else:
        champion = tracking.champion(inputs.name)
        former = champion.deployment if champion and champion.deployment != inputs.deployment else ""
    if inputs.run_id:
        metrics = {"verify.max_difference": comparison.max_difference, "verify.replayed": comparison.replayed}
        tracking.log(inputs.run_id, metrics=metrics, tags=tags)
    kept = inputs.name, inputs.version, inputs.keep_releases
    return {
        "former": former,
        "retained": promotion.retained_deployments(*kept),
        "expired": promotion.expired_deployments(*kept),
    }


def check(comparison: "Comparison", inputs: Inputs, endpoint: str) -> None:
    """Raises DataError unless something was replayed and all of it agreed."""
    if not comparison.replayed:
        raise DataError(
            f"no test row could be replayed: {comparison.too_large} were in requests too large for the server. Raise "
            f"serve.max_bytes or serve.max_instances. Version {inputs.version} is not promoted; what served before "
            "serves on."
        )
    if comparison.differing:
        raise DataError(
            f"{comparison.differing} of {comparison.replayed} replayed test rows have other predictions at {endpoint} "
            f"than offline (by more than {inputs.tolerance:g}); the worst is {comparison.worst}. Version "
            f"{inputs.version} is not promoted; what served before serves on."
        )
