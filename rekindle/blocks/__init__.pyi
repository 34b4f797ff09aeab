from rekindle.blocks.recipe.other_job import job
from rekindle.blocks.recipe.release import decide, deploy, evaluate, release, ship, verify
from rekindle.blocks.recipe.training import choose, prepare, program, train
from rekindle.blocks.wiring import Block, Condition, WiringError
from rekindle.blocks.workflow import at_exit, group, pipeline, step

__all__ = [
    "Block",
    "Condition",
    "WiringError",
    "at_exit",
    "choose",
    "decide",
    "deploy",
    "evaluate",
    "group",
    "job",
    "pipeline",
    "prepare",
    "program",
    "release",
    "ship",
    "step",
    "train",
    "verify",
]
