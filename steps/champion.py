"""The champion of a registered model: what it is, and where its files are.

rekindle step steps.champion --name=demo --output model_uri=uri.txt
"""

from pydantic import Field

from rekindle import StepInputs, StepOutputs


class Inputs(StepInputs):
    name: str = Field(description="registered model")
    server: str = Field(default="", description="Deployment that is about to get the traffic, if it is the champion's")


class Outputs(StepOutputs):
    model_uri: str = Field(description="key prefix of its release in the object store")
    version: str = Field(description="version of the registered model")
    sha256: str = Field(description="identity of its weights")
    deployment: str = Field(description="what serves it")


def run(inputs: Inputs) -> Outputs:
    """Raises ConfigError if no version is the champion."""
    from rekindle import tracking
    from rekindle.errors import say

    champion = tracking.require_champion(inputs.name)
    if inputs.server and inputs.server != champion.deployment:
        say(
            f"{inputs.server} gets no traffic: by now the champion of {inputs.name} is version {champion.version}, "
            f"served by {champion.deployment or 'nothing'}"
        )
    facts = {"version": champion.version, "sha256": champion.sha256, "deployment": champion.deployment}
    return Outputs(model_uri=champion.uri, **facts)
