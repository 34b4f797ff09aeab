"""The fields in which the answers of `argolocal server` differ from the answers of a real Argo
server.

`test_recorded_calls` fails for any other difference, and for a listed difference that no longer
exists.
"""

from typing import NamedTuple


class Difference(NamedTuple):
    """A difference in some fields of some answers. `titles` and `path`: regular expressions for the
    titles of calls and for the path of a field."""

    reason: str
    path: str
    titles: str = ".*"
    depends_on_time: bool = False


# the server answers before the workflow has changed, so a server may still show the earlier state
ACTIONS = "resume|set phase|stop|suspend|terminate|retry with parameters|submit a template|submit a schedule"

DIFFERENCES = [
    Difference("each object has its kind", r"^body\.(items\[\d+\]\.)?(apiVersion|kind)$"),
    Difference("Kubernetes records who changed a field", r"\.managedFields\["),
    Difference("the name of the machine", r"\.hostNodeName$"),
    Difference("estimated use of the pods' resources", r"\.resourcesDuration\."),
    Difference("the controller's artifact repository", r"\.artifactRepositoryRef\."),
    Difference("the controller's collection of artifacts", r"\.artifactGCStatus\."),
    Difference(
        "messages of the validation say more",
        r"^body\.message$",
        "create without entrypoint|create unknown template|lint unknown tag|list bad selector",
    ),
    Difference(
        "a manifest that lint refuses is an error of the request",
        r"^(status|body\.code)$",
        "lint unknown tag",
    ),
    Difference("lint adds the namespace", r"^body\.metadata\.namespace$", "lint .*"),
    Difference("the state at the moment of an action", r"^body\.status\.", ACTIONS, True),
    Difference(
        "the labels and annotations at the moment of an action",
        r"^body\.metadata\.(labels\.workflows\.argoproj\.io/(completed|phase)|"
        r"annotations\.workflows\.argoproj\.io/pod-name-format)$",
        ACTIONS,
        True,
    ),
    Difference(
        "runs that end at nearly the same time may change places",
        r"^body\.items\[",
        "list prefix",
        True,
    ),
]
