"""Load the config or the manifests that are given on a command line."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from argolocal.cli.options import parse_parameter_options
from rekindle.errors import write_stderr


@dataclass(frozen=True)
class Manifests:
    """The manifest to run, and the other objects of its file or folder: templates, ConfigMaps,
    Secrets.

    `config`: the config that the manifest was rendered from, or None.
    """

    main: dict[str, Any]
    other_objects: list[dict[str, Any]]
    config: Any = None
    has_chosen_port: bool = True

    def main_for_this_machine(self) -> dict[str, Any]:
        """Return the main manifest. If the user has not chosen a port, the returned manifest lets
        the model server use any free port."""
        if self.has_chosen_port:
            return self.main

        from rekindle.local.jobs.model_services import allow_any_port

        return allow_any_port(self.main)


@dataclass(frozen=True)
class Source:
    """The values of CONFIG and --set. If the command has --manifest and --parameter, also the
    values of these options."""

    config: Path | None
    sets: tuple[str, ...]
    manifest: Path | None = None
    parameters: tuple[str, ...] = ()

    def load(self) -> Any:
        """Return the config with its overrides and the origin of each value."""
        from rekindle import project
        from rekindle.blocks.manifest.config import load_config

        if self.config is None:
            raise click.UsageError("give a config file, such as configs/demo.yaml.")
        project.enter_project(self.config)
        return load_config(self.config, self.sets)

    def manifests(self) -> Manifests:
        """Read the manifest from --manifest, or render it from CONFIG."""
        if not self.manifest:
            return self._render()

        if self.config or self.sets:
            raise click.UsageError(
                "give a config or --manifest FILE, not both (--set changes a config, -p a"
                " manifest)."
            )

        from argolocal.manifest.read import read_path
        from rekindle.blocks.manifest.workflow_origin import is_rekindle_manifest

        main_manifest, other_objects = read_path(self.manifest)
        # check the scheduled time only for manifests of Rekindle: other manifests may use a
        # parameter of this name in another way
        if is_rekindle_manifest(main_manifest):
            self.scheduled_time()

        return Manifests(main_manifest, other_objects)

    def _render(self) -> Manifests:
        from rekindle.blocks.manifest.render import render_manifest

        loaded_config = self.load()
        rendered_manifest = render_manifest(loaded_config.config)
        self.scheduled_time()

        return Manifests(
            rendered_manifest, [], loaded_config.config, "serve.port" in loaded_config.origins
        )

    def scheduled_time(self) -> str:
        """Return the scheduled time that --parameter sets, or "". Raises ConfigError if the value
        of the parameter is not a time."""
        from rekindle.blocks.manifest.provenance import SCHEDULED_TIME
        from rekindle.step import parse_time

        text = parse_parameter_options(self.parameters).get(SCHEDULED_TIME, "")
        parse_time(text)
        return text


def check_paths(pipeline_config: Any) -> None:
    """Raise ConfigError if data.source does not exist, or if pods cannot read data.source. Also
    warn about relative paths, which the steps cannot find."""
    from rekindle.blocks.manifest.config import relative_paths

    pipeline_config.data.check_source()
    for key, relative_path in relative_paths(pipeline_config):
        write_stderr(
            f"warning: {key} is {relative_path!r}, which seems to be a relative path: a step has"
            " another working directory. Declare the field as pathlib.Path, which Rekindle"
            " resolves, or give an absolute path."
        )


def check_training(pipeline_config: Any, scheduled_time: str = "") -> None:
    """Check the paths of a config, and try its workload on a few rows. Raises ConfigError if a path
    is wrong, or the workload cannot be trained."""
    from rekindle.training.rehearsal import check_trainable

    check_paths(pipeline_config)
    check_trainable(pipeline_config.model_dump(mode="json"), scheduled_time)
