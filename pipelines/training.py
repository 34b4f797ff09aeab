"""From raw data to a served model: prepare → train → evaluate → (the gate) → release → deploy → verify.

    rekindle render configs/demo.yaml

Training and serving are Kubernetes objects that the workflow applies; every other step is a container. A candidate
that fails its verification is taken back: the champion's deployment is put back, or, without one, nothing serves.
"""

from itertools import pairwise
from typing import TYPE_CHECKING, Any

from hera.workflows import DAG, Parameter, Resource, Task, Workflow
from hera.workflows import models as m

from rekindle.blocks import pod
from rekindle.blocks.jobs import pytorch_job
from rekindle.blocks.jobs.kubeflow import FAILURE
from rekindle.blocks.resource import apply, delete
from rekindle.blocks.serving import deployment as serving
from rekindle.blocks.serving.autoscaler import autoscaler
from rekindle.blocks.serving.disruption_budget import disruption_budget
from rekindle.blocks.serving.service import service
from rekindle.blocks.step import NO_CURE, command, retries, step
from rekindle.keys import CHECKPOINTS, DATASET, LEDGER, MODEL, key
from rekindle.provenance import PROVENANCE, RELEASED
from rekindle.step import load, to_text

if TYPE_CHECKING:
    from rekindle.config import Config

JOB = "{{workflow.name}}-train"
READ_FIRST = ("main", "ship", "deploy", "finish")  # the plan comes before its parts
OUTPUTS = ("run_id", "digest", "verdict", "reason", "metrics", "model_sha256")  # of the whole workflow


def build(config: "Config", kind: type[Workflow] = Workflow) -> Workflow:
    """The pipeline of `config` as a Workflow, or as another `kind` that holds the same spec."""
    cluster = config.cluster
    identity: dict[str, Any] = {"generate_name": f"{config.name}-"} if kind is Workflow else {"name": config.name}
    with kind(
        **identity,
        namespace=cluster.namespace or None,
        labels={"app.kubernetes.io/part-of": "rekindle", "app.kubernetes.io/name": config.name},
        arguments=[Parameter(name=name, value="") for name in PROVENANCE],
        entrypoint="main",
        on_exit="finish",
        service_account_name=cluster.service_account,
        # no step calls the Kubernetes API: only Argo's own container in its pod gets the account's token
        automount_service_account_token=False,
        executor=m.ExecutorConfig(service_account_name=cluster.service_account),
        security_context=m.PodSecurityContext.model_validate(pod.POD_SECURITY),
        active_deadline_seconds=3600 * cluster.deadline_hours,
        pod_gc=m.PodGC(strategy="OnPodSuccess"),
        ttl_strategy=m.TTLStrategy(seconds_after_completion=86400 * cluster.keep_days),
    ) as workflow:
        cleaner = delete("delete", retries(cluster.retries))
        _main(config, _train(config), _ship(config, cleaner))
        _finish(config, cleaner)
    workflow.templates.sort(key=lambda t: READ_FIRST.index(t.name) if t.name in READ_FIRST else len(READ_FIRST))
    return workflow


def _main(config: "Config", trainer: Resource, shipping: DAG) -> None:
    preparer = step("steps.prepare", config.cluster, exports=OUTPUTS)
    evaluator = step("steps.evaluate", config.cluster, exports=OUTPUTS)
    with DAG(name="main"):
        ours = {"workload": config.workload, "data": config.data, "experiment": config.name}
        recorded = {name: f"{{{{workflow.parameters.{name}}}}}" for name in ("config", "manifest")}
        prepare = _task(preparer, workflow="{{workflow.name}}", **ours, **recorded)
        run_id = prepare.get_parameter("run_id").value
        train = _task(trainer, digest=prepare.get_parameter("digest").value, run_id=run_id)
        evaluate = _task(evaluator, workload=config.workload, name=config.name, run_id=run_id, **dict(config.gate))
        judged = {name: evaluate.get_parameter(name).value for name in ("verdict", "model_sha256")}
        ship = _task(shipping, run_id=run_id, **judged)
        ship.when = "{{=tasks.evaluate.outputs.parameters.verdict == 'release'}}"
        _chain(prepare, train, evaluate, ship)


def _train(config: "Config") -> Resource:
    """The training job. It takes and leaves its files by key, for a resource template has no artifacts."""
    values = {
        **dict(config.train),
        "workload": config.workload,
        "model": config.model,
        "dataset": key(DATASET),
        "out": key(MODEL),
        "checkpoints": key(CHECKPOINTS),
        "digest": "{{inputs.parameters.digest}}",
        "run_id": "{{inputs.parameters.run_id}}",
    }
    job = pytorch_job.pytorch_job(JOB, config.train, config.cluster, command("steps.train", values))
    return apply(
        "train",
        job,
        inputs=("digest", "run_id"),
        success=pytorch_job.SUCCESS,
        failure=FAILURE,
        owned=True,
        # a lost pod finds the job again; a job that failed is not tried again, it has done so itself
        retry=retries(max(5, config.cluster.retries), "!(lastRetry.message contains 'failure condition')"),
    )


def _ship(config: "Config", cleaner: Resource) -> DAG:
    """Release, deploy, verify; what does not pass is taken back, and the DAG fails all the same."""
    cluster, serve = config.cluster, config.serve
    deploy, server = _deploy(config)
    releaser, verifier = step("steps.release", cluster), step("steps.verify", cluster)
    verifier.retry_strategy = retries(1, NO_CURE)  # it has its own patience
    inputs = [Parameter(name=name) for name in ("run_id", "verdict", "model_sha256")]
    provenance = {name: f"{{{{workflow.parameters.{name}}}}}" for name in RELEASED}
    # both are targets: a failed `verify` fails the DAG, though `restore` puts things right
    with DAG(name="ship", inputs=inputs, target="verify restore withdraw") as ship:
        given = {i.name: f"{{{{inputs.parameters.{i.name}}}}}" for i in inputs}
        judged = {name: given[name] for name in ("run_id", "verdict")}
        image = cluster.pod("train").image
        pinned = image.partition("@")[2] or "not pinned"
        release = _task(releaser, name=config.name, image=image, image_digest=pinned, **judged, **provenance)
        uri, version, previous = (release.get_parameter(n).value for n in ("model_uri", "version", "previous"))
        deployed = _task(deploy, model_uri=uri)
        verify = _task(
            verifier,
            workload=config.workload,
            name=config.name,
            endpoint=f"http://{config.name}:{serve.port}",
            version=version,
            model_sha256=given["model_sha256"],
            run_id=given["run_id"],
            wait_seconds=float(serving.STARTUP_SECONDS),
        )
        _chain(release, deployed, verify)
        failed = " || ".join(f"{task}.{phase}" for task in ("deploy", "verify") for phase in ("Failed", "Errored"))
        restore = _task(server, "restore", model_uri=previous)
        withdraw = _task(cleaner, "withdraw", kind="deployment", object=config.name)
        for task, sign in ((restore, "!="), (withdraw, "==")):
            task.depends, task.when = failed, f"{{{{=tasks.release.outputs.parameters.previous {sign} ''}}}}"
    return ship


def _deploy(config: "Config") -> tuple[DAG, Resource]:
    """The DAG that applies all a served model needs, and the template of the Deployment alone."""
    cluster, name = config.cluster, config.name
    values = {"model": "{{inputs.parameters.model_uri}}", "host": "$(POD_IP)", "port": serving.PORT}
    module, retry = load("steps.serve"), retries(2)  # the first look may see what failed before
    limits = {n: v for n, v in dict(config.serve).items() if n in module.Inputs.model_fields}
    flags = command("steps.serve", limits | values)
    server = apply(
        "deployment",
        serving.deployment(name, config.serve, cluster, flags),
        inputs=("model_uri",),
        success=serving.SUCCESS,
        failure=serving.FAILURE,
        retry=retry,
    )
    others = [
        apply("service", service(name, config.serve.port), retry=retry),
        apply("autoscaler", autoscaler(name, config.serve), retry=retry),
        apply("disruption-budget", disruption_budget(name), retry=retry),
    ]
    with DAG(name="deploy", inputs=[Parameter(name="model_uri")]) as deploy:
        _task(server, model_uri="{{inputs.parameters.model_uri}}")
        for other in others:
            _task(other)
    return deploy, server


def _finish(config: "Config", cleaner: Resource) -> None:
    """Whatever the end: the MLflow run says so, and no training job is left behind."""
    reporter = step("steps.report", config.cluster)
    with DAG(name="finish"):
        about = {n: f"{{{{workflow.{n}}}}}" for n in ("status", "failures")}
        ledger = key(LEDGER)
        _task(reporter, workflow="{{workflow.name}}", experiment=config.name, ledger=ledger, **about)
        cleanup = _task(cleaner, "cleanup", kind="pytorchjob", object=JOB)
        cleanup.when = "{{workflow.status}} != Succeeded"


def _task(template: Any, name: str | None = None, /, **values: Any) -> Task:
    arguments = {n: to_text(value) for n, value in values.items()}
    return Task(name=name or template.name, template=template, arguments=arguments or None)


def _chain(*tasks: Task) -> None:
    for before, after in pairwise(tasks):
        after.depends = before.name
