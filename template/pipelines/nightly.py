"""Pipeline from raw data to a served model, with a model card."""

from rekindle import blocks


def build(config):
    with blocks.pipeline(config) as workflow:
        data = blocks.prepare()
        model = blocks.train(data)

        # because of the mutex, only one run of this pipeline at a time executes this group
        with blocks.group("decide", mutex=config.name):
            evaluation = blocks.evaluate(model)
            blocks.step(
                "steps.card", metrics=evaluation.outputs.metrics, verdict=evaluation.outputs.verdict
            )
            with blocks.group("ship", when=evaluation.outputs.verdict == "release"):
                released = blocks.release(evaluation)
                deployed = blocks.deploy(released)
                blocks.verify(deployed)

    return workflow
