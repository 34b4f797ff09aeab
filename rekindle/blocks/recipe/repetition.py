"""Repeat an evaluation, and the group (nested DAG) `promote`, after another run has changed the
champion."""

from typing import Any

from rekindle.blocks.binding import load_step
from rekindle.blocks.container import needs_task_name
from rekindle.blocks.dependencies import after_all
from rekindle.blocks.wiring import Block
from rekindle.blocks.workflow import current_pipeline, step
from rekindle.keys import AGAIN_SUFFIX, TASK_PARAMETER


def repeat_step(original_block: Block, **task_options: Any) -> Block:
    """Add a task that runs the step of `original_block` again with the same inputs. The added task
    overwrites the artifacts of `original_block`."""
    step_module, pod_kind = original_block.origin
    repeated_block = step(
        step_module,
        task=f"{original_block.name}{AGAIN_SUFFIX}",
        pod=pod_kind,
        inputs=original_block.inputs,
        **task_options,
    )
    if needs_task_name(load_step(step_module)):
        block_arguments: dict[str, Any] = repeated_block.arguments  # pyright: ignore[reportAssignmentType]
        block_arguments[TASK_PARAMETER] = original_block.name
    repeated_block.is_repetition = True
    original_block.repetitions.append(repeated_block)
    return repeated_block


def repeat_group(repeated_evaluation: Block) -> Block:
    """Add a task to the group (nested DAG) that is being defined. The task runs this group once
    more if the verdict of `repeated_evaluation` is `release`. The repeated group gets the champion
    that `repeated_evaluation` has compared the model with, and the input `repetitions`, reduced by
    1."""
    pipeline = current_pipeline()
    group_dag = pipeline.current_scope().dag
    group_inputs: list[Any] = group_dag.inputs  # pyright: ignore[reportAssignmentType]
    group_arguments = {
        group_input.name: f"{{{{inputs.parameters.{group_input.name}}}}}"
        for group_input in group_inputs
    }
    group_arguments["champion"] = repeated_evaluation.outputs.champion
    group_arguments["repetitions"] = "{{=asInt(inputs.parameters.repetitions) - 1}}"
    group_task = pipeline.add_task(
        pipeline.reserve_name("", "next"),
        group_dag.name or "",
        group_arguments,
        {"when": repeated_evaluation.outputs.verdict == "release"},
    )
    group_task.waits_for = after_all([f"{repeated_evaluation.name}.Succeeded"])
    group_task.is_repetition = True

    return group_task
