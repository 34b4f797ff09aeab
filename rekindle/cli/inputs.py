"""Loads the config or the manifests that a command line names."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from argolocal.cli.options import pairs_of
from rekindle.errors import say


@dataclass(frozen=True)
class Source:
    """The values of CONFIG and --set and, if the command has these options, of --manifest and
    --parameter."""

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
        project.enter(self.config)
        return load_config(self.config, self.sets)

    def manifests(
        self,
        on_valid_config: Callable[[Any], None] = lambda config: None,
        to_run_here: bool = False,
    ) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Return the manifest, and the other objects in its file or folder: templates, ConfigMaps,
        Secrets.

        The manifest is read from --manifest, or rendered from CONFIG; then `on_valid_config` is
        called with the config. `to_run_here`: unless the user has chosen a port, the model may be
        served at any free port of this machine.
        """
        if self.manifest and (self.config or self.sets):
            raise click.UsageError(
                "give a config or --manifest FILE, not both (--set changes a config, -p a"
                " manifest)."
            )

        if self.manifest:
            from argolocal.manifest.read import read_files
            from rekindle.view.overview import label

            manifest, other_objects = read_files(self.manifest)
            # other manifests may use the parameter in another way
            if label(manifest, "part-of") == "rekindle":
                self.scheduled_time()

            return manifest, other_objects

        from rekindle.blocks.manifest.render import render_manifest

        loaded = self.load()
        manifest = render_manifest(loaded.config)
        self.scheduled_time()
        on_valid_config(loaded.config)

        if to_run_here and "serve.port" not in loaded.origins:
            from rekindle.local.jobs.model_services import allow_any_port

            manifest = allow_any_port(manifest)

        return manifest, []

    def scheduled_time(self) -> str:
        """Return the scheduled time that --parameter sets, or "". Raises ConfigError if it is not a
        time."""
        from rekindle.blocks.manifest.provenance import SCHEDULED
        from rekindle.step import parse_time

        text = pairs_of(self.parameters).get(SCHEDULED, "")
        parse_time(text)
        return text


def check_paths(config: Any) -> None:
    """Raise ConfigError if data.source is wrong; warn of relative paths that the steps of the
    pipeline cannot find."""
    from rekindle.blocks.manifest.config import relative_paths

    config.data.check_source()
    for key, value in relative_paths(config):
        say(
            f"warning: {key} is {value!r}, which seems to be a relative path: a step has another"
            " working directory. Declare the field as pathlib.Path, which Rekindle resolves, or"
            " give an absolute path."
        )


def check_training(config: Any, scheduled: str = "") -> None:
    """Raise ConfigError if data.source is wrong, or a short rehearsal shows that the workload
    cannot be trained."""
    from rekindle.training.rehearsal import check_trainable

    check_paths(config)
    check_trainable(config.model_dump(mode="json"), scheduled)
