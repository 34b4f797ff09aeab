"""What the tasks of our steps are given: parameters of Argo, and what the block before hands on."""

from collections.abc import Mapping
from typing import Any

from rekindle.blocks.wiring import Block, handed


def text(name: str) -> str:
    return f"{{{{inputs.parameters.{name}}}}}"


def parameter(name: str) -> str:
    return f"{{{{workflow.parameters.{name}}}}}"


def number(name: str) -> str:
    return f"{{{{!inputs.parameters.{name}}}}}"


def handed_on(block: Block, inputs: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """What `block` hands on by these names; none that `inputs` give."""
    return {name: handed(block, name) for name in names if name not in inputs}


def after(before: Block, block: Block) -> Block:
    block.before = before
    return block
