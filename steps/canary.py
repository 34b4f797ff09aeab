"""Watch a release that gets a part of the traffic, and say how large its next part is.

    rekindle step steps.canary --name=demo --version=4 --champion=3 --server=demo-9f2c-1a --former=demo-77ab-1a \\
        --percent=5 --rule='{"steps": [5, 100], "minutes": 1}'

Errors, seconds and predictions of both come from their servers' /metrics. A candidate that does worse is no failure of
the step: it says `taken back`, and why, and the pipeline takes its traffic away. A step that is repeated watches the
same share. The tests, and how much traffic they need: docs/serving.md.
"""

from pydantic import Field

from rekindle import StepInputs, StepOutputs
from rekindle.release.config import CanaryConfig


class Inputs(StepInputs):
    name: str = Field(description="registered model")
    version: str = Field(description="the candidate")
    champion: str = Field(default="", description="the version that serves; empty: none does")
    server: str = Field(description="Deployment of the candidate")
    former: str = Field(default="", description="Deployment of the champion; empty: there is nothing to compare with")
    percent: int = Field(default=0, description="of the traffic that the candidate gets now")
    rule: CanaryConfig = Field(description="what it must hold to, the config's serve.canary")
    servers: int = Field(default=1, ge=1, description="pods of the champion")
    run_id: str = Field(default="", description="MLflow run to record it on (empty: none)")


class Outputs(StepOutputs):
    canary: str = Field(description="passed, or `taken back: ` and why")
    percent: int = Field(description="of the traffic that the candidate gets next; 0: the canary is over")
    replicas: int = Field(description="pods that get about this part; at least one")


def run(inputs: Inputs) -> Outputs:
    """Compare until the share was watched or the candidate is worse; say how large the next one is."""
    compared = inputs.former and inputs.champion
    reason = watch(inputs) if compared and inputs.percent else ""
    percent = inputs.rule.after(inputs.percent) if compared and not reason else 0
    outcome = f"taken back: {reason}" if reason else "passed"
    return Outputs(canary=outcome, percent=percent, replicas=pods(percent, inputs.servers))


def pods(percent: int, servers: int) -> int:
    """Pods that get about this part of the traffic beside `servers` others; a copy of all takes as many as those."""
    return max(1, round(servers * percent / (100 - percent))) if percent < 100 else servers


def watch(inputs: Inputs) -> str:
    """Compare while the candidate has this share; why it is taken back, recorded on the run, or empty."""
    from rekindle import tracking
    from rekindle.errors import say
    from rekindle.release.watch.canary import Canary

    watched = Canary(inputs.name, inputs.former, inputs.server, inputs.version, inputs.champion, inputs.rule)
    reason = watched.observe()
    tags = {"rekindle.canary": f"passed with {inputs.percent} % of the requests"}
    if reason:
        reason = f"version {inputs.version} with {inputs.percent} % of the requests, beside {inputs.champion}: {reason}"
        tags = {"rekindle.canary": "taken back", "verdict": "taken back", "reason": reason}
    if inputs.run_id:
        figures = {f"canary.{inputs.percent}.{name}": value for name, value in watched.figures().items()}
        tracking.log(inputs.run_id, metrics=figures, tags=tags)
    say(reason or tags["rekindle.canary"])
    return reason
