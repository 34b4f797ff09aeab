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
    PROGRAM,
    PROGRAM_IN_JOB,
    STORE_SECRET,
)
from rekindle.local.cluster import LocalCluster
from rekindle.names import parse_s3_address, show
from rekindle.operations.reproduce import known_differences as checks
from rekindle.operations.reproduce.checkout import check_out
from rekindle.operations.reproduce.comparison import Comparison, compare
from rekindle.operations.reproduce.known_differences import Finding
from rekindle.operations.reproduce.suspended_values import (
    recorded_values,
    resume_at_once,
    suspended_findings,
)
from rekindle.operations.reproduce.workspace import Workspace, temporary_workspace
from rekindle.release.origin import Origin, read
from rekindle.storage import Store
from rekindle.training.cost.tariff import TRIAL_STEP

MAX_DIFF_LINES = 60
PROGRAMS = (PROGRAM, PROGRAM_IN_JOB)


@dataclass(frozen=True)
class Request:
    """The arguments of the command. `version`: empty for the champion."""

    model: str
    version: str = ""
    commit: str = ""
    data: str = ""
    ignore_errors: bool = False
    check_only: bool = False
    values: Mapping[str, str] = field(default_factory=dict)  # outputs of suspended steps


@dataclass
class Result:
    """The outcome. `comparison` is None if nothing was trained."""

    origin: Origin
    commit: str = ""
    findings: list[Finding] = field(default_factory=list)
    comparison: Comparison | None = None

    @property
    def fatal(self) -> bool:
        return any(finding.fatal for finding in self.findings)

    def as_json(self) -> dict[str, Any]:
        compared = self.comparison
        return {
            "model": self.origin.name,
            "version": self.origin.version,
            "commit": self.commit,
            "findings": [finding.as_json() for finding in self.findings],
            "release_sha256": self.origin.sha256,
            "model_sha256": compared and compared.sha256,
            "equal": compared and compared.equal,
            "difference": compared and (compared.difference or None),
        }


def reproduce(home: Path, request: Request, log: Callable[[str], None]) -> Result:
    """Train the model of a release again, and compare the weights; report findings to `log` before
    the training.

    The release is read from the S3 store and MLflow at the addresses in the environment or, without
    addresses, from the services embedded in `home`. If a finding is fatal, nothing is trained,
    unless `request.ignore_errors` is True. Raises ConfigError, RekindleError.
    """
    local = LocalCluster(home)
    if not home.exists() and not os.environ.get(MLFLOW_TRACKING_URI):
        raise ConfigError(
            f"no release of {request.model} is known: {home} does not exist, and"
            " MLFLOW_TRACKING_URI is not set. Run the command in the project of the release, or"
            " set the addresses of the services that have the release."
        )

    os.environ.update(local.configmap(CONFIG_MAP) | local.secret(STORE_SECRET))
    store = Store.from_env()
    origin = read(store, request.model, request.version)
    commit = checks.Commit(origin, request.commit)

    with temporary_workspace() as workspace:
        result = Result(origin, commit.sha)
        folder = check_out(commit.sha, workspace.checkout)
        data = checks.Data(origin, request.data, folder)
        log(f"{origin.name} version {origin.version}, commit {commit.sha}, data {data.description}")

        def report(found: Iterator[Finding]) -> None:
            for finding in found:
                result.findings.append(finding)
                log(str(finding))

        report(commit.findings())
        report(checks.code_findings(origin, commit, folder))
        report(data.findings())
        report(checks.environment_findings(origin))
        report(checks.machine_findings(origin))

        inputs = Inputs(origin, store, data.source)
        report(inputs.findings())

        manifest = render(workspace, folder, origin.whole_config)
        reject_unrecorded_program(origin, manifest)
        report(manifest_findings(origin, manifest))

        recorded = recorded_values(local.home, origin)
        report(suspended_findings(manifest, run_parameters(origin), request.values, recorded))

        report(program_findings(origin))

        if request.check_only or (result.fatal and not request.ignore_errors):
            return result
        if origin.is_of_program:
            return result

        inputs.provide(workspace)
        values = recorded | dict(request.values)
        run = run_pipeline(workspace, folder, origin, data.source, local.home, values)
        result.comparison = compare(origin, workspace.store(), run)

    return result


class Inputs:
    """The releases and objects that the run reads, in addition to files of the project."""

    def __init__(self, origin: Origin, store: Store, source: str) -> None:
        self.origin = origin
        self.store = store
        self.source = source
        self.start = origin.model.start
        self.releases: dict[str, tracking.Release] = {}

        # only if the initial weights come from a release, not from another training in the same run
        if self.start.startswith("releases/"):
            self.releases[self.start.split("/")[1]] = tracking.Release("start", self.start, "")

        champion = origin.run.champion
        release = tracking.find_version(origin.name, champion) if champion else None
        # the release has the weights of this champion, so it is the refreshed champion
        if release and release.sha256 == origin.sha256:
            self.releases[origin.name] = release

    def findings(self) -> Iterator[Finding]:
        for release in self.releases.values():
            if not self.store.head(f"{release.uri.rstrip('/')}/release.json"):
                yield Finding(
                    "input",
                    f"the run starts from {self.store.uri(release.uri)}, which does not exist",
                    True,
                )

    def provide(self, workspace: Workspace) -> None:
        """Copy the inputs to the object store of the workspace."""
        address = parse_s3_address(self.source)
        if address:
            workspace.copy(Store(address.bucket, self.store.endpoint), address.key)
        for name, release in self.releases.items():
            workspace.add_champion(self.store, release, name)


def render(workspace: Workspace, project: Path, config: Mapping[str, Any], *sets: str) -> Manifest:
    """Render a config in the project of the commit. Raises ConfigError."""
    file = workspace.folder / "config.yaml"
    file.write_text(yaml.safe_dump(config, sort_keys=False))
    flags = [f"--set={item}" for item in sets]

    try:
        return yaml.safe_load(workspace.rekindle(project, "render", str(file), *flags))
    except RekindleError as error:
        raise ConfigError(
            f"the project of the commit cannot render the config of the release: {error}"
        ) from error


def manifest_findings(origin: Origin, manifest: Manifest) -> Iterator[Finding]:
    """Compare the rendered manifest with the manifest of the release."""
    if manifest_sha256(manifest) == origin.provenance.get("manifest_hash"):
        return

    texts = [
        to_yaml(_without_provenance(each)).splitlines() for each in (origin.run.manifest, manifest)
    ]
    lines = list(unified_diff(texts[0], texts[1], "release", "commit", n=1, lineterm=""))
    if len(lines) > MAX_DIFF_LINES:
        lines[MAX_DIFF_LINES:] = [f"... {len(lines) - MAX_DIFF_LINES} more lines"]

    text = "the commit renders a manifest that differs from the release:"
    yield Finding("manifest", text, diff="\n".join(lines))


def program_findings(origin: Origin) -> Iterator[Finding]:
    """Report that the result of a program is not compared."""
    if origin.is_of_program:
        yield Finding(
            "program",
            f"{origin.name} {origin.version} is the result of a program, which may write other bits"
            " each time, so nothing is trained again: `rekindle run CONFIG` repeats the training",
        )


def reject_unrecorded_program(origin: Origin, manifest: Manifest) -> None:
    """Raise ConfigError if the config or the rendered manifest runs a training program, but the
    verified files of the release are not the result of one.

    The hash does not cover the config, so a client of the bucket could otherwise choose a command
    that runs on this machine.
    """
    if origin.is_of_program:
        return

    text = to_json(manifest)
    has_program_job = any(modules.launcher in text for modules in PROGRAMS)
    if origin.whole_config.get("program") is None and not has_program_job:
        return

    raise ConfigError(
        f"the config in {origin.prefix}{ORIGIN} runs a program, but {origin.name} {origin.version}"
        " has the weights of a model of Rekindle. The hash of the release does not cover the"
        " config, so nothing is run: find out who has changed the file, and release the model"
        " again."
    )


def _without_provenance(manifest: Manifest) -> Manifest:
    spec = json.loads(to_json(manifest["spec"]))
    for parameter in spec.get("arguments", {}).get("parameters", []):
        if parameter["name"] in PROVENANCE_PARAMETERS:
            parameter["value"] = ""
    return {"spec": spec}


def run_pipeline(
    workspace: Workspace,
    project: Path,
    origin: Origin,
    source: str,
    user_home: Path,
    values: Mapping[str, str],
) -> str:
    """Run the pipeline without the cache, and return the name of the run. Raises RekindleError if
    the run fails.

    `values`: outputs of suspended steps.
    """
    sets = [f"serve.port={_free_port()}", "notify.format=off"]
    if source != origin.config.data.source:
        sets.append(f"data.source={source}")

    manifest = render(workspace, project, training_config(origin), *sets)
    resume_at_once(manifest, values)
    workspace.use_images(origin.config, manifest, user_home)

    file = workspace.folder / "manifest.json"
    file.write_text(to_json(manifest))
    flags = [f"-p{name}={value}" for name, value in run_parameters(origin).items()]
    output = workspace.rekindle(
        project, "run", "--manifest", str(file), *flags, "--no-cache", "--yes", "-o", "json"
    )
    return json.loads(output)["workflow"]


def training_config(origin: Origin) -> dict[str, Any]:
    """Return the config that trains the model of the release; for a sweep, it trains only the
    released trial.

    The sweep is not repeated, because a sweep with a budget depends on the speed of the machine.
    """
    config = origin.whole_config
    if TRIAL_STEP not in origin.run.modules:
        return config

    space = {
        section: {key: [_released_setting(origin, section, key)] for key in keys}
        for section, keys in origin.config.sweep.space.items()
    }
    return config | {
        "sweep": config["sweep"] | {"space": space, "trials": 1, "rungs": 1, "budget": {}}
    }


def _released_setting(origin: Origin, section: str, key: str) -> Any:
    """Return the value that the released trial of a sweep has for a setting. Raises ConfigError."""
    settings = {"model": origin.model.model, "train": origin.model.train}.get(section, {})
    if key not in settings:
        raise ConfigError(
            f"version {origin.version} of {origin.name} cannot be reproduced: its model.json lacks"
            f" {show(section)}, {show(key)}, which the sweep searched. Train and release again."
        )
    return settings[key]


def run_parameters(origin: Origin) -> dict[str, str]:
    """Return the workflow parameters of the run that made the release, with `backfill` set to true,
    so that the new run releases nothing.

    A moving window ends at the scheduled time, or else at the creation time of that run.
    """
    values = {
        name: value
        for name, value in origin.parameters.items()
        if name not in PROVENANCE_PARAMETERS
    }
    if uses_scheduled_time(origin.run.manifest):
        values[SCHEDULED_TIME] = values.get(SCHEDULED_TIME) or origin.run.created
    return values | {BACKFILL: "true"}


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]
