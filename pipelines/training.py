"""From raw data to a served model: prepare → train → evaluate → (the gate) → release → deploy → verify → switch.

    rekindle render configs/demo.yaml

Training and serving are Kubernetes objects that the workflow applies; every other step is a container. A candidate
gets servers of its own, which no client reaches until they are verified; what served before stays for a rollback.
The blocks and a pipeline of one's own: docs/your-own-pipeline.md.
"""

from typing import Any

from rekindle import Config, blocks


def build(config: Config) -> Any:
    """The pipeline of `config`."""
    with blocks.pipeline(config) as workflow:
        data = blocks.prepare()
        model = blocks.train(data)
        blocks.decide(model)  # evaluate → (the gate) → release → deploy → verify → switch
    return workflow
