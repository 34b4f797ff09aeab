"""Labels, annotations and other names that Argo and Kubeflow's training operator give to
objects."""

ARGO = "workflows.argoproj.io"
WORKFLOW = f"{ARGO}/workflow"  # label of a pod whose value is the name of the pod's workflow
PHASE = f"{ARGO}/phase"
COMPLETED = f"{ARGO}/completed"
ARCHIVING_STATUS = f"{ARGO}/workflow-archiving-status"
CRON_WORKFLOW = f"{ARGO}/cron-workflow"
WORKFLOW_TEMPLATE = f"{ARGO}/workflow-template"
CLUSTER_WORKFLOW_TEMPLATE = f"{ARGO}/cluster-workflow-template"
CRON_WORKFLOW_COMPLETED = f"{ARGO}/cron-workflow-completed"
LAST_USED_SCHEDULE = "cronworkflows.argoproj.io/last-used-schedule"
CONTROLLER_INSTANCE = f"{ARGO}/controller-instanceid"
# labels with the user who has created an object
CREATOR = (f"{ARGO}/creator", f"{ARGO}/creator-email", f"{ARGO}/creator-preferred-username")
CONFIG_MAP_TYPE = f"{ARGO}/configmap-type"
NODE_ID = f"{ARGO}/node-id"  # annotations
NODE_NAME = f"{ARGO}/node-name"
SCHEDULED_TIME = f"{ARGO}/scheduled-time"  # annotation whose value is {{workflow.scheduledTime}}
DEFAULT_ARTIFACT_REPOSITORY = f"{ARGO}/default-artifact-repository"

# Source: Kubeflow training operator 1.9, pkg/apis/kubeflow.org/v1
JOB_NAME_LABEL = "training.kubeflow.org/job-name"
# label whose value is the replica type in lower case
REPLICA_TYPE_LABEL = "training.kubeflow.org/replica-type"
# Source: Kubeflow Trainer 2.3
TRAINER_STEP_LABEL = "trainer.kubeflow.org/trainjob-ancestor-step"
