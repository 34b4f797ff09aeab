"""The origin of a release: the files that `rekindle reproduce` needs to train the model again.

`origin.json` contains the manifest and the parameters of the run, the digest of its data, the
packages and the code; `curve.json` contains the exact losses of the training. `origin.json` and
`curve.json` are stored with the release, but the hash of the release does not cover them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

from pydantic import AfterValidator, ConfigDict, Field, JsonValue, RootModel

from argolocal.common.json_text import loads
from rekindle import tracking
from rekindle.cache import code
from rekindle.content.verified_release import RELEASE_RECORD, read_described_file
from rekindle.content.weights import read_description
from rekindle.documents import Document, ModelFile, parse, parse_and_validate
from rekindle.errors import ConfigError
from rekindle.keys import CURVE
from rekindle.keys import ORIGIN as FILE
from rekindle.names import ArtifactKey, CommitId, Version, format_untrusted
from rekindle.release.release_files import download
from rekindle.storage import NotFound, Store

# step → loss; None if the loss is not finite
LossCurve = dict[int, float | None]
JsonObject = dict[str, JsonValue]


class DataSection(Document):
    source: str


class PodSection(Document):
    image: str = ""


class ClusterSection(PodSection):
    pods: dict[str, PodSection] = Field(default_factory=dict)


class SweepSection(Document):
    space: dict[str, dict[str, JsonValue]] = Field(default_factory=dict)


class RecordedConfig(Document):
    """The settings that `reproduce` reads before the code of the release's commit can parse the
    whole config."""

    data: DataSection
    cluster: ClusterSection = Field(default_factory=ClusterSection)
    sweep: SweepSection = Field(default_factory=SweepSection)


class WorkflowParameter(Document):
    name: str
    value: JsonValue = ""


class WorkflowArguments(Document):
    parameters: list[WorkflowParameter] = Field(default_factory=list)


class ManifestSpec(Document):
    arguments: WorkflowArguments = Field(default_factory=WorkflowArguments)
    templates: list[JsonObject] = Field(default_factory=list)


class RenderedManifest(Document):
    """The parts of a manifest that `reproduce` compares."""

    spec: ManifestSpec


def _check_manifest(manifest: JsonObject) -> JsonObject:
    if manifest:
        RenderedManifest.model_validate(manifest)
    return manifest


def _check_parameters(parameters: dict[str, str]) -> dict[str, str]:
    config_text = parameters.get("config")
    if config_text:
        try:
            parse_and_validate(RecordedConfig, config_text)
        except ValueError as error:
            raise ValueError(f"config: {error}") from None
    return parameters


def _check_modules(module_names: list[str]) -> list[str]:
    for module_name in module_names:
        path_parts = module_name.removeprefix(code.FILE_PREFIX).split("/")
        is_file = module_name.startswith(code.FILE_PREFIX) and not {"", ".", ".."} & set(path_parts)
        if not is_file and not all(
            name_part.isidentifier() for name_part in module_name.split(".")
        ):
            raise ValueError(
                f"{format_untrusted(module_name)} is neither the dotted name of a module, such as"
                " a.b, nor a"
                " file, such as ./a/b.py"
            )
    return module_names


class RunFile(Document):
    """origin.json: the run that trained and released a model. `packages`: names with versions, such
    as torch-2.8.0; `modules`: the modules that the templates of the run name, such as steps and
    workloads, and the files of its commands, such as ./train.py; `code`: name of a module → digest
    of its code."""

    parameters: Annotated[dict[str, str], AfterValidator(_check_parameters)]
    manifest: Annotated[JsonObject, AfterValidator(_check_manifest)]
    created: str = ""
    source_digest: str = ""
    champion: str = Field(default="", pattern=rf"^({Version.PATTERN.pattern})?$")
    python: str
    packages: list[str]
    modules: Annotated[list[str], AfterValidator(_check_modules)]
    code: dict[str, str]


class CurveFile(RootModel[list[tuple[int, float | None]]]):
    """curve.json: step and loss of the recorded steps; a loss that is not finite is None."""

    model_config = ConfigDict(strict=True)


@dataclass(frozen=True)
class Origin:
    """A release, and the run that trained it."""

    name: str
    version: str
    # key prefix of the release
    prefix: str
    # sha256 of the weights
    sha256: str
    provenance: dict[str, str]
    # file name → sha256, for the files that affect predictions
    files: Mapping[str, str]
    model: ModelFile
    run: RunFile
    curve: LossCurve
    # id of the workflow's MLflow run
    run_id: str = ""

    @property
    def is_of_program(self) -> bool:
        """True if a user's training program, not Rekindle, trained the model."""
        return bool(self.model.files)

    @property
    def parameters(self) -> dict[str, str]:
        """The workflow parameters of the run, without `manifest`."""
        return self.run.parameters

    @cached_property
    def config(self) -> RecordedConfig:
        """The settings that `reproduce` reads before it renders the config."""
        return RecordedConfig.model_validate_json(self.parameters["config"])

    @cached_property
    def whole_config(self) -> dict[str, Any]:
        """All values of the config, without validation, because the code of the release's commit
        validates the values."""
        return loads(self.parameters["config"])

    @property
    def commit(self) -> str:
        """The Git commit, with the suffix -dirty if files had uncommitted changes; "" if unknown.
        Raises InvalidName."""
        commit_sha = self.provenance.get("git_sha", "").replace("unknown", "")
        if commit_sha:
            return CommitId(commit_sha, f"git_sha of {self.prefix}{RELEASE_RECORD}")
        return ""


def read(object_store: Store, model_name: str, version: str = "") -> Origin:
    """Read the origin of a version (default: the champion).

    Raises ConfigError if the version or its origin does not exist, DataError if a file of the
    release was changed.
    """
    if version:
        release = tracking.find_version(model_name, version)
    else:
        release = tracking.champion(model_name)

    if not release and version:
        raise ConfigError(
            f'version {version} of the model "{model_name}" does not exist: `rekindle ui` shows all'
            " versions."
        )

    if not release:
        raise ConfigError(
            f'the model "{model_name}" does not have a champion: `rekindle ui` shows all models and'
            " versions. A pipeline that releases no trained model, such as batch scoring or a"
            " check for drift, has nothing to reproduce."
        )

    release_key = ArtifactKey(
        release.uri.rstrip("/"), f"the tag {tracking.URI} of version {release.version}"
    )
    release_prefix = release_key.prefix

    try:
        with TemporaryDirectory() as temporary_folder:
            release_record = download(object_store, release_prefix, Path(temporary_folder))
            model_description = read_description(Path(temporary_folder))

        run_file = parse(
            RunFile,
            read_described_file(object_store, release_key, FILE),
            object_store.uri(release_prefix + FILE),
        )
    except NotFound as error:
        raise ConfigError(
            f"version {release.version} of {model_name} cannot be reproduced: {error} Versions"
            " that an earlier Rekindle released lack this file: train and release again."
        ) from error

    if not run_file.manifest or not run_file.parameters.get("config"):
        raise ConfigError(
            f"version {release.version} of {model_name} cannot be reproduced: it was not released"
            " by a workflow that `rekindle run` or `rekindle submit` rendered from a config."
        )

    return Origin(
        name=model_name,
        version=release.version,
        prefix=release_prefix,
        sha256=release_record.model_sha256,
        provenance=release_record.provenance,
        files={**release_record.files},
        model=model_description,
        run=run_file,
        curve=_read_released_curve(object_store, release_key),
        run_id=release.run_id,
    )


def _read_released_curve(object_store: Store, release_key: str) -> LossCurve:
    """Return the recorded losses of a release. Raises DataError if curve.json was changed."""
    try:
        curve_bytes = read_described_file(object_store, release_key, CURVE)
    except NotFound:
        return {}
    return _parse_curve(curve_bytes, object_store.uri(f"{release_key}/{CURVE}"))


def _parse_curve(curve_bytes: bytes, address: str) -> LossCurve:
    return dict(parse(CurveFile, curve_bytes, address).root)


def read_curve(object_store: Store, model_prefix: str) -> LossCurve:
    """Return the loss of each training step of the model at `model_prefix`; {} if the model was not
    trained in steps."""
    try:
        return _parse_curve(
            object_store.get(model_prefix + CURVE), object_store.uri(model_prefix + CURVE)
        )
    except NotFound:
        return {}
