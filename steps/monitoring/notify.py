"""Tell people how the workflow ended: the last task of every pipeline whose config has `notify`.

    NOTIFY_URL=https://hooks.example.com/... rekindle step steps.monitoring.notify --workflow=demo-x7k2p \\
        --status=Failed --experiment=demo --format=slack

It is told what failed, that the gate kept the champion, or which version was released; a run that somebody stopped, and
one that trained the champion again, are nothing to tell. Whether the message arrives changes nothing for the run.
"""

from collections.abc import Mapping

from pydantic import Field

from rekindle.notify import Message, NotifyConfig, reasons, send, status, verdicts
from rekindle.step import StepInputs, StepOutputs

SHOWN = 5  # failures in a message


class Inputs(StepInputs, NotifyConfig):
    workflow: str = Field(description="name of the workflow")
    status: str = Field(description="{{workflow.status}}: Succeeded, Failed or Error")
    failures: str = Field(default="", description="{{workflow.failures}}: JSON list of the nodes that failed")
    experiment: str = Field(default="rekindle", description="name of the pipeline, and MLflow experiment of its run")
    attempts: int = Field(default=6, ge=1, description="requests until a webhook that is away is given up")


class Outputs(StepOutputs):
    event: str = Field(description="what there was to tell; empty: nothing")
    sent: bool = Field(description="whether the webhook took it")


def run(inputs: Inputs) -> Outputs:
    """Find out, and tell. Raises nothing that a user could cause."""
    from rekindle import tracking
    from rekindle.errors import TrackingError, say

    tags, link = dict[str, str](), ""
    try:
        if run_id := tracking.find_run(inputs.experiment, inputs.workflow):
            tags, link = tracking.tags_of(run_id), tracking.page(inputs.workflow, inputs.mlflow_url)
    except TrackingError as error:
        say(f"the message lacks what MLflow knows: {error}")
    if not (message := told(inputs, tags, link)):
        return Outputs(event="", sent=False)
    return Outputs(event=message.event, sent=send(message, inputs, inputs.attempts))


def told(inputs: Inputs, tags: Mapping[str, str], link: str) -> Message | None:
    """The message about a run with these tags; None if there is nothing to tell."""
    about = {"name": inputs.experiment, "workflow": inputs.workflow, "link": link}
    lines, judged = reasons(inputs.failures), verdicts(tags)
    if inputs.status != "Succeeded":
        if status(inputs.status, lines) == "KILLED":
            return None
        known = tags.get("rekindle.failures") or "\n".join(line[:900] for line in lines[:SHOWN])
        return Message("failure", text=f"{inputs.workflow} failed.", reason=known, **about)
    if taken := [reason for _, verdict, reason in judged if verdict == "taken back"]:
        return Message("rollback", text=f"{inputs.workflow} was taken back.", reason="\n".join(taken), **about)
    why = "\n".join(f"{part}{reason}" for part, verdict, reason in judged if verdict in ("release", "keep"))
    if promoted := tags.get("rekindle.promoted"):  # MODEL VERSION
        model, _, version = promoted.rpartition(" ")
        return Message("release", text=f"{inputs.workflow} released version {version} of {model}.", reason=why, **about)
    if any(verdict == "keep" for _, verdict, _ in judged):
        return Message("refusal", text=f"{inputs.workflow} released nothing.", reason=why, **about)
    if drift := [reason for _, verdict, reason in judged if verdict == "drift"]:
        return Message("drift", text="what the model sees has changed.", reason="\n".join(drift), **about)
    return None
