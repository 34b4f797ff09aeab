"""Release and serve a model without training."""

from rekindle import blocks


def build(config):
    with blocks.pipeline(config) as workflow:
        model = blocks.step(
            "steps.make", name=config.name, workflow="{{workflow.name}}", words="{{workflow.name}}"
        )
        blocks.verify(blocks.deploy(blocks.release(model)))
    return workflow
