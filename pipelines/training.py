"""From raw data to a served model: prepare → train → evaluate → (the gate) → release → deploy → verify → switch.

    rekindle render configs/demo.yaml

Training and serving are Kubernetes objects that the workflow applies; every other step is a container. A candidate
gets servers of its own, which no client reaches until they are verified; what served before stays for a rollback.
The blocks and a pipeline of one's own: docs/your-own-pipeline.md.
"""

from typing import TYPE_CHECKING

from rekindle import blocks

if TYPE_CHECKING:
    from hera.workflows import Workflow

    from rekindle.blocks.manifest.config import Config


def build(config: "Config") -> "Workflow":
    """The pipeline of `config`."""
    with blocks.pipeline(config) as workflow:
        data = blocks.prepare()
        model = blocks.train(data)
        with blocks.group("decide", mutex=config.name):  # no other run changes the champion in the meantime
            evaluation = blocks.evaluate(model)
            with blocks.group("ship", when=evaluation.outputs.verdict == "release"):
                released = blocks.release(evaluation)
                deployed = blocks.deploy(released)
                blocks.verify(deployed)
    return workflow
