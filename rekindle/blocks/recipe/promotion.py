"""The group `promote`, which verifies and promotes a release, and the tasks that then switch
clients to it and remove servers."""

from collections.abc import Iterable
from typing import Any

from hera.workflows import Parameter
from hera.workflows import models as m

from rekindle.blocks.container import retries
from rekindle.blocks.dependencies import FAILURES, after_all, after_any
from rekindle.blocks.manifest.quoting import as_word
from rekindle.blocks.recipe.servers import Servers, deployment_of
from rekindle.blocks.resource import apply
from rekindle.blocks.serving import canary as canaries
from rekindle.blocks.serving.route import http_route
from rekindle.blocks.serving.switch import switch
from rekindle.blocks.wiring import (
    Block,
    Condition,
    Outputs,
    Value,
    find_provider,
    resolve_missing,
    to_expression,
)
from rekindle.blocks.workflow import FAILED, at_exit, current, nested, repeat, step
from rekindle.release.serve_config import CHAMPION_CHANGED, PASSED

OBJECTS = "deployment,service"  # kinds of the objects that `deploy` creates under one name
# outputs of the group
RESULTS = ("promoted", "max_difference", "replayed", "former", "running", "expired")
# maximum number of repeated evaluations, because the champion has changed again
MAX_REPETITIONS = 5


def add_promotion(deployed: Block, servers: Servers, values: dict[str, Any], task: str) -> Block:
    """Add the group that verifies the new servers with the inputs `values`, and promotes them."""
    suffix = task.removeprefix("verify").removeprefix("-")
    name = current().name(f"promote-{suffix}" if suffix else "", "promote")
    with nested(name, after=[deployed.name]) as promotion:
        kinds = _attempt(deployed, servers, values, task)

    path = f"tasks.{promotion.name}.outputs.parameters"
    outputs = {result: Value(result, f"{path}.{result}", kind) for result, kind in kinds.items()}
    promotion.outputs = Outputs(promotion.name, outputs)

    return promotion.follow(deployed)


def _attempt(
    deployed: Block, servers: Servers, values: dict[str, Any], task: str
) -> dict[str, Any]:
    """Add the tasks that verify and promote a release to the active group; return the group's
    outputs and their types.

    If the champion has changed, the evaluation is repeated, and the group calls itself if its
    verdict is `release`.
    """
    pipeline = current()
    scope = pipeline.scope()
    evaluation = _find_evaluation(deployed)
    limits = {
        "champion": values["champion"],
        "repetitions": str(MAX_REPETITIONS if evaluation else 0),
    }
    values = values | {name: pipeline.pass_in(scope, name, value) for name, value in limits.items()}

    inputs = dict(values)
    if servers.serve.canary:
        inputs["promote"] = False
    first = last = step("steps.verify", task=task, inputs=inputs).follow(deployed)

    canary = None
    if servers.serve.canary:
        canary = _add_canary(servers, first, can_repeat=bool(evaluation))
        last = _verify_again(first, canary, values)

    results = _results(last)
    kinds = {name: result.kind for name, result in results.items()}
    expressions = {name: result.expression for name, result in results.items()}
    if evaluation:
        expressions = _repeat_evaluation(evaluation, last, expressions)

    if canary:
        passed = _not_rolled_back(canary).text
        expressions = {
            name: f"{passed} ? ({expressions[name]}) : {result.expression}"
            for name, result in _results(first).items()
        }

    scope.dag.outputs = [
        Parameter(name=name, value_from=m.ValueFrom(expression=expression))
        for name, expression in expressions.items()
    ]
    return kinds


def _results(verification: Block) -> dict[str, Value]:
    return {name: getattr(verification.outputs, name) for name in RESULTS}


def _find_evaluation(block: Block) -> Block | None:
    """Return the block whose verdict released a model, or None if it also made the model and cannot
    judge it again."""
    evaluation = find_provider(block, "verdict")
    can_repeat = (
        evaluation and "champion" in evaluation.outputs and "model" not in evaluation.outputs
    )
    if can_repeat:
        return evaluation
    return None


def _verify_again(first: Block, canary: Block, values: dict[str, Any]) -> Block:
    """Add the verification after the rollout, which promotes the release."""
    if first.name.startswith("verify"):
        suffix = first.name.removeprefix("verify")
    else:
        suffix = f"-{first.name}"

    again = step(
        "steps.verify",
        task=f"verify-again{suffix}",
        inputs=values | {"canary": canary.outputs.canary},
        when=_not_rolled_back(canary),
    )
    return again.follow(canary)


def _repeat_evaluation(
    evaluation: Block, verification: Block, expressions: dict[str, str]
) -> dict[str, str]:
    """Evaluate again if the champion has changed, and then run the group again; return the
    expressions of the results of the last repetition."""
    promoted = verification.outputs.promoted
    again = repeat(evaluation, when=promoted == False)  # noqa: E712
    again.waits_for = after_all([f"{verification.name}.Succeeded"])  # and not if it was skipped

    following = current().repeat_group(again)
    is_last = f"{promoted.expression} == 'true' || {again.outputs.verdict.expression} != 'release'"
    return {
        name: f"{is_last} ? {expression} : "
        + to_expression(f"tasks.{following.name}.outputs.parameters.{name}")
        for name, expression in expressions.items()
    }


def _not_rolled_back(canary: Block) -> Condition:
    """Return the condition that a canary was not rolled back."""
    return (canary.outputs.canary == PASSED) | (canary.outputs.canary == CHAMPION_CHANGED)


def _add_canary(servers: Servers, verified: Block, can_repeat: bool) -> Block:
    """Increase the candidate's share of the requests while it is as good as the champion. Output:
    canary."""
    pipeline = current()
    template = canaries.rollout(
        pipeline.template_name,
        pipeline.container("steps.canary", "canary"),
        servers.model,
        servers.serve,
        deployment_of(servers.model, pipeline.config.cluster, servers.serve),
        can_repeat,
    )
    values = {
        **resolve_missing(verified, {}, "model_uri", "version", "champion", "run_id", "former"),
        "server": servers.name,
        "percent": "0",
    }

    name = pipeline.name("", "canary")
    block = pipeline.add(name, template, values).follow(verified)
    outcome = Value("canary", f"tasks.{name}.outputs.parameters.canary", str)
    block.outputs = Outputs(name, {"canary": outcome})
    _unshare(servers, f"{servers.name}-canary", [name], when=outcome != PASSED)

    with at_exit():  # in case the workflow is stopped during the rollout
        _unshare(servers, f"-l={canaries.WORKFLOW}={{{{workflow.name}}}}", when=FAILED)

    return block


def _unshare(servers: Servers, candidates: str, after: Iterable[str] = (), **options: Any) -> None:
    """End the share of the requests that `candidates` get: names or labels of their Deployments."""
    pipeline = current()
    if not (servers.serve.canary and servers.serve.canary.gateway):
        pipeline.delete("unshare", "deployment", candidates, after, **options)
        return

    templates = pipeline.unshare_templates
    if servers.model not in templates:
        unshared = http_route(servers.model, servers.serve)
        name = pipeline.template_name("unshare")
        templates[servers.model] = apply(name, unshared, retry=retries(2))

    pipeline.add(pipeline.name("", "unshare"), templates[servers.model], {}, options, after)


def switch_clients(deployed: Block, servers: Servers, promotion: Block) -> None:
    """Add the tasks after a promotion: switch clients to the new servers, scale earlier servers to
    zero, delete expired and failed servers."""
    pipeline = current()
    champion = pipeline.container("steps.champion", "champion")
    template = switch(pipeline.template_name, champion, servers.model, servers.serve)
    values = {"server": servers.name, "running": promotion.outputs.running}
    task = pipeline.add(pipeline.name("", "switch"), template, values, after=[promotion.name]).name

    if servers.serve.canary:
        _unshare(servers, f"{servers.name}-canary", [task])

    champion_server = f"'{{{{tasks.{task}.outputs.parameters.deployment}}}}'"
    pipeline.delete(
        "expire",
        OBJECTS,
        "{{item}}",
        [task],
        with_param=promotion.outputs.expired,
        when=as_word(f"{champion_server} == '{servers.name}'"),
    )

    # the candidate may be an earlier release that a rollback has just made the champion
    is_refused = as_word(
        f"{champion_server} != '{servers.name}' && '{promotion.outputs.promoted}' == 'false'"
    )
    pipeline.delete("take-back", OBJECTS, servers.name, [task], when=is_refused)

    withdraw = pipeline.delete("withdraw", OBJECTS, servers.name)
    withdraw.waits_for = after_any([deployed.name, promotion.name], FAILURES)
    pipeline.scope().guarded += [promotion.name, task]
