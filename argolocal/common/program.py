"""The program that a user typed: messages, the home folder and environment variables carry its name."""

POD = "ARGOLOCAL_POD"  # environment of a pod's processes, also of those that it leaves behind: its root
TERMINATION_LOG = "ARGOLOCAL_TERMINATION_LOG"  # the same: the file whose text becomes the container's message
name, cluster = "argolocal", "argolocal.runner.cluster:LocalCluster"


def use(program: str, its_cluster: str) -> None:
    """Be another program than `argolocal`, which is built on it; its cluster is the class MODULE:NAME."""
    global name, cluster
    name, cluster = program, its_cluster


def variable(word: str) -> str:
    """The environment variable `word` of the program: ARGOLOCAL_HOME."""
    return f"{name.upper()}_{word}"
