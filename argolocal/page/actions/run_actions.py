"""The actions on a run of this machine: stop, resume, approve a suspended step, and run again."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from argolocal.common.checked_names import RunName
from argolocal.engine import suspend
from argolocal.manifest.allowed_values import FAILED_PHASES
from argolocal.page.actions.action import (
    Action,
    Field,
    Outcome,
    Plan,
    address_of,
    command_line,
    parameter_flags,
)
from argolocal.page.actions.processes import Commands
from argolocal.page.sources import LocalRuns, Run
from argolocal.runner import run as runner
from argolocal.runner.rerun import choose_name, list_parameters
from argolocal.state.journal import MANIFEST_FILE, RunFiles

# maximum length of a parameter value that a form shows
MAX_SHOWN_VALUE = 500


def make_actions(
    home: Path, commands: Commands, internal_parameters: Collection[str] = ()
) -> list[Action]:
    """Return the actions that argolocal and rekindle share. `internal_parameters`: names of
    workflow parameters that users do not change."""
    return [
        Approve(home, commands),
        Resume(home, commands),
        RunAgain(home, commands, internal_parameters),
        Stop(home, commands),
    ]


class _LocalAction:
    """Base class of the actions that a command of this program performs. `home`: the directory of
    the runs."""

    def __init__(self, home: Path, commands: Commands) -> None:
        self.home = home
        self.commands = commands
        self.source = LocalRuns(home)

    def start(self, run: Run, *arguments: str) -> str:
        """Start a command, and wait until the run has changed. Return the path of the command's
        output file."""
        command = self.commands.start(*arguments)
        command.wait_until(lambda: self.source.version(run.name) != run.version)
        return str(command.output)


class Stop(_LocalAction):
    """Stops a run; its exit handlers still run."""

    name = "stop"

    def plan(self, run: Run) -> Plan | None:
        if run.is_finished:
            return None
        return Plan(
            self.name,
            "Stop",
            f"The running steps of {run.name} end, then its exit handlers run. The run fails; it"
            " can be resumed.",
            command_line("stop", run.name),
            address_of(run.name, self.name),
            f"/runs/{run.name}",
            ends_something=True,
        )

    def perform(self, run: Run, values: Mapping[str, str]) -> Outcome:
        command = self.commands.start("stop", run.name)
        stop_request = RunFiles(self.home, run.name).root / "stop"
        command.wait_until(
            lambda: stop_request.exists() or self.source.version(run.name) != run.version
        )
        return Outcome(f"{run.name} is being stopped.", f"/runs/{run.name}")


class Resume(_LocalAction):
    """Resumes a run that failed, was stopped or was interrupted."""

    name = "resume"

    def plan(self, run: Run) -> Plan | None:
        if run.phase not in (*FAILED_PHASES, "Interrupted"):
            return None
        return Plan(
            self.name,
            "Resume",
            f"{run.name} continues: steps that succeeded are not repeated, the others run again.",
            command_line("resume", run.name),
            address_of(run.name, self.name),
            f"/runs/{run.name}",
        )

    def perform(self, run: Run, values: Mapping[str, str]) -> Outcome:
        output = self.start(run, "resume", run.name, "--yes")
        message = f"{run.name} continues. The output of the command is in {output}."
        return Outcome(message, f"/runs/{run.name}")


class Approve(_LocalAction):
    """Resumes the suspended steps of a run in progress, with values for their outputs."""

    name = "approve"

    def plan(self, run: Run) -> Plan | None:
        steps = suspend.list_suspended_nodes(run.status)
        if run.phase != "Running" or not (steps or run.spec.get("suspend")):
            return None

        fields = [
            _suspended_field(step, parameter)
            for step in steps
            for parameter in suspend.list_missing_parameters(step)
        ]
        names = ", ".join(str(step["displayName"]) for step in steps)
        values = {form_field.name: form_field.value or "VALUE" for form_field in fields}
        return Plan(
            self.name,
            "Approve" if steps else "Start",
            f"{names or run.name} waits for you, and then continues.",
            command_line("resume", run.name, *parameter_flags(values)),
            address_of(run.name, self.name),
            f"/runs/{run.name}",
            fields=fields,
        )

    def perform(self, run: Run, values: Mapping[str, str]) -> Outcome:
        if runner.resume_suspended(run.name, values, self.home):
            message = f"{run.name} continues."
        else:
            # the process of the run has died since the page was shown, so continue the run
            arguments = ["resume", run.name, *parameter_flags(values), "--yes"]
            output = self.start(run, *arguments)
            message = f"{run.name} continues. The output of the command is in {output}."
        return Outcome(message, f"/runs/{run.name}")


class RunAgain(_LocalAction):
    """Starts a new run with the manifest and the parameters of a run."""

    name = "rerun"

    def __init__(
        self, home: Path, commands: Commands, internal_parameters: Collection[str]
    ) -> None:
        super().__init__(home, commands)
        self.internal_parameters = internal_parameters

    def plan(self, run: Run) -> Plan | None:
        if not run.is_finished:
            return None
        fields = [
            Field(name, name, value)
            for name, value in list_parameters(run.manifest).items()
            if len(value) <= MAX_SHOWN_VALUE and name not in self.internal_parameters
        ]
        return Plan(
            self.name,
            "Run again",
            f"A new run starts with the manifest of {run.name}. {run.name} stays as it is.",
            command_line("rerun", run.name),
            address_of(run.name, self.name),
            f"/runs/{run.name}",
            fields=fields,
        )

    def perform(self, run: Run, values: Mapping[str, str]) -> Outcome:
        parameters = list_parameters(run.manifest)
        changes = {name: value for name, value in values.items() if value != parameters.get(name)}
        name = RunName(choose_name(run.manifest))
        flags = parameter_flags(changes)

        manifest = RunFiles(self.home, name).root / MANIFEST_FILE
        command = self.commands.start("rerun", run.name, "--name", name, *flags, "--yes")
        command.wait_until(manifest.exists)
        message = f"{name} has started. The output of the command is in {command.output}."
        return Outcome(message, f"/runs/{name}")


def _suspended_field(step: Mapping[str, Any], parameter: Mapping[str, Any]) -> Field:
    """Return the form field for an output of a suspended step. The choices and the description of
    the field come from the input with the same name."""
    name = str(parameter["name"])
    default = (parameter.get("valueFrom") or {}).get("default")
    inputs = (step.get("inputs") or {}).get("parameters") or []
    declaration = next((item for item in inputs if item["name"] == name), parameter)
    return Field(
        name,
        name,
        "" if default is None else str(default),
        [str(choice) for choice in declaration.get("enum") or []],
        is_required=default is None,
        hint=str(declaration.get("description") or ""),
    )
