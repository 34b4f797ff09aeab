"""Labels of the Kubernetes objects that Rekindle creates; commands find runs and servers by these
labels."""

NAME_LABEL = "app.kubernetes.io/name"  # of a run: its pipeline; of an object that serves: its model
INSTANCE_LABEL = "app.kubernetes.io/instance"  # Deployment of a pod
COMPONENT_LABEL = "app.kubernetes.io/component"
PART_OF_LABEL = "app.kubernetes.io/part-of"
PART_OF_REKINDLE = {PART_OF_LABEL: "rekindle"}
REKINDLE_SELECTOR = f"{PART_OF_LABEL}=rekindle"
