"""A step of this project: write a model card with the verdict and the metrics."""

from pydantic import Field

from rekindle import Artifact, StepInputs, StepOutputs


class Inputs(StepInputs):
    metrics: dict[str, float] = Field(description="metrics of the model, by name")
    verdict: str = Field(description="verdict of the gate")


class Outputs(StepOutputs):
    card: Artifact = Field(description="model card, in Markdown")


def run(inputs: Inputs) -> Outputs:
    card = inputs.workdir / "card.md"
    lines = [f"- {name}: {value:.3f}" for name, value in inputs.metrics.items()]
    card.write_text("\n".join([f"# {inputs.verdict}", "", *lines, ""]))
    return Outputs(card=card)
