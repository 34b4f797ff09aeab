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
            "Deployment that may serve the champion: the step logs a message if another one does;"
            " empty: the run reads the release, so retention keeps it"
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
    """Look up the champion. Raises ConfigError if the model does not have one."""
    from rekindle import tracking
    from rekindle.cache import claims
    from rekindle.content.verified_release import reject_other_folder
    from rekindle.errors import say
    from rekindle.storage import Store

    champion = tracking.require_champion(inputs.name)
    if inputs.server and inputs.server != champion.deployment:
        say(
            f"{inputs.server} gets no traffic: the champion of {inputs.name} is now version"
            f" {champion.version}, served by {champion.deployment or 'nothing'}"
        )

    if not inputs.server:
        store = Store.from_env()
        key = champion.uri.rstrip("/")
        reject_other_folder(key, store.uri(key))
        claims.claim_tasks(store, [key])

    others = [item for item in inputs.deployments if item["server"] != inputs.server]

    return Outputs(
        model_uri=champion.uri,
        version=champion.version,
        sha256=champion.sha256,
        deployment=champion.deployment,
        replicas=max((int(item["replicas"] or 0) for item in others), default=0),
    )
