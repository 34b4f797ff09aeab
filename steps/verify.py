"""Verify a Deployment: replay test rows, compare served with offline predictions, and promote the
version.

    rekindle step steps.verify --name=demo --endpoint=http://127.0.0.1:8080 --report=report/ \\
      --model-sha256=... --version=3

Each row is sent alone and in a batch, to detect predictions that depend on the other rows of a
batch. Served and offline predictions may differ by at most `tolerance`. Served and offline
predictions must be equal if evaluation and servers predict one instance at a time (serve.max_batch
is 1) on equal processors. The version becomes the `champion` only if all predictions agree and the
candidate was evaluated against the current champion. If a served prediction differs from the
offline prediction, the step fails. If the champion has changed, the step returns `promoted: false`,
and the pipeline repeats the evaluation. If a prediction differs or the champion has changed, the
current champion keeps serving.
"""

import time
from typing import TYPE_CHECKING, Any

from pydantic import Field

from rekindle import Artifact, DataError, StepInputs, StepOutputs
from rekindle.release.serve_config import CHAMPION_CHANGED_RESULT
from rekindle.step import SHA256_PATTERN

if TYPE_CHECKING:
    from rekindle import Store
    from rekindle.release.compare import PredictionComparison
    from rekindle.release.model_client import ModelClient


class Inputs(StepInputs):
    name: str = Field(description="registered model")
    endpoint: str = Field(
        default="",
        description=(
            "URL of the service (default: http://NAME:8080; $REKINDLE_ENDPOINT overrides this URL)"
        ),
    )
    report: Artifact = Field(description="output of evaluate: requests and expected predictions")
    model_sha256: str = Field(
        pattern=SHA256_PATTERN, description="sha256 of the weights that the service must use"
    )
    version: str = Field(description="version to promote")
    champion: str = Field(
        default="",
        description=(
            "version of the champion at the time of the evaluation; empty if no champion existed"
        ),
    )
    deployment: str = Field(default="", description="Deployment that serves the version")
    model_uri: str = Field(
        default="",
        description=(
            "key prefix of the release; the verdict.json of the report replaces its verdict.json"
        ),
    )
    promote: bool = Field(
        default=True,
        description="true: promote the version now; false: promote it after its canary",
    )
    canary: str = Field(
        default="", description="result of the canary; empty: the release has not had a canary"
    )
    repetitions: int = Field(
        default=0,
        ge=0,
        description=(
            "number of times that the evaluation may be repeated because the champion has changed; "
            "0: a changed champion is an error"
        ),
    )
    keep_releases: int = Field(
        default=3, ge=1, description="number of earlier releases to keep for a rollback"
    )
    run_id: str = Field(default="", description="MLflow run for the results; empty: log nothing")
    sample: int = Field(default=200, ge=1, description="approximate number of test rows to replay")
    tolerance: float = Field(
        default=1e-5,
        ge=0,
        description=(
            "maximum difference between served and offline numbers, relative for numbers above 1"
        ),
    )
    wait_seconds: float = Field(
        default=180.0, gt=0, description="maximum seconds until the service serves these weights"
    )


class Outputs(StepOutputs):
    max_difference: float = Field(
        description="largest difference between served and offline predictions"
    )
    replayed: int = Field(description="number of replayed test rows")
    compared: str = Field(
        description="precision of the comparison, and maximum size of the server's batches"
    )
    endpoint: str = Field(description="URL of the service")
    promoted: bool = Field(
        description=(
            "true if the version was promoted; false if the champion has changed, or before the"
            " canary"
        )
    )
    former: str = Field(
        description=(
            "Deployment of the previous (or still current) champion; empty if no champion existed"
        )
    )
    running: list[str] = Field(
        description=(
            "Deployments that may have pods: of the releases to keep, including this one, and"
            " replaced servers"
        )
    )
    expired: list[str] = Field(
        description=(
            "Deployments of older releases, and replaced servers of this version, to be deleted"
        )
    )


def run(inputs: Inputs) -> Outputs:
    """Verify and promote the version.

    Raises DataError if a prediction differs, RekindleError if the service does not serve the
    expected weights.
    """
    from rekindle import Store
    from rekindle.errors import write_stderr
    from rekindle.release import promotion
    from rekindle.release.compare import PredictionComparison
    from rekindle.release.model_client import ModelClient, resolve_endpoint
    from rekindle.release.release_files import PREDICTIONS_FILE
    from rekindle.release.watch import drift

    service_endpoint = resolve_endpoint(inputs.endpoint or f"http://{inputs.name}:8080")

    # skip the verification, because the servers of a version that a later version has replaced may
    # have been deleted
    if inputs.promote and promotion.is_superseded(*_promotion_target(inputs)):
        return _skip_superseded(inputs, service_endpoint)

    model_client = ModelClient(
        service_endpoint, inputs.name, inputs.model_sha256, time.monotonic() + inputs.wait_seconds
    )
    server_status = model_client.wait()
    model_client.predict(model_client.example())

    if (inputs.report / PREDICTIONS_FILE).exists():
        prediction_comparison, comparison_text = _replay_test_rows(
            inputs, model_client, server_status, service_endpoint
        )
    else:
        prediction_comparison = PredictionComparison(inputs.tolerance)
        comparison_text = "the example only"
        write_stderr(f"the report does not contain {PREDICTIONS_FILE}: only the example was tested")

    # retry, because a service may become unavailable between the two changes of a promotion
    promotion_result = promotion.retry_while_unavailable(
        lambda: conclude(inputs, prediction_comparison), model_client.deadline
    )
    if promotion_result["promoted"]:
        drift.reset_counts(Store.from_env(), inputs.name, inputs.version)

    return Outputs(
        max_difference=prediction_comparison.max_difference,
        replayed=prediction_comparison.replayed,
        endpoint=service_endpoint,
        compared=comparison_text,
        **promotion_result,
    )


def _promotion_target(inputs: Inputs) -> tuple[str, str, str, str, str]:
    """Return the arguments by which rekindle.release.promotion identifies a promotion."""
    return inputs.name, inputs.version, inputs.champion, inputs.deployment, inputs.run_id


def _skip_superseded(inputs: Inputs, service_endpoint: str) -> Outputs:
    """Return the outputs for a version that was promoted before, and that a later version has
    replaced. Such a version is not verified again."""
    from rekindle import tracking
    from rekindle.errors import write_stderr

    write_stderr(
        f"version {inputs.version} of {inputs.name} was promoted before, and a later version"
        " has replaced it"
    )
    if inputs.run_id:
        tracking.log_to_run(inputs.run_id, run_tags=promotion_tags(inputs))

    return Outputs(
        max_difference=0,
        replayed=0,
        compared="",
        endpoint=service_endpoint,
        promoted=True,
        former="",
        running=[inputs.deployment],
        expired=[],
    )


def _replay_test_rows(
    inputs: Inputs,
    model_client: "ModelClient",
    server_status: dict[str, Any],
    service_endpoint: str,
) -> tuple["PredictionComparison", str]:
    """Send the recorded requests to the servers, and compare the predictions. Return the comparison
    of the predictions and a description of its precision. Raises DataError if a prediction
    differs."""
    from rekindle.errors import write_stderr
    from rekindle.release.compare import compare_predictions, read_numerics, read_predictions

    replay_requests = read_predictions(inputs.report, inputs.sample)
    server_numerics = server_status.get("numerics")
    is_exact = (
        server_status.get("max_batch") == 1
        and server_numerics
        and server_numerics == read_numerics(inputs.report)
    )
    prediction_comparison = compare_predictions(
        model_client,
        replay_requests,
        0.0 if is_exact else inputs.tolerance,
        are_independent=bool(server_numerics),
    )
    reject_differences(prediction_comparison, inputs, service_endpoint)

    if prediction_comparison.tolerance:
        precision_text = f"within {prediction_comparison.tolerance:g}"
    else:
        precision_text = "to the bit"

    comparison_text = f"{precision_text}, in batches of up to {server_status.get('max_batch', 1)}"
    write_stderr(
        f"{prediction_comparison.replayed} test rows have the same served and offline"
        f" predictions, {comparison_text}"
    )
    return prediction_comparison, comparison_text


def conclude(inputs: Inputs, prediction_comparison: "PredictionComparison") -> dict[str, Any]:
    """Promote the version if `inputs.promote` is true. Log the result, and return the outputs
    `promoted`, `former`, `running` and `expired`.

    Raises ChampionChangedError if the champion has changed and the evaluation cannot be repeated.
    """
    from rekindle import Store, tracking
    from rekindle.errors import write_stderr
    from rekindle.release import promotion

    is_promoted = inputs.promote
    former_deployment = ""
    run_tags = {}

    try:
        if is_promoted:
            former_deployment = promote_candidate(Store.from_env(), inputs)
            tracking.tag_version(
                inputs.name, inputs.version, tracking.KEEP_RELEASES, str(inputs.keep_releases)
            )
            run_tags = promotion_tags(inputs)
    except promotion.ChampionChangedError as error:
        if not inputs.repetitions:
            raise

        is_promoted = False
        write_stderr(f"{error}")

    current_champion = None if is_promoted else tracking.champion(inputs.name)
    if current_champion and current_champion.deployment != inputs.deployment:
        former_deployment = current_champion.deployment

    if inputs.run_id:
        verification_metrics = {
            "verify.max_difference": prediction_comparison.max_difference,
            "verify.replayed": prediction_comparison.replayed,
        }
        tracking.log_to_run(inputs.run_id, run_metrics=verification_metrics, run_tags=run_tags)

    running_deployments = [inputs.deployment]
    expired_deployments = list[str]()
    if is_promoted:
        retention_arguments = inputs.name, inputs.version, inputs.keep_releases, former_deployment
        running_deployments = promotion.select_own_servers(
            inputs.name, promotion.list_running_deployments(*retention_arguments), inputs.deployment
        )
        expired_deployments = promotion.select_own_servers(
            inputs.name, promotion.list_expired_deployments(*retention_arguments)
        )

    return {
        "promoted": is_promoted,
        "former": former_deployment,
        "running": running_deployments,
        "expired": expired_deployments,
    }


def promotion_tags(inputs: Inputs) -> dict[str, str]:
    """Return the tags of the MLflow run that promoted the version."""
    from rekindle import tracking

    return {tracking.PROMOTED: f"{inputs.name} {inputs.version}"}


def promote_candidate(object_store: "Store", inputs: Inputs) -> str:
    """Promote the version, and store the verdict of its last evaluation; return the name of the
    previous champion's Deployment. Raises ChampionChangedError."""
    from rekindle.content.verified_release import VERDICT
    from rekindle.release import promotion

    if inputs.canary == CHAMPION_CHANGED_RESULT:
        raise promotion.ChampionChangedError(
            f"the champion of {inputs.name} changed during the canary of version {inputs.version},"
            " which is not promoted. Run the pipeline again."
        )

    verdict_path = inputs.report / VERDICT
    if inputs.model_uri and verdict_path.exists():
        object_store.put(f"{inputs.model_uri.rstrip('/')}/{VERDICT}", verdict_path.read_bytes())

    return promotion.promote(object_store, *_promotion_target(inputs))


def reject_differences(
    prediction_comparison: "PredictionComparison", inputs: Inputs, service_endpoint: str
) -> None:
    """Raise DataError unless test rows were replayed and all predictions agree."""
    if not prediction_comparison.replayed:
        raise DataError(
            f"no test row could be replayed: the requests of {prediction_comparison.too_large}"
            " were too large for the server. Raise serve.max_bytes or serve.max_instances. Version"
            f" {inputs.version} is not promoted; the current version keeps serving."
        )

    outcome_sentence = (
        f"Version {inputs.version} is not promoted; the current version keeps serving."
    )
    replayed_rows_text = f"of {prediction_comparison.replayed} replayed test rows"
    tolerance_text = f"(by more than {prediction_comparison.tolerance:g})"

    if prediction_comparison.random:
        raise DataError(
            f"{prediction_comparison.unstable} {replayed_rows_text} get another prediction at each"
            f" request {tolerance_text}, such as {prediction_comparison.example}. The model is in"
            " train mode (dropout), or `predict` uses random numbers: call model.eval(), and draw"
            f" no random numbers. {outcome_sentence}"
        )

    if prediction_comparison.unstable:
        raise DataError(
            f"{prediction_comparison.unstable} {replayed_rows_text} get another prediction with"
            f" other rows in the batch than alone {tolerance_text}, such as"
            f" {prediction_comparison.example}. The model is in train mode, a BatchNorm normalizes"
            " with the batch, or `predict` mixes instances: call model.eval(), and compute each"
            f" prediction from its own instance. {outcome_sentence}"
        )

    if prediction_comparison.differing:
        raise DataError(
            f"{prediction_comparison.differing} {replayed_rows_text} have other predictions at"
            f" {service_endpoint} than offline"
            f" {tolerance_text}; the worst is {prediction_comparison.worst}. {outcome_sentence}"
        )
