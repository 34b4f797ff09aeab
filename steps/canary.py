"""Watch a release that gets a part of the traffic, and say whether it does as well as what serves.

    rekindle step steps.canary --name=demo --version=4 --champion=3 --server=demo-9f2c-1a --former=demo-77ab-1a \\
        --percent=5 --rule='{"steps": [5, 100], "minutes": 1}'

Errors, seconds and predictions of both come from their servers' /metrics. A candidate that does worse is no failure of
the step: it says `taken back`, and why, and the pipeline takes its traffic away. The tests, and how much traffic they
need: docs/serving.md.
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
    percent: int = Field(description="of the traffic that the candidate gets now")
    rule: CanaryConfig = Field(description="what it must hold to, the config's serve.canary")
    before: str = Field(default="passed", description="how its step with less traffic ended")
    run_id: str = Field(default="", description="MLflow run to record it on (empty: none)")


class Outputs(StepOutputs):
    canary: str = Field(description="passed, or `taken back: ` and why")


def run(inputs: Inputs) -> Outputs:
    """Compare until the step is over or the candidate is worse."""
    from rekindle import tracking
    from rekindle.errors import say
    from rekindle.release.watch.canary import Canary

    if inputs.before != "passed" or not (inputs.former and inputs.champion):
        return Outputs(canary=inputs.before)
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
    return Outputs(canary=f"taken back: {reason}" if reason else "passed")
