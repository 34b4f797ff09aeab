"""Trains the model of a release again: check, render, run, compare."""

import json
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from difflib import unified_diff
from pathlib import Path
from typing import Any

import yaml

from argolocal.common.json_text import to_json
from rekindle import tracking
from rekindle.blocks.manifest.provenance import (
    BACKFILL,
    PROVENANCE_PARAMETERS,
    SCHEDULED_TIME,
    uses_scheduled_time,
)
from rekindle.blocks.manifest.render import manifest_sha256, to_yaml
from rekindle.blocks.pod_settings import Manifest
from rekindle.errors import ConfigError, RekindleError
from rekindle.keys import ORIGIN
from rekindle.kubernetes_names import (
    CONFIG_MAP,
    MLFLOW_TRACKING_URI,
    PROGRAM_IN_JOB_MODULES,
    PROGRAM_MODULES,
    STORE_SECRET,
)
from rekindle.local.cluster import LocalCluster
from rekindle.names import format_untrusted, parse_s3_address
from rekindle.operations.reproduce import known_differences as checks
from rekindle.operations.reproduce.checkout import check_out
from rekindle.operations.reproduce.comparison import Comparison, compare
from rekindle.operations.reproduce.known_differences import Finding
from rekindle.operations.reproduce.suspended_values import (
    find_missing_values,
    read_recorded_values,
    resume_at_once,
)
from rekindle.operations.reproduce.workspace import Workspace, create_temporary_workspace
from rekindle.release.origin import Origin, read
from rekindle.storage import Store
from rekindle.training.cost.tariff import TRIAL_STEP

MAX_DIFF_LINES = 60
JOB_MODULES = (PROGRAM_MODULES, PROGRAM_IN_JOB_MODULES)


@dataclass(frozen=True)
class ReproductionRequest:
    """The arguments of the command `rekindle reproduce`. `version`: version of the model, empty for
    the champion."""

    model: str
    version: str = ""
    commit: str = ""
    data: str = ""
    ignore_errors: bool = False
    check_only: bool = False
    # outputs of suspended steps
    values: Mapping[str, str] = field(default_factory=dict)


@dataclass
class ReproductionResult:
    """The outcome. `comparison` is None if nothing was trained."""

    origin: Origin
    commit: str = ""
    findings: list[Finding] = field(default_factory=list)
    comparison: Comparison | None = None

    @property
    def fatal(self) -> bool:
        return any(finding.fatal for finding in self.findings)

    def as_json(self) -> dict[str, Any]:
        model_comparison = self.comparison
        return {
            "model": self.origin.name,
            "version": self.origin.version,
            "commit": self.commit,
            "findings": [finding.as_json() for finding in self.findings],
            "release_sha256": self.origin.sha256,
            "model_sha256": model_comparison and model_comparison.sha256,
            "equal": model_comparison and model_comparison.equal,
            "difference": model_comparison and (model_comparison.difference or None),
        }


def reproduce(
    home_folder: Path, reproduction_request: ReproductionRequest, log_line: Callable[[str], None]
) -> ReproductionResult:
    """Train the model of a release again, and compare the weights. Before the training, each
    finding is passed to `log_line`.

    The release is read from the S3 store and MLflow at the addresses in the environment or, without
    addresses, from the services embedded in `home_folder`. If a finding is fatal, nothing is
    trained, unless `reproduction_request.ignore_errors` is True. Raises ConfigError, RekindleError.
    """
    local_cluster = LocalCluster(home_folder)
    if not home_folder.exists() and not os.environ.get(MLFLOW_TRACKING_URI):
        raise ConfigError(
            f"no release of {reproduction_request.model} is known: {home_folder} does not exist,"
            " and MLFLOW_TRACKING_URI is not set. Run the command in the project of the release,"
            " or set the addresses of the services that have the release."
        )

    os.environ.update(local_cluster.configmap(CONFIG_MAP) | local_cluster.secret(STORE_SECRET))
    object_store = Store.from_env()
    origin = read(object_store, reproduction_request.model, reproduction_request.version)
    release_commit = checks.ReleaseCommit(origin, reproduction_request.commit)

    with create_temporary_workspace() as workspace:
        reproduction_result = ReproductionResult(origin, release_commit.sha)
        project_folder = check_out(release_commit.sha, workspace.checkout)
        raw_data = checks.RawData(origin, reproduction_request.data, project_folder)
        log_line(
            f"{origin.name} version {origin.version}, commit {release_commit.sha}, data"
            f" {raw_data.description}"
        )

        def report(findings: Iterator[Finding]) -> None:
            for finding in findings:
                reproduction_result.findings.append(finding)
                log_line(str(finding))

        report(release_commit.findings())
        report(checks.find_code_differences(origin, release_commit, project_folder))
        report(raw_data.findings())
        report(checks.find_environment_differences(origin))
        report(checks.find_machine_differences(origin))

        run_inputs = RunInputs(origin, object_store, raw_data.source)
        report(run_inputs.findings())

        rendered_manifest = render_manifest(workspace, project_folder, origin.whole_config)
        reject_unrecorded_program(origin, rendered_manifest)
        report(find_manifest_differences(origin, rendered_manifest))

        recorded_step_values = read_recorded_values(local_cluster.home, origin)
        report(
            find_missing_values(
                rendered_manifest,
                make_run_parameters(origin),
                reproduction_request.values,
                recorded_step_values,
            )
        )

        report(list_program_findings(origin))

        if reproduction_request.check_only or (
            reproduction_result.fatal and not reproduction_request.ignore_errors
        ):
            return reproduction_result
        if origin.is_of_program:
            return reproduction_result

        run_inputs.provide(workspace)
        step_values = recorded_step_values | dict(reproduction_request.values)
        run_name = run_pipeline(
            workspace, project_folder, origin, raw_data.source, local_cluster.home, step_values
        )
        reproduction_result.comparison = compare(origin, workspace.store(), run_name)

    return reproduction_result


class RunInputs:
    """The releases and objects that the run reads, in addition to files of the project."""

    def __init__(self, origin: Origin, object_store: Store, data_source: str) -> None:
        self.origin = origin
        self.store = object_store
        self.source = data_source
        self.start = origin.model.start
        self.releases: dict[str, tracking.Release] = {}

        # initial weights that are not a release come from another training in the same run
        if self.start.startswith("releases/"):
            self.releases[self.start.split("/")[1]] = tracking.Release("start", self.start, "")

        champion_version = origin.run.champion
        champion_release = (
            tracking.find_version(origin.name, champion_version) if champion_version else None
        )
        # equal weights: the release was made by a refresh of this champion, not by a training
        if champion_release and champion_release.sha256 == origin.sha256:
            self.releases[origin.name] = champion_release

    def findings(self) -> Iterator[Finding]:
        for release in self.releases.values():
            if not self.store.head(f"{release.uri.rstrip('/')}/release.json"):
                yield Finding(
                    "input",
                    f"the run starts from {self.store.uri(release.uri)}, which does not exist",
                    True,
                )

    def provide(self, workspace: Workspace) -> None:
        """Copy the inputs of the run to the object store of the temporary workspace."""
        s3_address = parse_s3_address(self.source)
        if s3_address:
            workspace.copy(Store(s3_address.bucket, self.store.endpoint), s3_address.key)
        for model_name, release in self.releases.items():
            workspace.add_champion(self.store, release, model_name)


def render_manifest(
    workspace: Workspace,
    project_folder: Path,
    pipeline_config: Mapping[str, Any],
    *setting_overrides: str,
) -> Manifest:
    """Render the manifest of a config in the project of the commit. Raises ConfigError."""
    config_file = workspace.folder / "config.yaml"
    config_file.write_text(yaml.safe_dump(pipeline_config, sort_keys=False))
    override_flags = [f"--set={setting_override}" for setting_override in setting_overrides]

    try:
        return yaml.safe_load(
            workspace.rekindle(project_folder, "render", str(config_file), *override_flags)
        )
    except RekindleError as error:
        raise ConfigError(
            f"the project of the commit cannot render the config of the release: {error}"
        ) from error


def find_manifest_differences(origin: Origin, manifest: Manifest) -> Iterator[Finding]:
    """Compare the rendered manifest with the manifest of the release."""
    if manifest_sha256(manifest) == origin.provenance.get("manifest_hash"):
        return

    manifest_lines = [
        to_yaml(_remove_provenance(compared_manifest)).splitlines()
        for compared_manifest in (origin.run.manifest, manifest)
    ]
    diff_lines = list(
        unified_diff(manifest_lines[0], manifest_lines[1], "release", "commit", n=1, lineterm="")
    )
    if len(diff_lines) > MAX_DIFF_LINES:
        diff_lines[MAX_DIFF_LINES:] = [f"... {len(diff_lines) - MAX_DIFF_LINES} more lines"]

    finding_text = "the commit renders a manifest that differs from the release:"
    yield Finding("manifest", finding_text, diff="\n".join(diff_lines))


def list_program_findings(origin: Origin) -> Iterator[Finding]:
    """Yield a finding if the model is the result of a training program, because such results are
    not compared."""
    if origin.is_of_program:
        yield Finding(
            "program",
            f"{origin.name} {origin.version} is the result of a program, which may write other bits"
            " each time, so nothing is trained again: `rekindle run CONFIG` repeats the training",
        )


def reject_unrecorded_program(origin: Origin, manifest: Manifest) -> None:
    """Raise ConfigError if the config or the rendered manifest runs a training program, but the
    verified files of the release are not the result of a training program.

    The hash of a release does not cover its config, so without this check a client of the bucket
    could choose a command that runs on this machine.
    """
    if origin.is_of_program:
        return

    manifest_text = to_json(manifest)
    has_program_job = any(modules.launcher in manifest_text for modules in JOB_MODULES)
    if origin.whole_config.get("program") is None and not has_program_job:
        return

    raise ConfigError(
        f"the config in {origin.prefix}{ORIGIN} runs a program, but {origin.name} {origin.version}"
        " has the weights of a model of Rekindle. The hash of the release does not cover the"
        " config, so nothing is run: find out who has changed the file, and release the model"
        " again."
    )


def _remove_provenance(manifest: Manifest) -> Manifest:
    manifest_spec = json.loads(to_json(manifest["spec"]))
    for parameter in manifest_spec.get("arguments", {}).get("parameters", []):
        if parameter["name"] in PROVENANCE_PARAMETERS:
            parameter["value"] = ""
    return {"spec": manifest_spec}


def run_pipeline(
    workspace: Workspace,
    project_folder: Path,
    origin: Origin,
    data_source: str,
    user_home: Path,
    step_values: Mapping[str, str],
) -> str:
    """Run the pipeline without reusing cached results, and return the name of the run. Raises
    RekindleError if the run fails.

    `step_values`: outputs of suspended steps.
    """
    setting_overrides = [f"serve.port={_find_free_port()}", "notify.format=off"]
    if data_source != origin.config.data.source:
        setting_overrides.append(f"data.source={data_source}")

    manifest = render_manifest(
        workspace, project_folder, make_training_config(origin), *setting_overrides
    )
    resume_at_once(manifest, step_values)
    workspace.use_images(origin.config, manifest, user_home)

    manifest_file = workspace.folder / "manifest.json"
    manifest_file.write_text(to_json(manifest))
    parameter_flags = [
        f"-p{parameter_name}={parameter_value}"
        for parameter_name, parameter_value in make_run_parameters(origin).items()
    ]
    command_output = workspace.rekindle(
        project_folder,
        "run",
        "--manifest",
        str(manifest_file),
        *parameter_flags,
        "--no-cache",
        "--yes",
        "-o",
        "json",
    )
    return json.loads(command_output)["workflow"]


def make_training_config(origin: Origin) -> dict[str, Any]:
    """Return the config that trains the model of the release; for a sweep, it trains only the
    released trial.

    The sweep is not repeated, because a sweep with a budget depends on the speed of the machine.
    """
    pipeline_config = origin.whole_config
    if TRIAL_STEP not in origin.run.modules:
        return pipeline_config

    search_space = {
        section_name: {
            key: [_read_released_setting(origin, section_name, key)] for key in section_keys
        }
        for section_name, section_keys in origin.config.sweep.space.items()
    }
    return pipeline_config | {
        "sweep": pipeline_config["sweep"]
        | {"space": search_space, "trials": 1, "rungs": 1, "budget": {}}
    }


def _read_released_setting(origin: Origin, section_name: str, key: str) -> Any:
    """Return the value that the released trial of a sweep has for a setting. Raises ConfigError."""
    section_settings = {"model": origin.model.model, "train": origin.model.train}.get(
        section_name, {}
    )
    if key not in section_settings:
        raise ConfigError(
            f"version {origin.version} of {origin.name} cannot be reproduced: its model.json lacks"
            f" {format_untrusted(section_name)}, {format_untrusted(key)}, which the sweep"
            " searched. Train and release"
            " again."
        )
    return section_settings[key]


def make_run_parameters(origin: Origin) -> dict[str, str]:
    """Return the workflow parameters of the run that made the release, with `backfill` set to true,
    so that the new run releases nothing.

    A moving window of data ends at the scheduled time or, without a scheduled time, at the creation
    time of the run that made the release.
    """
    parameter_values = {
        parameter_name: value
        for parameter_name, value in origin.parameters.items()
        if parameter_name not in PROVENANCE_PARAMETERS
    }
    if uses_scheduled_time(origin.run.manifest):
        parameter_values[SCHEDULED_TIME] = (
            parameter_values.get(SCHEDULED_TIME) or origin.run.created
        )
    return parameter_values | {BACKFILL: "true"}


def _find_free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server_socket:
        return server_socket.getsockname()[1]
