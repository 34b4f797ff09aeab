"""Compare a canary with the champion, and decide which percentage of the traffic the canary gets
next.

    rekindle step steps.canary --name=demo --version=4 --champion=3 --server=demo-9f2c-1a \\
      --former=demo-77ab-1a --percent=5 --rule='{"steps": [5, 100], "minutes": 1}'

The step reads errors, latencies and predictions of both models from /metrics of their servers. If
the candidate is worse, the step succeeds with a result that starts with `taken back` and contains
the reason, and the pipeline rolls the candidate back. If the champion changes, the canary ends, and
the pipeline evaluates the candidate again. If the step is retried, it observes the same percentage
of the traffic again. docs/serving.md describes the comparison and the traffic that it needs.
"""

from math import ceil

from pydantic import Field

from rekindle import StepInputs, StepOutputs
from rekindle.release.serve_config import CHAMPION_CHANGED_RESULT, PASSED_RESULT, CanaryConfig


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
    canary_outcome = watch(inputs) if has_champion and inputs.percent else PASSED_RESULT
    if has_champion and canary_outcome == PASSED_RESULT:
        next_percent = inputs.rule.next_share(inputs.percent)
    else:
        next_percent = 0
    count_candidate_pods = count_split_pods if inputs.rule.gateway else count_pods
    return Outputs(
        canary=canary_outcome,
        percent=next_percent,
        replicas=count_candidate_pods(next_percent, inputs.servers),
    )


def count_pods(traffic_percent: int, champion_pod_count: int) -> int:
    """Return the number of candidate pods that get about `traffic_percent` of the traffic if a
    Service spreads the traffic evenly over all pods of candidate and champion."""
    return max(1, round(champion_pod_count * traffic_percent / (100 - traffic_percent)))


def count_split_pods(traffic_percent: int, champion_pod_count: int) -> int:
    """Return the number of candidate pods that can serve `traffic_percent` of the traffic, if
    `champion_pod_count` champion pods can serve the whole traffic."""
    return max(1, ceil(champion_pod_count * traffic_percent / 100))


def watch(inputs: Inputs) -> str:
    """Compare candidate and champion, log the result to MLflow, and return the result."""
    from rekindle import tracking
    from rekindle.errors import write_stderr
    from rekindle.release.watch.canary import Canary

    canary_watch = Canary(
        inputs.name, inputs.former, inputs.server, inputs.version, inputs.champion, inputs.rule
    )
    rollback_reason = canary_watch.observe()
    canary_outcome = PASSED_RESULT
    run_tags = {tracking.CANARY: f"passed with {inputs.percent} % of the requests"}

    if rollback_reason:
        rollback_reason = (
            f"version {inputs.version} with {inputs.percent} % of the requests, versus"
            f" {inputs.champion}: {rollback_reason}"
        )
        canary_outcome = f"taken back: {rollback_reason}"
        run_tags = {
            tracking.CANARY: "taken back",
            "verdict": "taken back",
            "reason": rollback_reason,
        }

    if canary_watch.champion_changed and inputs.can_repeat:
        canary_outcome = CHAMPION_CHANGED_RESULT
        run_tags = {tracking.CANARY: CHAMPION_CHANGED_RESULT}

    if inputs.run_id:
        logged_figures = {
            f"canary.{inputs.percent}.{figure_name}": figure_value
            for figure_name, figure_value in canary_watch.figures().items()
        }
        tracking.log_to_run(inputs.run_id, run_metrics=logged_figures, run_tags=run_tags)

    write_stderr(rollback_reason or run_tags[tracking.CANARY])
    return canary_outcome
