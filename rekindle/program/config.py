"""The `program:` section of a config, which describes the command of a training program and its
result."""

import re
from collections.abc import Iterable, Mapping
from typing import ClassVar

from pydantic import Field, field_validator, model_validator

from argolocal.common.environment import find_secret_flags, is_secret_name
from rekindle.errors import ConfigError, suggest_similar
from rekindle.kubernetes_names import PROGRAM_SECRET
from rekindle.sections import Section

# placeholders of a command → their meaning
PLACEHOLDER_DESCRIPTIONS = {
    "dataset": "folder with the dataset that `prepare` has written",
    "checkpoints": "folder below which the program writes its checkpoints",
    "checkpoint": "newest complete checkpoint (only in `resume`)",
    "nodes": "number of pods in the group",
    "node_rank": "number of this pod in the group, from 0",
    "processes": "number of processes of each pod",
    "world_size": "number of processes of all pods",
    "master_address": "address of the pod with rank 0",
    "master_port": "free port of the pod with rank 0",
    "run_id": "id of the run in MLflow",
}
# `model.NAME` is the setting NAME of the section `model:`
MODEL_PREFIX = "model."
# does not match `${NAME}`, which is a shell variable
PLACEHOLDER_PATTERN = re.compile(r"(?<![{$])\{([A-Za-z_][\w.]*)\}(?!\})")
SHELL_VARIABLE_PATTERN = re.compile(r"[\"']?\$(\w+|\{\w+\})[\"']?")
VARIABLE_NAME_PATTERN = re.compile(r"[A-Za-z_]\w*", re.ASCII)
# launchers, which start the processes of a node themselves
LAUNCHER_COMMANDS = frozenset({"accelerate", "deepspeed", "torchrun"})
LAUNCHER_MODULES = frozenset(
    {"accelerate.commands.launch", "deepspeed.launcher.runner", "torch.distributed.run"}
)


class ProgramConfig(Section):
    """The command of a training program, and the path of its result."""

    # settings of the section `program` that do not affect the result
    NOT_IN_RESULT: ClassVar[frozenset[str]] = frozenset(
        {"keep", "preload", "restart_seconds", "secrets", "stop_seconds"}
    )

    command: list[str] = Field(
        min_length=1,
        description=(
            "program and its arguments: FILE.py, -m MODULE, or any executable; with placeholders"
            " such as {dataset} and {checkpoints}"
        ),
    )
    resume: list[str] = Field(
        default_factory=list,
        description="arguments that are added if a checkpoint exists; {checkpoint} is its path",
    )
    result: str = Field(
        "",
        description=(
            "file or folder with the trained model (empty: the newest complete checkpoint)"
        ),
    )
    environment: dict[str, str] = Field(
        default_factory=dict, description="environment variables of the program"
    )
    secrets: list[str] = Field(
        default_factory=list,
        description=(
            f"environment variables with secrets: keys of the Secret {PROGRAM_SECRET}; on this"
            " machine, variables of your environment"
        ),
    )
    processes: int = Field(
        0, ge=0, le=1024, description="number of processes of a pod (0: one per GPU, at least one)"
    )
    launcher: bool | None = Field(
        None,
        description=(
            "true: the command starts the processes of its pod by itself, as torchrun does (empty:"
            " true for torchrun, accelerate and deepspeed)"
        ),
    )
    marker: str = Field(
        "",
        description=(
            "name of the file that the program writes last into a checkpoint (empty: recognized"
            " by the format of the checkpoint)"
        ),
    )
    keep: int = Field(2, ge=1, description="number of checkpoints to keep in the object store")
    preload: list[str] = Field(
        default_factory=lambda: ["torch"],
        description="modules that are imported before a Python program starts, to start it faster",
    )
    stop_seconds: float = Field(
        30.0,
        ge=0,
        description="seconds between SIGTERM and SIGKILL when the number of pods changes",
    )
    restart_seconds: float = Field(
        600.0,
        ge=0,
        description=(
            "maximum seconds from the arrival of a new pod until the program is restarted with it;"
            " a save of the program restarts it earlier"
        ),
    )

    @field_validator("marker")
    @classmethod
    def _check_marker(cls, marker: str) -> str:
        if "/" in marker or marker in (".", ".."):
            raise ValueError("it must be the name of a file, without a folder")
        return marker

    @model_validator(mode="after")
    def _check_placeholders(self) -> "ProgramConfig":
        allowed_names = PLACEHOLDER_DESCRIPTIONS.keys() - {"checkpoint"}
        _check_placeholder_names("command", self.command, allowed_names)
        _check_placeholder_names("result", [self.result], allowed_names)
        _check_placeholder_names("environment", self.environment.values(), allowed_names)
        _check_placeholder_names("resume", self.resume, PLACEHOLDER_DESCRIPTIONS.keys())
        return self

    @field_validator("secrets")
    @classmethod
    def _check_secrets(cls, secret_names: list[str]) -> list[str]:
        if not all(map(VARIABLE_NAME_PATTERN.fullmatch, secret_names)):
            raise ValueError("it must list names of environment variables, without their values")
        return secret_names

    @model_validator(mode="after")
    def _reject_secrets(self) -> "ProgramConfig":
        """Raise ValueError for a secret value, because the arguments of the pods' processes, MLflow
        and the manifest contain the section."""
        secret_settings = [
            f"environment.{variable_name}"
            for variable_name, variable_value in self.environment.items()
            if is_secret_name(variable_name) and _is_literal_value(variable_value)
        ]
        secret_settings += (
            f"{field_name}: --{variable_name}"
            for field_name in ("command", "resume")
            for variable_name, variable_value in find_secret_flags(getattr(self, field_name))
            if _is_literal_value(variable_value)
        )
        if secret_settings:
            raise ValueError(
                f"{', '.join(secret_settings)} is a secret, which everyone can read who can read"
                " the manifest or MLflow. Remove it, and name its variable in program.secrets: the"
                f" program gets its value from the Secret {PROGRAM_SECRET} or, on this machine,"
                " from your environment"
            )
        return self

    @property
    def texts(self) -> list[str]:
        """All texts of the section in which placeholders are allowed."""
        return [*self.command, *self.resume, self.result, *self.environment.values()]

    @property
    def result_checkpoint_path(self) -> str:
        """The path of the result relative to the checkpoint folder; "" if the result is
        elsewhere."""
        folder_prefix = "{checkpoints}/"
        if self.result.startswith(folder_prefix) and "{" not in self.result[len(folder_prefix) :]:
            return self.result[len(folder_prefix) :].rstrip("/")
        return ""

    @property
    def starts_processes(self) -> bool:
        """True if the command starts the processes of its pod by itself."""
        if self.launcher is not None:
            return self.launcher

        first_argument, *other_arguments = self.command
        if first_argument in ("python", "python3") and other_arguments:
            first_argument, *other_arguments = other_arguments

        command_name = first_argument.rpartition("/")[2]
        return command_name in LAUNCHER_COMMANDS or (
            first_argument == "-m" and not LAUNCHER_MODULES.isdisjoint(other_arguments[:1])
        )


def _is_literal_value(value: str) -> bool:
    """Return True if a value is written literally, that is, not empty, a placeholder or a shell
    variable such as $HF_TOKEN."""
    return (
        bool(value)
        and not PLACEHOLDER_PATTERN.fullmatch(value)
        and not SHELL_VARIABLE_PATTERN.fullmatch(value)
    )


def _check_placeholder_names(
    field_name: str, template_texts: Iterable[str], allowed_names: Iterable[str]
) -> None:
    """Raise ValueError for a placeholder that does not exist."""
    allowed_names = set(allowed_names)
    for template_text in template_texts:
        for placeholder_name in PLACEHOLDER_PATTERN.findall(template_text):
            if placeholder_name in allowed_names or placeholder_name.startswith(MODEL_PREFIX):
                continue

            if placeholder_name in PLACEHOLDER_DESCRIPTIONS:
                hint = " It is known only in program.resume."
            else:
                hint = suggest_similar(placeholder_name, allowed_names) or (
                    f" There are {', '.join(sorted(allowed_names))} and {MODEL_PREFIX}NAME."
                )
            raise ValueError(
                f"{field_name} has the unknown placeholder {{{placeholder_name}}}.{hint}"
            )


def check_model_placeholders(
    program_config: ProgramConfig, model_settings: Mapping[str, object]
) -> None:
    """Raise ConfigError for a placeholder {model.NAME} whose setting does not exist in
    `model_settings`."""
    for placeholder_name in sorted(
        {
            placeholder_name
            for text in program_config.texts
            for placeholder_name in PLACEHOLDER_PATTERN.findall(text)
        }
    ):
        setting_name = placeholder_name.removeprefix(MODEL_PREFIX)
        if setting_name != placeholder_name and setting_name not in model_settings:
            hint = (
                suggest_similar(setting_name, set(model_settings))
                or f" It has: {', '.join(sorted(model_settings)) or 'none'}."
            )
            raise ConfigError(
                f"program has the placeholder {{{placeholder_name}}}, but the section `model`"
                f" lacks the setting {setting_name}.{hint}"
            )


def fill_placeholders(template_text: str, placeholder_values: Mapping[str, object]) -> str:
    """Replace the placeholders in a text of the section `program` by their values. Raises KeyError
    for a placeholder without a value."""
    return PLACEHOLDER_PATTERN.sub(
        lambda placeholder_match: str(placeholder_values[placeholder_match[1]]), template_text
    )


def has_placeholder(texts: Iterable[str], placeholder_name: str) -> bool:
    return any(placeholder_name in PLACEHOLDER_PATTERN.findall(text) for text in texts)
