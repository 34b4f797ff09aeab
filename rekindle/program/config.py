"""The `program:` section of a config, which describes the command of a training program and its
result."""

import re
from collections.abc import Iterable, Mapping
from typing import ClassVar

from pydantic import Field, field_validator, model_validator

from argolocal.common.environment import names_secret, secret_flags
from rekindle.errors import ConfigError, did_you_mean
from rekindle.kubernetes_names import PROGRAM_SECRET
from rekindle.sections import Section

# placeholders of a command → their meaning
PLACEHOLDERS = {
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
PLACEHOLDER = re.compile(r"(?<![{$])\{([A-Za-z_][\w.]*)\}(?!\})")
SHELL_VARIABLE = re.compile(r"[\"']?\$(\w+|\{\w+\})[\"']?")
VARIABLE_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
# launchers, which start the processes of a node themselves
LAUNCHERS = frozenset({"accelerate", "deepspeed", "torchrun"})
LAUNCHER_MODULES = frozenset(
    {"accelerate.commands.launch", "deepspeed.launcher.runner", "torch.distributed.run"}
)


class ProgramConfig(Section):
    """The command of a training program, and the path of its result."""

    # settings that do not affect the result
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
        description="arguments that are added if there is a checkpoint, at {checkpoint}",
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
        0, ge=0, le=1024, description="number of processes of a pod (0: one, or one per GPU)"
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
        description="modules that a Python program finds imported when it is started",
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
            "maximum seconds until the program is restarted with a new pod, if it does not save"
            " before"
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
        allowed = PLACEHOLDERS.keys() - {"checkpoint"}
        _check("command", self.command, allowed)
        _check("result", [self.result], allowed)
        _check("environment", self.environment.values(), allowed)
        _check("resume", self.resume, PLACEHOLDERS.keys())
        return self

    @field_validator("secrets")
    @classmethod
    def _check_secrets(cls, names: list[str]) -> list[str]:
        if not all(map(VARIABLE_NAME.fullmatch, names)):
            raise ValueError("it must list names of environment variables, without their values")
        return names

    @model_validator(mode="after")
    def _reject_secrets(self) -> "ProgramConfig":
        """Raise ValueError for a secret value, because the arguments of the pods' processes, MLflow
        and the manifest contain the section."""
        names = [
            f"environment.{name}"
            for name, value in self.environment.items()
            if names_secret(name) and _is_literal(value)
        ]
        names += (
            f"{field}: --{name}"
            for field in ("command", "resume")
            for name, value in secret_flags(getattr(self, field))
            if _is_literal(value)
        )
        if names:
            raise ValueError(
                f"{', '.join(names)} is a secret, which everyone can read who can read the manifest"
                " or MLflow. Remove it, and name its variable in program.secrets: the program gets"
                f" its value from the Secret {PROGRAM_SECRET} or, on this machine, from your"
                " environment"
            )
        return self

    @property
    def texts(self) -> list[str]:
        """All texts of the section in which placeholders are allowed."""
        return [*self.command, *self.resume, self.result, *self.environment.values()]

    @property
    def result_in_checkpoints(self) -> str:
        """The path of the result relative to the checkpoint folder; "" if the result is
        elsewhere."""
        start = "{checkpoints}/"
        if self.result.startswith(start) and "{" not in self.result[len(start) :]:
            return self.result[len(start) :].rstrip("/")
        return ""

    @property
    def starts_processes(self) -> bool:
        """True if the command starts the processes of its pod by itself."""
        if self.launcher is not None:
            return self.launcher

        first, *others = self.command
        if first in ("python", "python3") and others:
            first, *others = others

        name = first.rpartition("/")[2]
        return name in LAUNCHERS or (first == "-m" and not LAUNCHER_MODULES.isdisjoint(others[:1]))


def _is_literal(value: str) -> bool:
    """Return True if a value is written literally: it is not empty, a placeholder or a shell
    variable such as $HF_TOKEN."""
    return bool(value) and not PLACEHOLDER.fullmatch(value) and not SHELL_VARIABLE.fullmatch(value)


def _check(field: str, texts: Iterable[str], allowed: Iterable[str]) -> None:
    """Raise ValueError for a placeholder that does not exist."""
    allowed = set(allowed)
    for text in texts:
        for name in PLACEHOLDER.findall(text):
            if name in allowed or name.startswith(MODEL_PREFIX):
                continue

            if name in PLACEHOLDERS:
                hint = " It is known only in program.resume."
            else:
                hint = did_you_mean(name, allowed) or (
                    f" There are {', '.join(sorted(allowed))} and {MODEL_PREFIX}NAME."
                )
            raise ValueError(f"{field} has the unknown placeholder {{{name}}}.{hint}")


def check_model_placeholders(program: ProgramConfig, model: Mapping[str, object]) -> None:
    """Raise ConfigError for a placeholder {model.NAME} whose setting does not exist in `model`."""
    for name in sorted({name for text in program.texts for name in PLACEHOLDER.findall(text)}):
        setting = name.removeprefix(MODEL_PREFIX)
        if setting != name and setting not in model:
            hint = (
                did_you_mean(setting, set(model))
                or f" It has: {', '.join(sorted(model)) or 'none'}."
            )
            raise ConfigError(
                f"program has the placeholder {{{name}}}, but the section `model` lacks the"
                f" setting {setting}.{hint}"
            )


def fill(text: str, values: Mapping[str, object]) -> str:
    """Replace the placeholders of a text. Raises KeyError for a placeholder without a value."""
    return PLACEHOLDER.sub(lambda match: str(values[match[1]]), text)


def has_placeholder(texts: Iterable[str], name: str) -> bool:
    return any(name in PLACEHOLDER.findall(text) for text in texts)
