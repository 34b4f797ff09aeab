"""Values that Argo and Kubernetes allow: types of templates and nodes, phases, policies."""

# A template has exactly one of these fields (Template.GetType in Argo's workflow_types.go).
TEMPLATE_TYPES = (
    "container",
    "script",
    "resource",
    "dag",
    "steps",
    "suspend",
    "http",
    "data",
    "containerSet",
    "plugin",
)
# template type → type of its node. Templates of all other types have nodes of the type Pod.
NODE_TYPES = {"dag": "DAG", "steps": "Steps", "suspend": "Suspend", "http": "HTTP"}

# path of the file, in a pod, with the `source` of a script template (ExecutorScriptSourcePath in
# Argo's common.go)
SCRIPT_PATH = "/argo/staging/script"

# Sets of phases of a node (NodePhase.Fulfilled, Completed and FailedOrError in Argo's
# workflow_types.go).
FULFILLED_PHASES = frozenset({"Succeeded", "Failed", "Error", "Skipped", "Omitted"})
COMPLETED_PHASES = frozenset({"Succeeded", "Failed", "Error"})
FAILED_PHASES = frozenset({"Failed", "Error"})

# retryPolicy → phases that are retried
RETRIED_PHASES = {"Always": ("Failed", "Error"), "OnError": ("Error",), "OnFailure": ("Failed",)}
RETRY_POLICIES = (*RETRIED_PHASES, "OnTransientError", "")
# allowed values of artifactGC.strategy
ARTIFACT_GC_STRATEGIES = ("OnWorkflowCompletion", "OnWorkflowDeletion", "Never", "")
# allowed values of fieldPath in a fieldRef
DOWNWARD_API_FIELDS = (
    "metadata.name",
    "metadata.namespace",
    "status.podIP",
    "status.hostIP",
    "spec.nodeName",
)
# apiVersion of Workflow, WorkflowTemplate, CronWorkflow and Argo's other kinds
API_VERSION = "argoproj.io/v1alpha1"
# kinds that argolocal stores with a version, as an API server does
VERSIONED_KINDS = ("WorkflowTemplate", "ClusterWorkflowTemplate", "CronWorkflow")
WORKFLOW_KINDS = ("Workflow", "WorkflowTemplate", "CronWorkflow")
