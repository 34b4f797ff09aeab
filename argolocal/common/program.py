"""The program in use: argolocal or rekindle. Messages, environment variables and the home's path contain its name."""

POD = "ARGOLOCAL_POD"  # environment variable of a pod's processes: path of the pod's root folder
TERMINATION_LOG = "ARGOLOCAL_TERMINATION_LOG"  # environment variable: path of the container's termination message
name, cluster = "argolocal", "argolocal.runner.cluster:LocalCluster"


def use(program: str, cluster_class: str) -> None:
    """Set the program's name and its cluster class (MODULE:NAME), for programs built on argolocal."""
    global name, cluster
    name, cluster = program, cluster_class


def variable(suffix: str) -> str:
    """Return the name of an environment variable of the program: "HOME" → ARGOLOCAL_HOME."""
    return f"{name.upper()}_{suffix}"
