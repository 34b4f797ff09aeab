"""Checks the section `sweep` of a config whose model a program trains."""

from pydantic import BaseModel

from rekindle.program.config import MODEL_PREFIX, ProgramConfig, has_placeholder
from rekindle.training.sweep.sweep_config import Sweep


def check_program_sweep(
    sweep: Sweep,
    program_config: ProgramConfig,
    train_settings: BaseModel,
    model_settings: BaseModel,
) -> Sweep:
    """Return the sweep with a single rung, because each program is trained to its end. Raises
    ValueError if the sweep does not fit the program or the section `model_settings`."""
    if "rungs" in sweep.model_fields_set and sweep.rungs > 1:
        raise ValueError(
            f"sweep.rungs is {sweep.rungs}: a program cannot pause at a rung, so each trial trains"
            " to its end. Remove sweep.rungs"
        )

    for setting_path, _ in sweep.choices():
        section_name, _, setting_name = setting_path.partition(".")
        if section_name == "train":
            raise ValueError(
                f"sweep.space.{setting_path}: a program does not get the section `train`. Add the"
                " setting to the section `model`, pass it to the program as"
                f" {{{MODEL_PREFIX}{setting_name}}}, and search"
                f" sweep.space.{MODEL_PREFIX}{setting_name}"
            )

    sweep.check_space(train_settings, model_settings)
    for setting_path, _ in sweep.choices():
        if not has_placeholder(program_config.texts, setting_path):
            raise ValueError(
                f"sweep.space.{setting_path}: the program does not get this setting. Add the"
                f" placeholder {{{setting_path}}} to program.command, or remove the setting from"
                " sweep.space"
            )

    return sweep.model_copy(update={"rungs": 1})
