"""The champion of a registered model: what it is, and where its files are.

rekindle step steps.champion --name=demo --output model_uri=uri.txt
"""

from pydantic import Field

from rekindle import StepInputs, StepOutputs


class Inputs(StepInputs):
    name: str = Field(description="registered model")


class Outputs(StepOutputs):
    model_uri: str = Field(description="key prefix of its release in the object store")
    version: str = Field(description="version of the registered model")
    sha256: str = Field(description="identity of its weights")


def run(inputs: Inputs) -> Outputs:
    """Raises ConfigError if no version is the champion."""
    from rekindle import tracking

    champion = tracking.present_champion(inputs.name)
    return Outputs(model_uri=champion.uri, version=champion.version, sha256=champion.sha256)
