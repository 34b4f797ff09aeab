"""Manual approval: the pipeline waits after the evaluation until `rekindle resume RUN` approves the
release.

    rekindle run configs/approval.yaml
"""

from typing import Any

from hera.workflows import Suspend, Task

from rekindle import Config, blocks


def build(config: Config) -> Any:
    with blocks.pipeline(config) as workflow:
        data = blocks.prepare()
        model = blocks.train(data)
        with blocks.group("decide", mutex=config.name):
            evaluation = blocks.evaluate(model)
            with blocks.group("ship", when=evaluation.outputs.verdict == "release"):
                approval = Task(name="approval", template=Suspend(name="wait-for-approval"))
                released = blocks.release(evaluation)
                approval.next(released)
                blocks.verify(blocks.deploy(released))
    return workflow
