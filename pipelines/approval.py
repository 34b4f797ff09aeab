"""Manual approval: the pipeline waits after the evaluation until `rekindle resume RUN` approves the
release.

    rekindle run configs/approval.yaml
"""

from typing import Any

from hera.workflows import Suspend, Task

from rekindle import Config, blocks


def build(config: Config) -> Any:
    with blocks.pipeline(config) as workflow:
        prepare_step = blocks.prepare()
        train_step = blocks.train(prepare_step)
        with blocks.group("decide", mutex=config.name):
            evaluate_step = blocks.evaluate(train_step)
            with blocks.group("ship", when=evaluate_step.outputs.verdict == "release"):
                approval_task = Task(name="approval", template=Suspend(name="wait-for-approval"))
                release_step = blocks.release(evaluate_step)
                approval_task.next(release_step)
                blocks.verify(blocks.deploy(release_step))
    return workflow
