"""Verify a Deployment: replay test rows, compare served with offline predictions, and promote the
version.

    rekindle step steps.verify --name=demo --endpoint=http://127.0.0.1:8080 --report=report/ \\
      --model-sha256=... --version=3

Each row is sent alone and in a batch, to detect predictions that depend on the other rows of a
batch. Served and offline predictions may differ by at most `tolerance`. They must be equal if
evaluation and servers predict one instance at a time (serve.max_batch: 1) on equal processors. The
version becomes the `champion` only if all predictions agree and the candidate was evaluated against
the current champion. If a served prediction differs from the offline prediction, the step fails. If
the champion has changed, the step returns `promoted: false`, and the pipeline repeats the
evaluation. If a prediction differs or the champion has changed, the current champion keeps serving.
"""

import time
from typing import TYPE_CHECKING, Any

from pydantic import Field

from rekindle import Artifact, DataError, StepInputs, StepOutputs
from rekindle.release.serve_config import CHAMPION_CHANGED
from rekindle.step import SHA256

if TYPE_CHECKING:
    from rekindle import Store
    from rekindle.release.compare import Comparison


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
        pattern=SHA256, description="sha256 of the weights that the service must use"
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
    weights.
    """
    from rekindle import Store, tracking
    from rekindle.errors import say
    from rekindle.release import promotion
    from rekindle.release.compare import Comparison, compare, read_numerics, read_predictions
    from rekindle.release.model_client import ModelClient, resolve
    from rekindle.release.release_files import PREDICTIONS
    from rekindle.release.watch import drift

    endpoint = resolve(inputs.endpoint or f"http://{inputs.name}:8080")

    target = inputs.name, inputs.version, inputs.champion, inputs.deployment, inputs.run_id
    # skip a version that a later one has replaced, because its servers may have been deleted
    if inputs.promote and promotion.is_superseded(*target):
        say(
            f"version {inputs.version} of {inputs.name} was promoted before, and a later version"
            " has replaced it"
        )
        if inputs.run_id:
            tracking.log(inputs.run_id, tags=promotion_tags(inputs))

        return Outputs(
            max_difference=0,
            replayed=0,
            compared="",
            endpoint=endpoint,
            promoted=True,
            former="",
            running=[inputs.deployment],
            expired=[],
        )

    client = ModelClient(
        endpoint, inputs.name, inputs.model_sha256, time.monotonic() + inputs.wait_seconds
    )
    server = client.wait()
    client.predict(client.example())
    comparison = Comparison(inputs.tolerance)
    compared = "the example only"

    if (inputs.report / PREDICTIONS).exists():
        requests = read_predictions(inputs.report, inputs.sample)
        numerics = server.get("numerics")
        exact = (
            server.get("max_batch") == 1 and numerics and numerics == read_numerics(inputs.report)
        )
        comparison = compare(
            client, requests, 0.0 if exact else inputs.tolerance, independent=bool(numerics)
        )
        reject_differences(comparison, inputs, endpoint)

        if comparison.tolerance:
            precision = f"within {comparison.tolerance:g}"
        else:
            precision = "to the bit"

        compared = f"{precision}, in batches of up to {server.get('max_batch', 1)}"
        say(
            f"{comparison.replayed} test rows have the same served and offline predictions,"
            f" {compared}"
        )
    else:
        say(f"the report does not contain {PREDICTIONS}: only the example was tested")

    # retry, because a service may become unavailable between the two changes of a promotion
    result = promotion.retry_while_unavailable(
        lambda: conclude(inputs, comparison), client.deadline
    )
    if result["promoted"]:
        drift.reset_counts(Store.from_env(), inputs.name, inputs.version)

    outputs = {
        "max_difference": comparison.max_difference,
        "replayed": comparison.replayed,
        "endpoint": endpoint,
    }
    return Outputs(**outputs, compared=compared, **result)


def conclude(inputs: Inputs, comparison: "Comparison") -> dict[str, Any]:
    """Promote the version if `inputs.promote` is True. Log and return the result, which names the
    Deployments that are previous, running and expired.

    Raises ChampionChanged if the champion has changed and the evaluation cannot be repeated.
    """
    from rekindle import Store, tracking
    from rekindle.errors import say
    from rekindle.release import promotion

    promoted = inputs.promote
    former = ""
    tags = {}

    try:
        if promoted:
            former = promote_candidate(Store.from_env(), inputs)
            tracking.tag_version(
                inputs.name, inputs.version, tracking.KEEP_RELEASES, str(inputs.keep_releases)
            )
            tags = promotion_tags(inputs)
    except promotion.ChampionChanged as error:
        if not inputs.repetitions:
            raise

        promoted = False
        say(f"{error}")

    if (
        not promoted
        and (champion := tracking.champion(inputs.name))
        and champion.deployment != inputs.deployment
    ):
        former = champion.deployment

    if inputs.run_id:
        metrics = {
            "verify.max_difference": comparison.max_difference,
            "verify.replayed": comparison.replayed,
        }
        tracking.log(inputs.run_id, metrics=metrics, tags=tags)

    running = [inputs.deployment]
    expired = list[str]()
    if promoted:
        arguments = inputs.name, inputs.version, inputs.keep_releases, former
        running = promotion.select_own_servers(
            inputs.name, promotion.list_running_deployments(*arguments), inputs.deployment
        )
        expired = promotion.select_own_servers(
            inputs.name, promotion.list_expired_deployments(*arguments)
        )

    return {"promoted": promoted, "former": former, "running": running, "expired": expired}


def promotion_tags(inputs: Inputs) -> dict[str, str]:
    """Return the tags of the MLflow run that promoted the version."""
    from rekindle import tracking

    return {tracking.PROMOTED: f"{inputs.name} {inputs.version}"}


def promote_candidate(store: "Store", inputs: Inputs) -> str:
    """Promote the version, and store the verdict of its last evaluation; return the name of the
    previous champion's Deployment. Raises ChampionChanged."""
    from rekindle.content.verified_release import VERDICT
    from rekindle.release import promotion

    if inputs.canary == CHAMPION_CHANGED:
        raise promotion.ChampionChanged(
            f"the champion of {inputs.name} changed during the canary of version {inputs.version},"
            " which is not promoted. Run the pipeline again."
        )

    if inputs.model_uri and (verdict := inputs.report / VERDICT).exists():
        store.put(f"{inputs.model_uri.rstrip('/')}/{VERDICT}", verdict.read_bytes())

    target = inputs.name, inputs.version, inputs.champion, inputs.deployment, inputs.run_id
    return promotion.promote(store, *target)


def reject_differences(comparison: "Comparison", inputs: Inputs, endpoint: str) -> None:
    """Raise DataError unless test rows were replayed and all predictions agree."""
    if not comparison.replayed:
        raise DataError(
            f"no test row could be replayed: the requests of {comparison.too_large} were too large"
            " for the server. Raise serve.max_bytes or serve.max_instances. Version"
            f" {inputs.version} is not promoted; the current version keeps serving."
        )

    outcome = f"Version {inputs.version} is not promoted; the current version keeps serving."
    rows = f"of {comparison.replayed} replayed test rows"
    limit = f"(by more than {comparison.tolerance:g})"

    if comparison.random:
        raise DataError(
            f"{comparison.unstable} {rows} get another prediction at each request {limit}, such as"
            f" {comparison.example}. The model is in train mode (dropout), or `predict` uses random"
            f" numbers: call model.eval(), and draw no random numbers. {outcome}"
        )

    if comparison.unstable:
        raise DataError(
            f"{comparison.unstable} {rows} get another prediction with other rows in the batch than"
            f" alone {limit}, such as {comparison.example}. The model is in train mode, a BatchNorm"
            " normalizes with the batch, or `predict` mixes instances: call model.eval(), and"
            f" compute each prediction from its own instance. {outcome}"
        )

    if comparison.differing:
        raise DataError(
            f"{comparison.differing} {rows} have other predictions at {endpoint} than offline"
            f" {limit}; the worst is {comparison.worst}. {outcome}"
        )
