"""From raw data to a served model: prepare → train → evaluate → (the gate) → release → deploy →
verify → switch.

    rekindle render configs/demo.yaml

For training and serving, the workflow applies Kubernetes objects; every other step runs in a
container of its own. A new release gets its own servers, which clients reach only after the step
`verify`; the servers of the previous release are kept for a rollback. docs/your-own-pipeline.md
describes the blocks.
"""

from typing import Any

from rekindle import Config, blocks


def build(config: Config) -> Any:
    with blocks.pipeline(config) as workflow:
        data = blocks.prepare()
        model = blocks.train(data)
        # evaluate → (the gate) → release → deploy → verify → switch
        blocks.decide(model)
    return workflow
