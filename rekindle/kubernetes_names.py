"""Names in the Kubernetes objects that Rekindle creates: labels, the ConfigMap, Secrets, and the
environment variables of pods."""

# commands find runs and servers by these labels
NAME_LABEL = "app.kubernetes.io/name"  # of a run: its pipeline; of an object that serves: its model
INSTANCE_LABEL = "app.kubernetes.io/instance"  # Deployment of a pod
COMPONENT_LABEL = "app.kubernetes.io/component"
PART_OF_LABEL = "app.kubernetes.io/part-of"
PART_OF_REKINDLE = {PART_OF_LABEL: "rekindle"}
REKINDLE_SELECTOR = f"{PART_OF_LABEL}=rekindle"

DOCTOR = "rekindle-doctor"  # pod and job of `rekindle doctor`
CONFIG_MAP = "rekindle"  # addresses
STORE_SECRET = "rekindle-s3"  # keys of the object store, login of MLflow
SERVING_SECRET = "rekindle-serving"  # keys of the object store that can only read releases
SERVING_ACCOUNT = "rekindle-serving"  # ServiceAccount of model servers
TOKEN_SECRET = "rekindle-token"  # tokens of clients of model servers
NOTIFY_SECRET = "rekindle-notify"  # address of the webhook

# keys of the ConfigMap and the Secrets, which pods get as variables
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

# variables of some pods
KUBERNETES_SERVICE_HOST = "KUBERNETES_SERVICE_HOST"  # set by Kubernetes
POD_IP = "POD_IP"
POD_NAME = "POD_NAME"  # the launcher adds the index of a worker
REKINDLE_CACHE = "REKINDLE_CACHE"  # directory for datasets; its disk must have enough space
REKINDLE_DEADLINE = "REKINDLE_DEADLINE"  # seconds until the coordinator ends the run
REKINDLE_GRACE = "REKINDLE_GRACE"  # seconds between SIGTERM and SIGKILL
REKINDLE_IMAGE = "REKINDLE_IMAGE"  # the pod's image, if it is pinned by digest
REKINDLE_METRICS = "REKINDLE_METRICS"  # port of the coordinator's metrics
REKINDLE_NOTICE = "REKINDLE_NOTICE"  # the cloud whose notices of preemption count
REKINDLE_SECRET = "REKINDLE_SECRET"  # nosec B105  # shared by all processes of a run
