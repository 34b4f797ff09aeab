"""The group (nested DAG) `promote`, which verifies and promotes a release, and the tasks after this
group, which switch clients to the release and remove expired and failed servers."""

from collections.abc import Iterable
from typing import Any

from hera.workflows import Parameter
from hera.workflows import models as m

from rekindle.blocks.container import retries
from rekindle.blocks.dependencies import FAILURES, after_all, after_any
from rekindle.blocks.manifest.quoting import quote_word
from rekindle.blocks.recipe.repetition import repeat_group, repeat_step
from rekindle.blocks.recipe.servers import Servers, deployment_manifest
from rekindle.blocks.resource import apply
from rekindle.blocks.serving import canary as canaries
from rekindle.blocks.serving.route import build_http_route
from rekindle.blocks.serving.switch import build_switch_dag
from rekindle.blocks.wiring import (
    Block,
    Condition,
    Outputs,
    Value,
    find_provider,
    resolve_missing_inputs,
    to_expression,
)
from rekindle.blocks.workflow import (
    WORKFLOW_FAILED,
    at_exit,
    current_pipeline,
    nested_dag,
    step,
)
from rekindle.release.serve_config import CHAMPION_CHANGED_RESULT, PASSED_RESULT

# kinds of the objects that the step `deploy` creates for a release; all these objects have the same
# name
SERVER_KINDS = "deployment,service"
# outputs of the group `promote`
GROUP_OUTPUTS = ("promoted", "max_difference", "replayed", "former", "running", "expired")
# maximum number of times that an evaluation is repeated because the champion has changed
MAX_REPETITIONS = 5


def add_promotion(
    deploy_block: Block, servers: Servers, verify_inputs: dict[str, Any], task_name: str
) -> Block:
    """Add the group (nested DAG) that verifies the new servers and then promotes the model; return
    the block of the group. `verify_inputs`: inputs of the step `verify`."""
    name_suffix = task_name.removeprefix("verify").removeprefix("-")
    name = current_pipeline().reserve_name(
        f"promote-{name_suffix}" if name_suffix else "", "promote"
    )
    with nested_dag(name, predecessor_names=[deploy_block.name]) as promotion_block:
        output_types = _add_attempt(deploy_block, servers, verify_inputs, task_name)

    path = f"tasks.{promotion_block.name}.outputs.parameters"
    group_outputs = {
        output_name: Value(output_name, f"{path}.{output_name}", output_type)
        for output_name, output_type in output_types.items()
    }
    promotion_block.outputs = Outputs(promotion_block.name, group_outputs)

    return promotion_block.follow(deploy_block)


def _add_attempt(
    deploy_block: Block, servers: Servers, verify_inputs: dict[str, Any], task_name: str
) -> dict[str, Any]:
    """Add to the active group the tasks that verify and promote a release; return the names and
    types of the group's outputs.

    If the champion has changed, the group repeats the evaluation and, if the new verdict is
    `release`, calls itself.
    """
    pipeline = current_pipeline()
    scope = pipeline.current_scope()
    evaluation = _find_evaluation(deploy_block)
    repetition_inputs = {
        "champion": verify_inputs["champion"],
        "repetitions": str(MAX_REPETITIONS if evaluation else 0),
    }
    verify_inputs = verify_inputs | {
        name: pipeline.pass_to_group(scope, name, value)
        for name, value in repetition_inputs.items()
    }

    step_inputs = dict(verify_inputs)
    if servers.serve.canary:
        step_inputs["promote"] = False
    first_verification = last_verification = step(
        "steps.verify", task=task_name, inputs=step_inputs
    ).follow(deploy_block)

    canary_block = None
    if servers.serve.canary:
        canary_block = _add_canary(servers, first_verification, can_repeat=bool(evaluation))
        last_verification = _verify_again(first_verification, canary_block, verify_inputs)

    group_results = _select_outputs(last_verification)
    output_types = {name: output_value.kind for name, output_value in group_results.items()}
    expressions = {name: output_value.expression for name, output_value in group_results.items()}
    if evaluation:
        expressions = _repeat_evaluation(evaluation, last_verification, expressions)

    if canary_block:
        canary_passed = _not_rolled_back_condition(canary_block).text
        expressions = {
            name: f"{canary_passed} ? ({expressions[name]}) : {output_value.expression}"
            for name, output_value in _select_outputs(first_verification).items()
        }

    scope.dag.outputs = [
        Parameter(name=name, value_from=m.ValueFrom(expression=output_expression))
        for name, output_expression in expressions.items()
    ]
    return output_types


def _select_outputs(verification: Block) -> dict[str, Value]:
    return {name: getattr(verification.outputs, name) for name in GROUP_OUTPUTS}


def _find_evaluation(release_block: Block) -> Block | None:
    """Return the block that evaluated the model; None if the evaluation cannot be repeated, because
    its step also creates the model or has no output `champion`."""
    evaluation = find_provider(release_block, "verdict")
    can_repeat = (
        evaluation and "champion" in evaluation.outputs and "model" not in evaluation.outputs
    )
    if can_repeat:
        return evaluation
    return None


def _verify_again(
    first_verification: Block, canary_block: Block, verify_inputs: dict[str, Any]
) -> Block:
    """Add the second verification, which follows the rollout of a canary and promotes the
    release."""
    if first_verification.name.startswith("verify"):
        name_suffix = first_verification.name.removeprefix("verify")
    else:
        name_suffix = f"-{first_verification.name}"

    second_verification = step(
        "steps.verify",
        task=f"verify-again{name_suffix}",
        inputs=verify_inputs | {"canary": canary_block.outputs.canary},
        when=_not_rolled_back_condition(canary_block),
    )
    return second_verification.follow(canary_block)


def _repeat_evaluation(
    evaluation: Block, verification: Block, output_expressions: dict[str, str]
) -> dict[str, str]:
    """Add the tasks that repeat the evaluation, and then the group `promote`, if the champion has
    changed. Return expressions for the outputs of the last repetition."""
    promoted_output = verification.outputs.promoted
    repeated_evaluation = repeat_step(evaluation, when=promoted_output == False)  # noqa: E712
    # require Succeeded, because the evaluation must not be repeated if the verification was skipped
    repeated_evaluation.waits_for = after_all([f"{verification.name}.Succeeded"])

    repeated_group = repeat_group(repeated_evaluation)
    is_last_condition = (
        f"{promoted_output.expression} == 'true' ||"
        f" {repeated_evaluation.outputs.verdict.expression} != 'release'"
    )
    return {
        name: f"{is_last_condition} ? {output_expression} : "
        + to_expression(f"tasks.{repeated_group.name}.outputs.parameters.{name}")
        for name, output_expression in output_expressions.items()
    }


def _not_rolled_back_condition(canary_block: Block) -> Condition:
    """Return a condition that holds if the canary was not rolled back, that is, if it passed or
    ended because the champion changed."""
    return (canary_block.outputs.canary == PASSED_RESULT) | (
        canary_block.outputs.canary == CHAMPION_CHANGED_RESULT
    )


def _add_canary(servers: Servers, verification: Block, can_repeat: bool) -> Block:
    """Add the rollout of a canary, which increases the candidate's share of the requests while the
    candidate is as good as the champion. The output `canary` is the result of the rollout."""
    pipeline = current_pipeline()
    template = canaries.build_rollout_dag(
        pipeline.make_template_name,
        pipeline.step_template("steps.canary", "canary"),
        servers.model,
        servers.serve,
        deployment_manifest(servers.model, pipeline.config.cluster, servers.serve),
        can_repeat,
    )
    rollout_inputs = {
        **resolve_missing_inputs(
            verification, {}, "model_uri", "version", "champion", "run_id", "former"
        ),
        "server": servers.name,
        "percent": "0",
    }

    name = pipeline.reserve_name("", "canary")
    canary_block = pipeline.add_task(name, template, rollout_inputs).follow(verification)
    canary_outcome = Value("canary", f"tasks.{name}.outputs.parameters.canary", str)
    canary_block.outputs = Outputs(name, {"canary": canary_outcome})
    _add_unshare_task(
        servers, f"{servers.name}-canary", [name], when=canary_outcome != PASSED_RESULT
    )

    # an exit task ends the candidate's share of the requests if the workflow is stopped during the
    # rollout
    with at_exit():
        _add_unshare_task(
            servers,
            f"-l={canaries.CANARY_WORKFLOW_LABEL}={{{{workflow.name}}}}",
            when=WORKFLOW_FAILED,
        )

    return canary_block


def _add_unshare_task(
    servers: Servers,
    name_or_selector: str,
    predecessor_names: Iterable[str] = (),
    **task_options: object,
) -> None:
    """Add a task that ends the candidates' share of the requests: the task restores the route of
    the requests, or deletes the candidates' Deployments. `name_or_selector`: name or label selector
    of these Deployments."""
    pipeline = current_pipeline()
    if not (servers.serve.canary and servers.serve.canary.gateway):
        pipeline.add_deletion(
            "unshare", "deployment", name_or_selector, predecessor_names, **task_options
        )
        return

    templates = pipeline.unshare_templates
    if servers.model not in templates:
        unshared_route = build_http_route(servers.model, servers.serve)
        name = pipeline.make_template_name("unshare")
        templates[servers.model] = apply(name, unshared_route, retry=retries(2))

    pipeline.add_task(
        pipeline.reserve_name("", "unshare"),
        templates[servers.model],
        {},
        task_options,
        predecessor_names,
    )


def switch_clients(deploy_block: Block, servers: Servers, promotion_block: Block) -> None:
    """Add the tasks that run after a promotion: they switch clients to the new servers, scale
    earlier servers to zero, and delete expired and failed servers."""
    pipeline = current_pipeline()
    champion_template = pipeline.step_template("steps.champion", "champion")
    switch_template = build_switch_dag(
        pipeline.make_template_name, champion_template, servers.model, servers.serve
    )
    switch_inputs = {"server": servers.name, "running": promotion_block.outputs.running}
    switch_name = pipeline.add_task(
        pipeline.reserve_name("", "switch"),
        switch_template,
        switch_inputs,
        previous_tasks=[promotion_block.name],
    ).name

    if servers.serve.canary:
        _add_unshare_task(servers, f"{servers.name}-canary", [switch_name])

    champion_server = f"'{{{{tasks.{switch_name}.outputs.parameters.deployment}}}}'"
    pipeline.add_deletion(
        "expire",
        SERVER_KINDS,
        "{{item}}",
        [switch_name],
        with_param=promotion_block.outputs.expired,
        when=quote_word(f"{champion_server} == '{servers.name}'"),
    )

    # do not delete the servers of the champion: a rollback may just have made the candidate, an
    # earlier release, the champion
    refused_condition = quote_word(
        f"{champion_server} != '{servers.name}' && '{promotion_block.outputs.promoted}' == 'false'"
    )
    pipeline.add_deletion(
        "take-back", SERVER_KINDS, servers.name, [switch_name], when=refused_condition
    )

    withdraw_task = pipeline.add_deletion("withdraw", SERVER_KINDS, servers.name)
    withdraw_task.waits_for = after_any([deploy_block.name, promotion_block.name], FAILURES)
    pipeline.current_scope().guarded += [promotion_block.name, switch_name]
