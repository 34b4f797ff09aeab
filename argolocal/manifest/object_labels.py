"""Labels, annotations and other names that Argo and Kubeflow's training operator give to
objects."""

ARGO_PREFIX = "workflows.argoproj.io"
# label of a pod whose value is the name of the pod's workflow
WORKFLOW = f"{ARGO_PREFIX}/workflow"
PHASE_LABEL = f"{ARGO_PREFIX}/phase"
COMPLETED_LABEL = f"{ARGO_PREFIX}/completed"
ARCHIVING_STATUS_LABEL = f"{ARGO_PREFIX}/workflow-archiving-status"
CRON_WORKFLOW_LABEL = f"{ARGO_PREFIX}/cron-workflow"
WORKFLOW_TEMPLATE_LABEL = f"{ARGO_PREFIX}/workflow-template"
CLUSTER_WORKFLOW_TEMPLATE = f"{ARGO_PREFIX}/cluster-workflow-template"
CRON_WORKFLOW_COMPLETED = f"{ARGO_PREFIX}/cron-workflow-completed"
LAST_USED_SCHEDULE = "cronworkflows.argoproj.io/last-used-schedule"
CONTROLLER_INSTANCE = f"{ARGO_PREFIX}/controller-instanceid"
# labels with the user who has created an object
CREATOR = (
    f"{ARGO_PREFIX}/creator",
    f"{ARGO_PREFIX}/creator-email",
    f"{ARGO_PREFIX}/creator-preferred-username",
)
CONFIG_MAP_TYPE_LABEL = f"{ARGO_PREFIX}/configmap-type"
NODE_ID_ANNOTATION = f"{ARGO_PREFIX}/node-id"
NODE_NAME_ANNOTATION = f"{ARGO_PREFIX}/node-name"
# annotation with the time for which a schedule started the workflow, also the value of the tag
# {{workflow.scheduledTime}}
SCHEDULED_TIME_ANNOTATION = f"{ARGO_PREFIX}/scheduled-time"
DEFAULT_ARTIFACT_REPOSITORY = f"{ARGO_PREFIX}/default-artifact-repository"

# Taken from Kubeflow training operator 1.9, pkg/apis/kubeflow.org/v1
JOB_NAME_LABEL = "training.kubeflow.org/job-name"
# label whose value is the replica type in lower case
REPLICA_TYPE_LABEL = "training.kubeflow.org/replica-type"
# Taken from Kubeflow Trainer 2.3
TRAINER_STEP_LABEL = "trainer.kubeflow.org/trainjob-ancestor-step"
