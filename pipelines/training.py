"""From raw data to a served model: prepare → train → evaluate → (the gate) → release → deploy → verify.

    rekindle render configs/demo.yaml

Training and serving are Kubernetes objects that the workflow applies; every other step is a container. A candidate
that fails its verification is taken back: the champion's deployment is put back, or, without one, nothing serves.
The blocks and a pipeline of one's own: docs/your-own-pipeline.md.
"""

from typing import TYPE_CHECKING

from rekindle import blocks

if TYPE_CHECKING:
    from hera.workflows import Workflow

    from rekindle.config import Config


def build(config: "Config") -> "Workflow":
    """The pipeline of `config`."""
    with blocks.pipeline(config) as workflow:
        data = blocks.prepare()
        model = blocks.train(data)
        evaluation = blocks.evaluate(model)
        with blocks.group("ship", when=evaluation.outputs.verdict == "release"):
            released = blocks.release(evaluation)
            deployed = blocks.deploy(released)
            blocks.verify(deployed)
    return workflow
