"""Look up the champion of a registered model. Retention keeps the champion's release while the run
may read it.

    rekindle step steps.champion --name=demo --output model_uri=uri.txt
"""

from typing import Any

from pydantic import Field

from rekindle import StepInputs, StepOutputs
from rekindle.step import SHA256_OR_EMPTY


class Inputs(StepInputs):
    name: str = Field(description="name of the registered model")
    server: str = Field(
        default="",
        description=(
            "Deployment that may serve the champion: the step logs a message if another Deployment"
            " serves it; empty: the run reads the champion's release, so retention keeps it"
        ),
    )
    deployments: list[dict[str, Any]] = Field(
        default=[],
        description="fields `server` and `replicas` of Deployments, for the output `replicas`",
    )


class Outputs(StepOutputs):
    model_uri: str = Field(description="key prefix of the champion's release in the object store")
    version: str = Field(description="version of the champion")
    sha256: str = Field(pattern=SHA256_OR_EMPTY, description="sha256 of the champion's weights")
    deployment: str = Field(description="Deployment that serves the champion")
    replicas: int = Field(
        description=(
            "largest number of pods of the `deployments` other than `server`; 0 if none exists"
        )
    )


def run(inputs: Inputs) -> Outputs:
    """Look up the champion. Raises ConfigError if the model does not have a champion."""
    from rekindle import tracking
    from rekindle.cache import claims
    from rekindle.content.verified_release import require_release_key
    from rekindle.errors import write_stderr
    from rekindle.storage import Store

    champion_release = tracking.require_champion(inputs.name)
    if inputs.server and inputs.server != champion_release.deployment:
        write_stderr(
            f"{inputs.server} gets no traffic: the champion of {inputs.name} is now version"
            f" {champion_release.version}, served by {champion_release.deployment or 'nothing'}"
        )

    if not inputs.server:
        object_store = Store.from_env()
        release_key = champion_release.uri.rstrip("/")
        require_release_key(release_key, object_store.uri(release_key))
        claims.claim_tasks(object_store, [release_key])

    other_deployments = [
        deployment for deployment in inputs.deployments if deployment["server"] != inputs.server
    ]

    return Outputs(
        model_uri=champion_release.uri,
        version=champion_release.version,
        sha256=champion_release.sha256,
        deployment=champion_release.deployment,
        replicas=max(
            (int(deployment["replicas"] or 0) for deployment in other_deployments), default=0
        ),
    )
