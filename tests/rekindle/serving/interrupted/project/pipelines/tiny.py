"""A model without a training, released and served."""

from rekindle import blocks


def build(config):
    with blocks.pipeline(config) as workflow:
        made = blocks.step("steps.make", name=config.name, workflow="{{workflow.name}}", words="{{workflow.name}}")
        blocks.verify(blocks.deploy(blocks.release(made)))
    return workflow
