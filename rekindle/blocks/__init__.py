"""Building blocks of pipelines: `from rekindle import blocks`. The manual is
docs/your-own-pipeline.md.

    with blocks.pipeline(config) as workflow:          a Hera Workflow
        data = blocks.prepare()                        a Hera task with typed outputs, such as
        data.outputs.dataset
        model = blocks.train(data)
        evaluation = blocks.decide(model)              evaluate; with the verdict `release` also
        release, deploy, verify
        blocks.step("shop.report", metrics=evaluation.outputs.metrics)   any other step

`decide` is short for these blocks:
        with blocks.group("decide", mutex=config.name):        one run at a time
            evaluation = blocks.evaluate(model)
            with blocks.group("ship", when=evaluation.outputs.verdict == "release"):     or
            blocks.ship(evaluation)
                blocks.verify(blocks.deploy(blocks.release(evaluation)))

`blocks.job` trains with another framework on the training operator (docs/other-jobs.md):
    trees = blocks.job(data, "XGBoostJob", "shop.trees", {"Master": 1, "Worker": 3})

The modules `jobs`, `serving`, `resource` and `volume` have functions that return Kubernetes objects
as plain data, with their conditions of success and failure.
"""

from argolocal import lazy_exports

# Names are imported on first use: a config needs `settings`, but not Hera, which is slow to import.
# module → its public names, as in __init__.pyi
PUBLIC_NAMES = {
    "workflow": ("pipeline", "group", "at_exit", "step"),
    "recipe.training": ("prepare", "train", "choose"),
    "recipe.release": ("evaluate", "release", "deploy", "verify", "ship", "decide"),
    "recipe.other_job": ("job",),
    "wiring": ("Block", "Condition", "WiringError"),
}
__all__, __getattr__, __dir__ = lazy_exports(__name__, PUBLIC_NAMES)  # pyright: ignore[reportUnsupportedDunderAll]
