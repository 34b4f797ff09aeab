"""The group `promote`, which verifies and promotes a release, and the tasks after this group, which
switch clients to the release and remove expired and failed servers."""

from collections.abc import Iterable
from typing import Any

from hera.workflows import Parameter
from hera.workflows import models as m

from rekindle.blocks.container import retries
from rekindle.blocks.dependencies import FAILURES, after_all, after_any
from rekindle.blocks.manifest.quoting import quote_word
from rekindle.blocks.recipe.servers import Servers, deployment_manifest
from rekindle.blocks.resource import apply
from rekindle.blocks.serving import canary as canaries
from rekindle.blocks.serving.route import http_route
from rekindle.blocks.serving.switch import switch_dag
from rekindle.blocks.wiring import (
    Block,
    Condition,
    Outputs,
    Value,
    find_provider,
    resolve_missing,
    to_expression,
)
from rekindle.blocks.workflow import (
    WORKFLOW_FAILED,
    at_exit,
    current_pipeline,
    nested_dag,
    repeat,
    step,
)
from rekindle.release.serve_config import CHAMPION_CHANGED, PASSED

# kinds of the objects that `deploy` creates; all of them have the same name
SERVER_KINDS = "deployment,service"
# outputs of the group `promote`
GROUP_OUTPUTS = ("promoted", "max_difference", "replayed", "former", "running", "expired")
# maximum number of evaluations that are repeated because the champion has changed
MAX_REPETITIONS = 5


def add_promotion(deployed: Block, servers: Servers, values: dict[str, Any], task: str) -> Block:
    """Add the group that verifies the new servers, using the inputs `values`, and then promotes the
    model."""
    suffix = task.removeprefix("verify").removeprefix("-")
    name = current_pipeline().reserve_name(f"promote-{suffix}" if suffix else "", "promote")
    with nested_dag(name, after=[deployed.name]) as promotion:
        kinds = _add_attempt(deployed, servers, values, task)

    path = f"tasks.{promotion.name}.outputs.parameters"
    outputs = {result: Value(result, f"{path}.{result}", kind) for result, kind in kinds.items()}
    promotion.outputs = Outputs(promotion.name, outputs)

    return promotion.follow(deployed)


def _add_attempt(
    deployed: Block, servers: Servers, values: dict[str, Any], task: str
) -> dict[str, Any]:
    """Add to the active group the tasks that verify and promote a release; return the names and
    types of the group's outputs.

    If the champion has changed, the group repeats the evaluation and, if the new verdict is
    `release`, calls itself.
    """
    pipeline = current_pipeline()
    scope = pipeline.current_scope()
    evaluation = _find_evaluation(deployed)
    limits = {
        "champion": values["champion"],
        "repetitions": str(MAX_REPETITIONS if evaluation else 0),
    }
    values = values | {
        name: pipeline.pass_to_group(scope, name, value) for name, value in limits.items()
    }

    inputs = dict(values)
    if servers.serve.canary:
        inputs["promote"] = False
    first = last = step("steps.verify", task=task, inputs=inputs).follow(deployed)

    canary = None
    if servers.serve.canary:
        canary = _add_canary(servers, first, can_repeat=bool(evaluation))
        last = _verify_again(first, canary, values)

    results = _group_outputs(last)
    kinds = {name: result.kind for name, result in results.items()}
    expressions = {name: result.expression for name, result in results.items()}
    if evaluation:
        expressions = _repeat_evaluation(evaluation, last, expressions)

    if canary:
        passed = _not_rolled_back_condition(canary).text
        expressions = {
            name: f"{passed} ? ({expressions[name]}) : {result.expression}"
            for name, result in _group_outputs(first).items()
        }

    scope.dag.outputs = [
        Parameter(name=name, value_from=m.ValueFrom(expression=expression))
        for name, expression in expressions.items()
    ]
    return kinds


def _group_outputs(verification: Block) -> dict[str, Value]:
    return {name: getattr(verification.outputs, name) for name in GROUP_OUTPUTS}


def _find_evaluation(block: Block) -> Block | None:
    """Return the block that evaluated the model; None if this block also creates the model, so that
    it cannot be repeated."""
    evaluation = find_provider(block, "verdict")
    can_repeat = (
        evaluation and "champion" in evaluation.outputs and "model" not in evaluation.outputs
    )
    if can_repeat:
        return evaluation
    return None


def _verify_again(first_verification: Block, canary: Block, values: dict[str, Any]) -> Block:
    """Add the second verification, which follows the rollout of a canary and promotes the
    release."""
    if first_verification.name.startswith("verify"):
        suffix = first_verification.name.removeprefix("verify")
    else:
        suffix = f"-{first_verification.name}"

    again = step(
        "steps.verify",
        task=f"verify-again{suffix}",
        inputs=values | {"canary": canary.outputs.canary},
        when=_not_rolled_back_condition(canary),
    )
    return again.follow(canary)


def _repeat_evaluation(
    evaluation: Block, verification: Block, expressions: dict[str, str]
) -> dict[str, str]:
    """Add the tasks that repeat the evaluation, and then the group, if the champion has changed.
    Return expressions for the outputs of the last repetition."""
    promoted = verification.outputs.promoted
    again = repeat(evaluation, when=promoted == False)  # noqa: E712
    # require Succeeded, because the evaluation must not be repeated if the verification was skipped
    again.waits_for = after_all([f"{verification.name}.Succeeded"])

    following = current_pipeline().repeat_group(again)
    is_last = f"{promoted.expression} == 'true' || {again.outputs.verdict.expression} != 'release'"
    return {
        name: f"{is_last} ? {expression} : "
        + to_expression(f"tasks.{following.name}.outputs.parameters.{name}")
        for name, expression in expressions.items()
    }


def _not_rolled_back_condition(canary: Block) -> Condition:
    """Return a condition that holds if the canary was not rolled back, that is, if it passed or
    ended because the champion changed."""
    return (canary.outputs.canary == PASSED) | (canary.outputs.canary == CHAMPION_CHANGED)


def _add_canary(servers: Servers, verification: Block, can_repeat: bool) -> Block:
    """Add the rollout of a canary, which increases the candidate's share of the requests as long as
    the candidate is as good as the champion. Output: canary."""
    pipeline = current_pipeline()
    template = canaries.rollout_dag(
        pipeline.template_name,
        pipeline.step_template("steps.canary", "canary"),
        servers.model,
        servers.serve,
        deployment_manifest(servers.model, pipeline.config.cluster, servers.serve),
        can_repeat,
    )
    values = {
        **resolve_missing(verification, {}, "model_uri", "version", "champion", "run_id", "former"),
        "server": servers.name,
        "percent": "0",
    }

    name = pipeline.reserve_name("", "canary")
    block = pipeline.add_task(name, template, values).follow(verification)
    outcome = Value("canary", f"tasks.{name}.outputs.parameters.canary", str)
    block.outputs = Outputs(name, {"canary": outcome})
    _add_unshare_task(servers, f"{servers.name}-canary", [name], when=outcome != PASSED)

    # an exit task ends the candidate's share of the requests if the workflow is stopped during the
    # rollout
    with at_exit():
        _add_unshare_task(
            servers, f"-l={canaries.WORKFLOW}={{{{workflow.name}}}}", when=WORKFLOW_FAILED
        )

    return block


def _add_unshare_task(
    servers: Servers, name_or_selector: str, after: Iterable[str] = (), **options: object
) -> None:
    """Add a task that stops sending requests to the candidates. `name_or_selector`: name or label
    selector of their Deployments."""
    pipeline = current_pipeline()
    if not (servers.serve.canary and servers.serve.canary.gateway):
        pipeline.add_deletion("unshare", "deployment", name_or_selector, after, **options)
        return

    templates = pipeline.unshare_templates
    if servers.model not in templates:
        unshared = http_route(servers.model, servers.serve)
        name = pipeline.template_name("unshare")
        templates[servers.model] = apply(name, unshared, retry=retries(2))

    pipeline.add_task(
        pipeline.reserve_name("", "unshare"), templates[servers.model], {}, options, after
    )


def switch_clients(deployed: Block, servers: Servers, promotion: Block) -> None:
    """Add the tasks after a promotion, which switch clients to the new servers, scale earlier
    servers to zero, and delete expired and failed servers."""
    pipeline = current_pipeline()
    champion = pipeline.step_template("steps.champion", "champion")
    template = switch_dag(pipeline.template_name, champion, servers.model, servers.serve)
    values = {"server": servers.name, "running": promotion.outputs.running}
    task = pipeline.add_task(
        pipeline.reserve_name("", "switch"), template, values, after=[promotion.name]
    ).name

    if servers.serve.canary:
        _add_unshare_task(servers, f"{servers.name}-canary", [task])

    champion_server = f"'{{{{tasks.{task}.outputs.parameters.deployment}}}}'"
    pipeline.add_deletion(
        "expire",
        SERVER_KINDS,
        "{{item}}",
        [task],
        with_param=promotion.outputs.expired,
        when=quote_word(f"{champion_server} == '{servers.name}'"),
    )

    # the candidate may be an earlier release that a rollback has just made the champion
    is_refused = quote_word(
        f"{champion_server} != '{servers.name}' && '{promotion.outputs.promoted}' == 'false'"
    )
    pipeline.add_deletion("take-back", SERVER_KINDS, servers.name, [task], when=is_refused)

    withdraw = pipeline.add_deletion("withdraw", SERVER_KINDS, servers.name)
    withdraw.waits_for = after_any([deployed.name, promotion.name], FAILURES)
    pipeline.current_scope().guarded += [promotion.name, task]
