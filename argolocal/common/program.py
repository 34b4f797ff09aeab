"""The program in use: argolocal or rekindle. Messages, environment variables and the home's path
contain its name."""

POD = "ARGOLOCAL_POD"  # environment variable of a pod's processes: path of the pod's root folder
# environment variable: path of the container's termination message
TERMINATION_LOG = "ARGOLOCAL_TERMINATION_LOG"
name = "argolocal"
cluster = "argolocal.runner.cluster:LocalCluster"


def use(program: str, cluster_class: str) -> None:
    """Set the program's name and its cluster class (MODULE:NAME), for programs built on
    argolocal."""
    global name, cluster
    name = program
    cluster = cluster_class


def variable(suffix: str) -> str:
    """Return the name of an environment variable of the program: "HOME" → ARGOLOCAL_HOME."""
    return f"{name.upper()}_{suffix}"
