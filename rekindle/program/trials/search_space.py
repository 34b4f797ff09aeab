"""Checks the section `sweep` of a config whose model a program trains."""

from pydantic import BaseModel

from rekindle.program.config import MODEL_PREFIX, ProgramConfig, has_placeholder
from rekindle.training.sweep.sweep_config import Sweep


def check_sweep(sweep: Sweep, program: ProgramConfig, train: BaseModel, model: BaseModel) -> Sweep:
    """Return the sweep with one rung: a program is trained to its end. Raises ValueError if the
    sweep does not fit the program or the section `model`."""
    if "rungs" in sweep.model_fields_set and sweep.rungs > 1:
        raise ValueError(
            f"sweep.rungs is {sweep.rungs}: a program cannot pause at a rung, so each trial trains"
            " to its end. Remove sweep.rungs"
        )

    for path, _ in sweep.choices():
        section, _, key = path.partition(".")
        if section == "train":
            raise ValueError(
                f"sweep.space.{path}: a program does not get the section `train`. Add the setting"
                f" to the section `model`, pass it to the program as {{{MODEL_PREFIX}{key}}}, and"
                f" search sweep.space.{MODEL_PREFIX}{key}"
            )

    sweep.check_space(train, model)
    for path, _ in sweep.choices():
        if not has_placeholder(program.texts, path):
            raise ValueError(
                f"sweep.space.{path}: the program does not get this setting. Add the placeholder"
                f" {{{path}}} to program.command, or remove the setting from sweep.space"
            )

    return sweep.model_copy(update={"rungs": 1})
