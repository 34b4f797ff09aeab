"""The program that the user started: argolocal or rekindle. The name of the program appears in
messages, in the names of environment variables and in the path of the home, the directory of all
runs."""

# name of the environment variable that tells a pod's processes the path of the pod's root folder
POD_VARIABLE = "ARGOLOCAL_POD"
# name of the environment variable with the path of the container's termination message
TERMINATION_LOG_VARIABLE = "ARGOLOCAL_TERMINATION_LOG"
name = "argolocal"
# MODULE:NAME of the class of the local cluster
cluster = "argolocal.runner.cluster:LocalCluster"


def set_program(program_name: str, cluster_class: str) -> None:
    """Set the name and the cluster class (MODULE:NAME) of a program that is built on argolocal."""
    global name, cluster
    name = program_name
    cluster = cluster_class


def environment_variable(suffix: str) -> str:
    """Return the name of an environment variable of the program: "HOME" → ARGOLOCAL_HOME."""
    return f"{name.upper()}_{suffix}"
