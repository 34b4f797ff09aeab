"""The program that the user called: argolocal or rekindle. Its name is part of messages,
environment variables and the path of the home."""

POD = "ARGOLOCAL_POD"  # environment variable of a pod's processes: path of the pod's root folder
# environment variable: path of the container's termination message
TERMINATION_LOG = "ARGOLOCAL_TERMINATION_LOG"
name = "argolocal"
cluster = "argolocal.runner.cluster:LocalCluster"


def use(program: str, cluster_class: str) -> None:
    """Set the name and the cluster class (MODULE:NAME) of a program that is built on argolocal."""
    global name, cluster
    name = program
    cluster = cluster_class


def variable(suffix: str) -> str:
    """Return the name of an environment variable of the program: "HOME" → ARGOLOCAL_HOME."""
    return f"{name.upper()}_{suffix}"
