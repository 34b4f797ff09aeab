"""Compare a canary with the champion, and decide which percentage of the traffic the canary gets
next.

    rekindle step steps.canary --name=demo --version=4 --champion=3 --server=demo-9f2c-1a \\
      --former=demo-77ab-1a --percent=5 --rule='{"steps": [5, 100], "minutes": 1}'

The step reads errors, latencies and predictions of both models from /metrics of their servers. If
the candidate is worse, the step succeeds with the result `taken back: REASON`, and the pipeline
rolls the candidate back. If the champion changes, the canary ends, and the pipeline evaluates the
candidate again. If the step is retried, it observes the same percentage of the traffic again.
docs/serving.md describes the comparison and the traffic that it needs.
"""

from math import ceil

from pydantic import Field

from rekindle import StepInputs, StepOutputs
from rekindle.release.serve_config import CHAMPION_CHANGED, PASSED, CanaryConfig


class Inputs(StepInputs):
    name: str = Field(description="name of the registered model")
    version: str = Field(description="version of the candidate")
    champion: str = Field(default="", description="version of the champion; empty if none exists")
    server: str = Field(description="Deployment of the candidate")
    former: str = Field(default="", description="Deployment of the champion; empty if none exists")
    percent: int = Field(
        default=0, description="share of the traffic that the candidate gets now, in percent"
    )
    rule: CanaryConfig = Field(
        description="limits for the candidate: section `serve.canary` of the config"
    )
    servers: int = Field(default=1, ge=0, description="number of pods of the champion")
    can_repeat: bool = Field(
        default=False,
        description=(
            "true: the candidate is evaluated again if the champion changes; false: it is rolled"
            " back"
        ),
    )
    run_id: str = Field(
        default="", description="MLflow run for the figures and the result; empty: log nothing"
    )


class Outputs(StepOutputs):
    canary: str = Field(description="`passed`, `champion changed`, or `taken back: REASON`")
    percent: int = Field(
        description=(
            "next share of the traffic for the candidate, in percent; 0: the canary has ended"
        )
    )
    replicas: int = Field(description="number of pods of the candidate for this share; at least 1")


def run(inputs: Inputs) -> Outputs:
    """Compare the models at the canary's current percentage of the traffic, and decide the next
    percentage."""
    has_champion = inputs.former and inputs.champion
    outcome = watch(inputs) if has_champion and inputs.percent else PASSED
    if has_champion and outcome == PASSED:
        percent = inputs.rule.next_share(inputs.percent)
    else:
        percent = 0
    count = count_split_pods if inputs.rule.gateway else count_pods
    return Outputs(canary=outcome, percent=percent, replicas=count(percent, inputs.servers))


def count_pods(percent: int, servers: int) -> int:
    """Return how many candidate pods get about `percent` of the traffic if a Service spreads it
    evenly over them and `servers` champion pods."""
    return max(1, round(servers * percent / (100 - percent)))


def count_split_pods(percent: int, servers: int) -> int:
    """Return how many candidate pods `percent` of the traffic needs if `servers` champion pods can
    serve all of it."""
    return max(1, ceil(servers * percent / 100))


def watch(inputs: Inputs) -> str:
    """Compare the models, log the result to MLflow, and return it."""
    from rekindle import tracking
    from rekindle.errors import say
    from rekindle.release.watch.canary import Canary

    canary = Canary(
        inputs.name, inputs.former, inputs.server, inputs.version, inputs.champion, inputs.rule
    )
    reason = canary.observe()
    outcome = PASSED
    tags = {tracking.CANARY: f"passed with {inputs.percent} % of the requests"}

    if reason:
        reason = (
            f"version {inputs.version} with {inputs.percent} % of the requests, versus"
            f" {inputs.champion}: {reason}"
        )
        outcome = f"taken back: {reason}"
        tags = {tracking.CANARY: "taken back", "verdict": "taken back", "reason": reason}

    if canary.champion_changed and inputs.can_repeat:
        outcome = CHAMPION_CHANGED
        tags = {tracking.CANARY: CHAMPION_CHANGED}

    if inputs.run_id:
        figures = {
            f"canary.{inputs.percent}.{name}": value for name, value in canary.figures().items()
        }
        tracking.log(inputs.run_id, metrics=figures, tags=tags)

    say(reason or tags[tracking.CANARY])
    return outcome
