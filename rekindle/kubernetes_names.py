"""Names in the Kubernetes objects that Rekindle creates: labels, the ConfigMap, Secrets, the
environment variables of pods, and the modules that the pods of an elastic job run."""

from typing import NamedTuple

# commands find runs and servers by these labels
NAME_LABEL = "app.kubernetes.io/name"  # value: the pipeline of a run, or the model of servers
# the value of the label is the name of a pod's Deployment
INSTANCE_LABEL = "app.kubernetes.io/instance"
COMPONENT_LABEL = "app.kubernetes.io/component"
PART_OF_LABEL = "app.kubernetes.io/part-of"
PART_OF_REKINDLE = {PART_OF_LABEL: "rekindle"}
REKINDLE_SELECTOR = f"{PART_OF_LABEL}=rekindle"

# name of the pod and of the job that `rekindle doctor` creates
DOCTOR_NAME = "rekindle-doctor"
# ConfigMap with the addresses of the object store and MLflow
CONFIG_MAP = "rekindle"
# Secret with the keys of the object store and the login of MLflow
STORE_SECRET = "rekindle-s3"
# Secret with keys that can only read releases
SERVING_SECRET = "rekindle-serving"
# name of the ServiceAccount of model servers
SERVING_ACCOUNT = "rekindle-serving"
# Secret with the tokens for clients of model servers
TOKEN_SECRET = "rekindle-token"
# Secret with the variables in `program.secrets`
PROGRAM_SECRET = "rekindle-program"
# Secret with the address of the notification webhook
NOTIFY_SECRET = "rekindle-notify"

# keys in the ConfigMap and the Secrets, which become environment variables of pods
S3_BUCKET = "S3_BUCKET"
S3_ENDPOINT_URL = "S3_ENDPOINT_URL"
AWS_ACCESS_KEY_ID = "AWS_ACCESS_KEY_ID"
AWS_SECRET_ACCESS_KEY = "AWS_SECRET_ACCESS_KEY"  # nosec B105
MLFLOW_TRACKING_URI = "MLFLOW_TRACKING_URI"
MLFLOW_TRACKING_TOKEN = "MLFLOW_TRACKING_TOKEN"  # nosec B105
MLFLOW_TRACKING_USERNAME = "MLFLOW_TRACKING_USERNAME"
MLFLOW_TRACKING_PASSWORD = "MLFLOW_TRACKING_PASSWORD"  # nosec B105
NOTIFY_URL = "NOTIFY_URL"
REKINDLE_TOKEN = "REKINDLE_TOKEN"  # nosec B105

# environment variables of only some pods
KUBERNETES_SERVICE_HOST = "KUBERNETES_SERVICE_HOST"  # set by Kubernetes
POD_IP = "POD_IP"
# in the environment of a worker process, the launcher appends the worker's index to the name of the
# pod
POD_NAME = "POD_NAME"
# directory for copies of datasets; its disk must be large enough for them
REKINDLE_CACHE = "REKINDLE_CACHE"
# checkpoint folder of a training program
REKINDLE_CHECKPOINTS = "REKINDLE_CHECKPOINTS"
# kind of nodes that a worker runs on: `spot` or `on-demand`
REKINDLE_CAPACITY = "REKINDLE_CAPACITY"
SPOT_CAPACITY = "spot"
ON_DEMAND_CAPACITY = "on-demand"
# host name of the coordinator in jobs of other frameworks, whose programs use MASTER_ADDR for their
# own processes
REKINDLE_COORDINATOR = "REKINDLE_COORDINATOR"
# end times of the steps before the job, in the format of RFC 3339, separated by commas; the job
# could be created from the last of these times on
REKINDLE_CREATED = "REKINDLE_CREATED"
# maximum duration of the run in seconds
REKINDLE_DEADLINE = "REKINDLE_DEADLINE"
# seconds between SIGTERM and SIGKILL
REKINDLE_GRACE = "REKINDLE_GRACE"
# set in the pods of extra workers on idle capacity
REKINDLE_HARVESTED = "REKINDLE_HARVESTED"
# the pod's image, if it is pinned by digest
REKINDLE_IMAGE = "REKINDLE_IMAGE"
# path of the job in the Kubernetes API, for a coordinator that may change the job
REKINDLE_JOB = "REKINDLE_JOB"
# port of the coordinator's metrics
REKINDLE_METRICS = "REKINDLE_METRICS"
# the cloud whose preemption notices a worker polls
REKINDLE_NOTICE = "REKINDLE_NOTICE"
# Deployment of workers on on-demand nodes, which the coordinator scales
REKINDLE_ON_DEMAND = "REKINDLE_ON_DEMAND"
# seconds without enough workers on spot nodes, after which the coordinator scales the Deployment
REKINDLE_ON_DEMAND_AFTER = "REKINDLE_ON_DEMAND_AFTER"
# number of workers in each pod of the Deployment
REKINDLE_POD_WORKERS = "REKINDLE_POD_WORKERS"
# rank of the first pod of a role, in a job of another framework
REKINDLE_ROLE_RANK = "REKINDLE_ROLE_RANK"
REKINDLE_SECRET = "REKINDLE_SECRET"  # nosec B105  # shared by all processes of a run
# set if the program of a pod, such as a parameter server, does not end by itself
REKINDLE_SERVER = "REKINDLE_SERVER"


class MemberModules(NamedTuple):
    """The modules that the pods of an elastic job run. `launcher`: first process in a worker's pod;
    `coordinator`: process in the coordinator's pod. The launcher and the coordinator get the inputs
    of the step module `step` as flags."""

    step: str
    launcher: str
    coordinator: str


def _join_module_names(*name_parts: str) -> str:
    # the name is joined from parts, because the cache key counts a text that names a module as an
    # import
    return ".".join(("rekindle", *name_parts))


WORKLOAD_MODULES = MemberModules(
    "steps.train",
    _join_module_names("training", "launch", "launcher"),
    _join_module_names("training", "membership", "server"),
)
PROGRAM_MODULES = MemberModules(
    "steps.program",
    _join_module_names("program", "agent"),
    _join_module_names("program", "coordinator"),
)
# in a job of another framework, the pod with rank 0 also runs the coordinator
PROGRAM_IN_JOB_MODULES = PROGRAM_MODULES._replace(launcher=_join_module_names("program", "job_pod"))
MEMBER_MODULES = (WORKLOAD_MODULES, PROGRAM_MODULES, PROGRAM_IN_JOB_MODULES)
LAUNCHERS = frozenset(modules.launcher for modules in MEMBER_MODULES)
COORDINATOR_MODULES = frozenset(modules.coordinator for modules in MEMBER_MODULES)
