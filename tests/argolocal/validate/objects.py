"""A manifest without mistakes, objects of Kubernetes without mistakes, and for each of them a
change that makes it invalid."""

import copy
from collections.abc import Callable
from typing import Any

import yaml

PINNED_IMAGE = "python@sha256:" + "0" * 64
VALID_WORKFLOW = yaml.safe_load(
    """
apiVersion: argoproj.io/v1alpha1
kind: Workflow
metadata: {generateName: sample-, annotations: {team: fraud}}
spec:
  entrypoint: main
  onExit: finish
  activeDeadlineSeconds: 3600
  securityContext: {runAsNonRoot: true, seccompProfile: {type: RuntimeDefault}}
  templateDefaults:
    activeDeadlineSeconds: 600
    container: &safe
      resources: {requests: {cpu: 50m}, limits: {memory: 64Mi}}
      securityContext: {allowPrivilegeEscalation: false, capabilities: {drop: [ALL]}}
    script: *safe
  arguments: {parameters: [{name: rows, value: 5}, {name: unused, value: x}]}
  templates:
  - name: main
    inputs: {parameters: [{name: rows}]}
    outputs: {parameters: [{name: all, valueFrom: {parameter: "{{tasks.score.outputs.parameters.auc}}"}}]}
    dag:
      target: ship loop
      tasks:
      - {name: make, template: make, arguments: {parameters: [{name: rows, value: "{{inputs.parameters.rows}}"}]}}
      - name: score
        template: score
        depends: make.Succeeded && !make.Skipped
        arguments:
          parameters: [{name: of, value: "{{tasks.make.outputs.result}} {{workflow.annotations.team}}"}]
          artifacts: [{name: data, from: "{{tasks.make.outputs.artifacts.data}}"}]
        hooks: {exit: {template: finish, arguments: {parameters: [{name: note, value: "{{tasks.score.status}}"}]}}}
      - name: ship
        template: stages
        depends: score
        when: "{{=asFloat(tasks.score.outputs.parameters.auc) > 0.5 && (workflow.parameters['nope'] ?? '') == ''}}"
      - {name: loop, template: finish, depends: make || score.Failed, withItems: [1, 2],
         arguments: {parameters: [{name: note, value: "{{item}} {{=item + 1}} {{=sprig.upper(workflow.name)}}"}]}}
      - {name: away, templateRef: {name: other, template: t}, depends: make}
      - {name: after, template: finish, depends: away,
         arguments: {parameters: [{name: note, value: "{{tasks.away.outputs.parameters.what}}"}]}}
  - name: make
    inputs: {parameters: [{name: rows}]}
    outputs: {artifacts: [{name: data, path: /tmp/data}]}
    retryStrategy: {limit: 2}
    script:
      image: python
      command: [python]
      source: |
        print("{{inputs.parameters.rows}} {{retries}} {{pod.name}} {{workflow.creationTimestamp.Y}}")
        open("{{outputs.artifacts.data.path}}", "w").write(f"{ {'a': 1} }" + "{{custom.tag}}")
  - name: score
    inputs: {parameters: [{name: of}, {name: cut, default: "1"}], artifacts: [{name: data, path: /tmp/data}]}
    outputs: {parameters: [{name: auc, globalName: auc, valueFrom: {path: /tmp/auc}}]}
    container: {image: python, args: ["{{inputs.artifacts.data.path}}", "{{outputs.parameters.auc.path}}"]}
  - name: stages
    steps:
    - - {name: one, template: finish}
      - {name: two, template: apply, when: "{{workflow.parameters.rows}} > 3"}
    - - {name: three, template: finish, arguments: {parameters: [{name: note, value: "{{steps.one.exitCode}}"}]}}
  - name: apply
    resource:
      action: apply
      successCondition: status.replicaStatuses.Master.succeeded > 0
      failureCondition: status.conditions.1.type == Failed,status.conditions.2.type == Failed
      manifest: |
        kind: PyTorchJob
        metadata: {name: "{{workflow.name}}-train"}
        spec:
          runPolicy: {activeDeadlineSeconds: 3600, cleanPodPolicy: Running}
          elasticPolicy: {minReplicas: 1, maxReplicas: {{workflow.parameters.rows}}}
          pytorchReplicaSpecs:
            Master: {replicas: 1, template: {spec: &pod {
              securityContext: {runAsNonRoot: true, seccompProfile: {type: RuntimeDefault}}, containers: [{
                name: pytorch, image: python, args: ["$(POD_IP)", "{{workflow.name}}"],
                resources: {requests: {cpu: 1, memory: 1Gi}, limits: {memory: 1Gi}},
                securityContext: {allowPrivilegeEscalation: false, capabilities: {drop: [ALL]}}}]}}}
            Worker: {replicas: {{workflow.parameters.rows}}, template: {spec: *pod}}
  - name: finish
    inputs: {parameters: [{name: note, default: ""}]}
    container: {image: python, args: ["{{workflow.status}} {{workflow.outputs.parameters.auc}} {{inputs.parameters}}"]}
""".replace("image: python", f"image: {PINNED_IMAGE}")
)


def find_template(manifest: Any, name: str) -> Any:
    return next(t for t in manifest["spec"]["templates"] if t["name"] == name)


def find_container(manifest: Any) -> Any:
    return find_template(manifest, "score")["container"]


def make_replicas(**types: Any) -> Any:
    image = {"image": PINNED_IMAGE, **VALID_WORKFLOW["spec"]["templateDefaults"]["container"]}
    pod = {"securityContext": VALID_WORKFLOW["spec"]["securityContext"], "containers": [image]}
    return {
        name: {"replicas": type_count, "template": {"spec": copy.deepcopy(pod)}}
        for name, type_count in types.items()
    }


def make_training_job(kind: str, key: str, container: str, **types: int) -> Any:
    roles = make_replicas(**types)
    for each in roles.values():
        each["template"]["spec"]["containers"][0]["name"] = container
    policy = {"activeDeadlineSeconds": 60, "cleanPodPolicy": "Running"}
    spec = {"runPolicy": policy, key: roles}
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": kind,
        "metadata": {"name": "job"},
        "spec": spec,
    }


def make_batch_object(kind: str, *path: str, **spec: Any) -> Any:
    pod = make_training_job("PyTorchJob", "pytorchReplicaSpecs", "main", Worker=1)["spec"][
        "pytorchReplicaSpecs"
    ]["Worker"]["template"]
    pod["spec"]["restartPolicy"] = "Never"
    spec["template"] = pod
    for key in path:
        spec = {key: {"spec": spec}}
    return {"apiVersion": "batch/v1", "kind": kind, "metadata": {"name": "plain"}, "spec": spec}


def add_schedule(job: Any) -> Any:
    job["spec"]["schedule"] = "0 3 * * *"
    return job


def make_deployment(deployment: Any) -> Any:
    deployment["spec"]["template"]["metadata"] = {"labels": {"app": "plain"}}
    deployment["spec"]["template"]["spec"].pop("restartPolicy")
    return deployment | {"apiVersion": "apps/v1"}


VALID_OBJECTS = {
    "PyTorchJob": lambda: (
        make_training_job("PyTorchJob", "pytorchReplicaSpecs", "pytorch", Master=1, Worker=2)
        | {"metadata": {"name": "job", "labels": {"team": "fraud"}}}
    ),
    "TFJob": lambda: make_training_job(
        "TFJob", "tfReplicaSpecs", "tensorflow", Chief=1, PS=1, Worker=2, Evaluator=1
    ),
    "XGBoostJob": lambda: make_training_job(
        "XGBoostJob", "xgbReplicaSpecs", "xgboost", Master=1, Worker=2
    ),
    "PaddleJob": lambda: make_training_job("PaddleJob", "paddleReplicaSpecs", "paddle", Worker=2),
    "JAXJob": lambda: make_training_job("JAXJob", "jaxReplicaSpecs", "jax", Worker=2),
    "MPIJob": lambda: make_training_job("MPIJob", "mpiReplicaSpecs", "any", Launcher=1, Worker=2),
    "Job": lambda: make_batch_object("Job", activeDeadlineSeconds=60),
    "CronJob": lambda: add_schedule(
        make_batch_object("CronJob", "jobTemplate", activeDeadlineSeconds=60)
    ),
    "JobSet": lambda: {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": "set"},
        "spec": make_job_set()["template"]["spec"],
    },
    "Deployment": lambda: make_deployment(
        make_batch_object("Deployment", selector={"matchLabels": {"app": "plain"}})
    ),
    "HorizontalPodAutoscaler": lambda: {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": {"name": "plain"},
        "spec": {
            "maxReplicas": 2,
            "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": "plain"},
        },
    },
}


def make_job_set() -> Any:
    node = make_batch_object("Job")["spec"]["template"]
    jobs = [{"name": "node", "template": {"spec": {"template": node}}}]
    return {"template": {"spec": {"replicatedJobs": jobs}}}


def find_node_container(thing: Any) -> Any:
    return find_node_pod(thing["template"])["containers"][0]


def find_node_pod(job_set: Any) -> Any:
    return job_set["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]


def find_pod(thing: Any) -> Any:
    spec = thing["spec"]
    for key in ("pytorchReplicaSpecs", "Worker", "jobTemplate", "spec", "template", "spec"):
        spec = spec.get(key, spec)
    return spec


def find_worker(thing: Any) -> Any:
    return next(each for key, each in thing["spec"].items() if key.endswith("ReplicaSpecs"))[
        "Worker"
    ]


def set_elastic_policy(thing: Any, **policy: Any) -> None:
    thing["spec"]["elasticPolicy"] = {"minReplicas": 1, "maxReplicas": 4, **policy}


def make_trainer_object(kind: str, **spec: Any) -> Any:
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": kind,
        "metadata": {"name": "t"},
        "spec": spec,
    }


def make_inference_service(**more: Any) -> Any:
    predictor = make_batch_object("Job")["spec"]["template"]["spec"]
    predictor["containers"][0].update(readinessProbe={}, livenessProbe={})
    spec = {"predictor": predictor, **more}
    return {
        "apiVersion": "serving.kserve.io/v1beta1",
        "kind": "InferenceService",
        "metadata": {"name": "s"},
        "spec": spec,
    }


# kinds of objects that the test cluster does not know
OTHER_OBJECTS = {
    "InferenceService": make_inference_service,
    "TrainingRuntime": lambda: make_trainer_object("TrainingRuntime", **make_job_set()),
    "ClusterTrainingRuntime": lambda: make_trainer_object(
        "ClusterTrainingRuntime", **make_job_set()
    ),
    "TrainJob": lambda: make_trainer_object(
        "TrainJob", trainer={"image": PINNED_IMAGE, "args": ["x"]}, runtimeRef={"name": "t"}
    ),
}


INVALID_OBJECTS: dict[str, tuple[str, Callable[[Any], Any], str, str]] = {
    "gone": ("PyTorchJob", lambda j: j.update(kind="MXJob"), "kind", "MXNet is retired"),
    "container": (
        "PyTorchJob",
        lambda j: find_pod(j)["containers"][0].update(name="torch"),
        "job",
        'called "pytorch"',
    ),
    "tf container": (
        "TFJob",
        lambda j: find_worker(j)["template"]["spec"]["containers"][0].pop("name"),
        "job",
        '"tensorflow"',
    ),
    "no container": (
        "MPIJob",
        lambda j: find_worker(j)["template"].pop("spec"),
        "job",
        "needs a container",
    ),
    "no image": (
        "MPIJob",
        lambda j: find_worker(j)["template"]["spec"]["containers"][0].pop("image"),
        "job",
        "an image",
    ),
    "two masters": (
        "PyTorchJob",
        lambda j: j["spec"]["pytorchReplicaSpecs"]["Master"].update(replicas=2),
        "job",
        "Master.replicas: replicas is 2",
    ),
    "unsaid": (
        "PyTorchJob",
        lambda j: j["spec"]["pytorchReplicaSpecs"]["Master"].pop("replicas"),
        "job",
        "is missing",
    ),
    "type": (
        "PyTorchJob",
        lambda j: j["spec"]["pytorchReplicaSpecs"].update(worker=find_worker(j)),
        "job",
        'mean "Worker"',
    ),
    "no replicas": (
        "PyTorchJob",
        lambda j: j["spec"].pop("pytorchReplicaSpecs"),
        "job",
        "needs a Worker",
    ),
    "no master": (
        "XGBoostJob",
        lambda j: j["spec"]["xgbReplicaSpecs"].pop("Master"),
        "job",
        "needs a Master",
    ),
    "no workers": ("PyTorchJob", lambda j: find_worker(j).update(replicas=0), "job", "at least 1"),
    "chief and master": (
        "TFJob",
        lambda j: j["spec"]["tfReplicaSpecs"].update(Master=find_worker(j)),
        "job",
        "names of the same role",
    ),
    "restart": (
        "JAXJob",
        lambda j: find_worker(j).update(restartPolicy="Sometimes"),
        "job",
        "must be one of Always, OnFailure",
    ),
    "rdzvConf": (
        "PyTorchJob",
        lambda j: set_elastic_policy(j, rdzvConf=[]),
        "job",
        "crashes the operator",
    ),
    "standalone": (
        "PyTorchJob",
        lambda j: set_elastic_policy(j, standalone=True),
        "job",
        "torchrun cannot parse",
    ),
    "processes": (
        "PyTorchJob",
        lambda j: set_elastic_policy(j, nProcPerNode=2) or j["spec"].update(nprocPerNode="2"),
        "job",
        "remove nProcPerNode",
    ),
    "elastic master": (
        "PyTorchJob",
        lambda j: set_elastic_policy(j) or j["spec"]["pytorchReplicaSpecs"].pop("Worker"),
        "job",
        "needs a Worker",
    ),
    "job name": ("TFJob", lambda j: j["metadata"].update(name="a" * 54), "name", "at most 53"),
    "job letter": (
        "TFJob",
        lambda j: j["metadata"].update(name="1a"),
        "name",
        "begin with a letter",
    ),
    "no name": ("Deployment", lambda j: j["metadata"].clear(), "name", "the name is missing"),
    "cron name": ("CronJob", lambda j: j["metadata"].update(name="a" * 53), "name", "at most 52"),
    "label": ("Job", lambda j: j["metadata"].update(labels={"a": "b" * 64}), "name", "63 letters"),
    "label's type": ("Job", lambda j: j["metadata"].update(labels={"a": 1}), "name", "a text"),
    "container name": (
        "Job",
        lambda j: find_pod(j)["containers"][0].update(name="a_b"),
        "name",
        "dashes",
    ),
    "port name": (
        "Deployment",
        lambda j: find_pod(j)["containers"][0].update(ports=[{"name": "a" * 16}]),
        "name",
        "at most 15",
    ),
    "job restarts": (
        "Job",
        lambda j: find_pod(j).pop("restartPolicy"),
        "job",
        "OnFailure or Never",
    ),
    "failure policy": (
        "Job",
        lambda j: (
            j["spec"].update(podFailurePolicy={}) or find_pod(j).update(restartPolicy="OnFailure")
        ),
        "job",
        "Never",
    ),
    "two jobs of a name": (
        "JobSet",
        lambda j: j["spec"]["replicatedJobs"].extend(j["spec"]["replicatedJobs"]),
        "job",
        "different names",
    ),
    "no jobs": ("JobSet", lambda j: j["spec"]["replicatedJobs"].clear(), "job", "must have jobs"),
    "no such job": (
        "JobSet",
        lambda j: j["spec"].update(successPolicy={"targetReplicatedJobs": ["lead"]}),
        "job",
        "names lead",
    ),
    "no such action": (
        "JobSet",
        lambda j: j["spec"].update(failurePolicy={"rules": [{"action": "Retry"}]}),
        "job",
        '"Retry" must be one of',
    ),
    "restarts of a set": (
        "JobSet",
        lambda j: find_node_pod(j).update(restartPolicy="Always"),
        "job",
        "OnFailure or Never",
    ),
    "pods stay": (
        "TFJob",
        lambda j: j["spec"]["runPolicy"].update(cleanPodPolicy="Some"),
        "job",
        "must be one of None",
    ),
    "shape": ("CronJob", lambda j: find_pod(j).update(containers={}), "shape", "must be a list"),
    "no schedule": (
        "CronJob",
        lambda j: j["spec"].pop("schedule"),
        "shape",
        "schedule: the field is missing",
    ),
    "no selector": (
        "Deployment",
        lambda j: j["spec"].pop("selector"),
        "shape",
        "selector: the field is missing",
    ),
    "other pods": (
        "Deployment",
        lambda j: j["spec"]["selector"].update(matchLabels={"app": "other"}),
        "name",
        "the pods have 'plain'",
    ),
    "no such pods": (
        "Deployment",
        lambda j: j["spec"]["template"].update(metadata={}),
        "name",
        "the pods have no such label",
    ),
    "no target": (
        "HorizontalPodAutoscaler",
        lambda j: j["spec"].pop("scaleTargetRef"),
        "shape",
        "scaleTargetRef",
    ),
}
