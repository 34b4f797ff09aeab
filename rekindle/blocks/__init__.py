"""What a pipeline is made of: `from rekindle import blocks`. The manual: docs/your-own-pipeline.md.

    with blocks.pipeline(config) as workflow:          a Hera Workflow with all that every run needs
        data = blocks.prepare()                        a Hera task; data.outputs.dataset is what it hands on
        model = blocks.train(data)
        evaluation = blocks.decide(model)              evaluate, and if its verdict says so release, deploy, verify
        blocks.step("shop.report", metrics=evaluation.outputs.metrics)   any step of one's own

`decide` is these blocks, for a pipeline that changes them:
        with blocks.group("decide", mutex=config.name):        one run at a time
            evaluation = blocks.evaluate(model)
            with blocks.group("ship", when=evaluation.outputs.verdict == "release"):     or blocks.ship(evaluation)
                blocks.verify(blocks.deploy(blocks.release(evaluation)))

Below it, one Kubernetes object a file: functions that return plain data, with the conditions that say how it ended.
    resource.apply("train", job, success=..., ...)     apply an object and wait for its SUCCESS or FAILURE
    pytorch_job.pytorch_job(name, train, cluster, ...) our training: a coordinator and Workers that come and go
    backends.BACKENDS["jobset"].job(name, ...)         the same in a JobSet, or in a TrainJob ("trainjob")
    deployment, service, autoscaler, disruption_budget what serves a model

Training of other frameworks, on the training operator (docs/other-jobs.md); blocks.job is the task of one:
    trees = blocks.job(data, "XGBoostJob", "shop.trees", {"Master": 1, "Worker": 3})
and these are its objects; a replica is kubeflow.Replica(cluster.pod("train"), args, 4):
    kubeflow.training_job("TFJob", name, {"Chief": ..., "Worker": ..., "PS": ..., "Evaluator": ...}, cluster)
    kubeflow.training_job("XGBoostJob", name, {"Master": ..., "Worker": ...}, cluster); also PaddleJob and JAXJob
    kubeflow.training_job("MPIJob", name, {"Launcher": ..., "Worker": ...}, cluster, slotsPerWorker=2)
Without it:
    job.job(name, pod, args, cluster)                  one pod, retried; preemptions do not count
    search.search(name, pod, args, cluster, trials=50) many trials, each with retries of its own
Others:
    volume.volume_claim(name, "200Gi")                 a volume shared by all nodes; cluster.cache puts datasets there

Everything takes its image, resources and nodes from settings.PodConfig; presets.yaml has nodes, GPUs and gangs by name.
"""

from argolocal import exports

# A config reads `settings`, and must not wait for Hera.
NAMES = {  # module → its public names; __init__.pyi says the same to type checkers
    "workflow": ("pipeline", "group", "at_exit", "step"),
    "recipe.training": ("prepare", "train"),
    "recipe.release": ("evaluate", "release", "deploy", "verify", "ship", "decide"),
    "other_job": ("job",),
    "wiring": ("Block", "Condition", "WiringError"),
}
__all__, __getattr__, __dir__ = exports(__name__, NAMES)  # pyright: ignore[reportUnsupportedDunderAll]
