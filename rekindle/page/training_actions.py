"""Actions on the page: change the number of workers of a training, and roll a model back."""

from collections.abc import Mapping
from pathlib import Path
from urllib.parse import quote

from argolocal.page.actions.action import Field, Outcome, Plan, address_of, command_line
from argolocal.page.actions.processes import Commands
from argolocal.page.sources import Run
from argolocal.view import summary
from rekindle.cluster.kubernetes_api import Cluster
from rekindle.errors import ConfigError
from rekindle.names import ModelName, Version
from rekindle.operations.scale import scale_training

MAX_WORKERS = 4096
# seconds within which an impossible rollback fails
ROLLBACK_WAIT_S = 8.0


class Scale:
    """Changes the number of workers of a running training.

    `cluster`: cluster of the run, or None for the runs in REKINDLE_HOME (`home`).
    """

    name = "scale"

    def __init__(self, home: Path, cluster: Cluster | None) -> None:
        self.home = home
        self.cluster = cluster

    def plan(self, run: Run) -> Plan | None:
        tasks = list_elastic_tasks(run)
        if run.phase != "Running" or not tasks:
            return None
        fields = [
            Field("workers", "number of workers", "", is_required=True, kind="number"),
            Field("task", "training", tasks[0], tasks),
        ]
        return Plan(
            self.name,
            "Scale",
            "Workers join or leave without a restart of the others; the trained model is the same,"
            " bit for bit.",
            command_line("scale", run.name, "WORKERS", "--task", tasks[0])
            + (self.cluster.flags if self.cluster else ""),
            address_of(run.name, self.name),
            f"/runs/{run.name}",
            fields=fields,
        )

    def perform(self, run: Run, values: Mapping[str, str]) -> Outcome:
        text = values["workers"]
        if not text.isdecimal() or len(text) > 4 or not 1 <= int(text) <= MAX_WORKERS:
            raise ConfigError(
                f"the number of workers is {text[:20]!r}: it must be a number from 1 to"
                f" {MAX_WORKERS}."
            )
        result = scale_training(self.home, self.cluster, run.name, values["task"], int(text))
        message = f"{values['task']} changes from {result['before']} to {text} workers."
        return Outcome(message, f"/runs/{run.name}")


def list_elastic_tasks(run: Run) -> list[str]:
    """Return the running tasks of a run whose workers are pods of an elastic training."""
    plan = summary.list_planned_tasks(run.manifest)
    templates = {item.get("name"): item for item in run.spec.get("templates") or []}
    tasks = []
    for step in summary.list_leaf_steps(summary.list_steps(run.name, run.status, plan)):
        template = templates.get((step.node or {}).get("templateName")) or {}
        manifest = str((template.get("resource") or {}).get("manifest") or "")
        if step.phase == "Running" and "PyTorchJob" in manifest and "--max-workers=" in manifest:
            tasks.append(step.label.partition("(")[0])
    return list(dict.fromkeys(tasks))


class RollBack:
    """Rolls a model back to an earlier release."""

    path = "/models/{model}/rollback/{version}"
    section = "models"

    def __init__(self, commands: Commands, cluster: Cluster | None) -> None:
        self.commands = commands
        self.flags = f" --cluster{cluster.flags}" if cluster else ""
        self.arguments = list[str]()
        if cluster:
            self.arguments = ["--context", cluster.context, "--namespace", cluster.namespace]

    def plan(self, parameters: Mapping[str, str]) -> Plan | None:
        model = ModelName.parse_or_none(parameters["model"])
        version = Version.parse_or_none(parameters["version"])
        if model is None or version is None:
            return None
        return Plan(
            "rollback",
            f"Roll back {model}",
            f"The servers of version {version} start, version {version} becomes the champion of"
            f" {model} and gets the requests; then the current servers end.",
            command_line("rollback", model, version) + self.flags,
            f"/models/{quote(model, safe='')}/rollback/{version}",
            "/models",
            ends_something=True,
        )

    def perform(self, parameters: Mapping[str, str], values: Mapping[str, str]) -> Outcome:
        model = ModelName(parameters["model"])
        version = Version(parameters["version"])
        # "--" keeps a name that starts with "-" from being parsed as an option
        command = self.commands.start("rollback", *self.arguments, "--", model, version)
        # a rollback that does not fail within this time continues in the background
        command.wait_until(lambda: False, ROLLBACK_WAIT_S)
        if command.process.poll() == 0:
            message = f"Version {version} of {model} is serving."
        else:
            message = (
                f"The servers of version {version} of {model} are starting. The output of the"
                f" command is in {command.output}."
            )
        return Outcome(message, "/models")
