"""Building blocks of pipelines, which a pipeline imports by `from rekindle import blocks`.
docs/your-own-pipeline.md describes all blocks.

    with blocks.pipeline(config) as workflow:    # a Hera Workflow
        data = blocks.prepare()                  # a Hera Task with typed outputs
        model = blocks.train(data)
        evaluation = blocks.decide(model)        # evaluate, and release a better model
        blocks.step("shop.report", metrics=evaluation.outputs.metrics)

`decide` is short for these blocks:

    with blocks.group("decide", mutex=config.name):    # one run at a time
        evaluation = blocks.evaluate(model)
        with blocks.group("ship", when=evaluation.outputs.verdict == "release"):
            blocks.verify(blocks.deploy(blocks.release(evaluation)))

`blocks.job` trains with another framework on the training operator (docs/other-jobs.md):
    trees = blocks.job(data, "XGBoostJob", config.program, {"Master": 1, "Worker": 3})

The functions of `jobs`, `serving`, `resource` and `volume` return Kubernetes objects as plain data.
"""

from argolocal import lazy_exports

# The public names of each module, as in __init__.pyi. The names are imported on their first use,
# because Hera is slow to import and reading a config does not need Hera.
PUBLIC_NAMES = {
    "workflow": ("pipeline", "group", "at_exit", "step"),
    "recipe.training": ("prepare", "train", "program", "choose"),
    "recipe.release": ("evaluate", "release", "deploy", "verify", "ship", "decide"),
    "recipe.other_job": ("job",),
    "wiring": ("Block", "Condition", "WiringError"),
}
__all__, __getattr__, __dir__ = lazy_exports(__name__, PUBLIC_NAMES)  # pyright: ignore[reportUnsupportedDunderAll]
