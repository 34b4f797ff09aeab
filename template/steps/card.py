"""A step of this project: write a model card with the verdict and the metrics."""

from pydantic import Field

from rekindle import Artifact, StepInputs, StepOutputs


class Inputs(StepInputs):
    metrics: dict[str, float] = Field(description="metrics of the model, by name")
    verdict: str = Field(description="verdict of the gate")


class Outputs(StepOutputs):
    card: Artifact = Field(description="model card, in Markdown")


def run(inputs: Inputs) -> Outputs:
    card_path = inputs.workdir / "card.md"
    metric_lines = [
        f"- {metric_name}: {metric_value:.3f}"
        for metric_name, metric_value in inputs.metrics.items()
    ]
    card_path.write_text("\n".join([f"# {inputs.verdict}", "", *metric_lines, ""]))
    return Outputs(card=card_path)
