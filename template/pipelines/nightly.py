"""Pipeline from raw data to a served model, with a model card."""

from rekindle import blocks


def build(config):
    with blocks.pipeline(config) as workflow:
        prepare_step = blocks.prepare()
        train_step = blocks.train(prepare_step)

        # because of the mutex, only one run of this pipeline at a time executes this group
        with blocks.group("decide", mutex=config.name):
            evaluate_step = blocks.evaluate(train_step)
            blocks.step(
                "steps.card",
                metrics=evaluate_step.outputs.metrics,
                verdict=evaluate_step.outputs.verdict,
            )
            with blocks.group("ship", when=evaluate_step.outputs.verdict == "release"):
                release_step = blocks.release(evaluate_step)
                deploy_step = blocks.deploy(release_step)
                blocks.verify(deploy_step)

    return workflow
