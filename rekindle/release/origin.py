"""The origin of a release: all that `rekindle reproduce` needs to train the same model again.

`origin.json` has the manifest and the parameters of the run, the digest of its data, the packages and the code;
`curve.json` has the exact losses of the training. Both are next to the release's files, and are not part of its hash.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rekindle import tracking
from rekindle.content.weights import read_description
from rekindle.errors import ConfigError
from rekindle.keys import CURVE
from rekindle.keys import ORIGIN as FILE
from rekindle.names import ArtifactKey
from rekindle.release.files import download
from rekindle.storage import NotFound, Store

Curve = dict[int, float]  # step → loss


@dataclass(frozen=True)
class Origin:
    """A release, and the run that made it."""

    name: str
    version: str
    prefix: str  # key prefix of the release
    sha256: str  # of the weights
    provenance: dict[str, str]
    files: dict[str, str]  # {file: sha256} of the files that affect predictions
    model: dict[str, Any]  # model.json
    run: dict[str, Any]  # origin.json
    curve: Curve
    run_id: str = ""  # MLflow run of the workflow

    @property
    def parameters(self) -> dict[str, str]:
        """The workflow parameters of the run, without `manifest`."""
        return self.run["parameters"]

    @property
    def config(self) -> dict[str, Any]:
        return json.loads(self.parameters["config"])

    @property
    def commit(self) -> str:
        """The commit, with -dirty if files were changed; "" if unknown."""
        return self.provenance.get("git_sha", "").replace("unknown", "")


def read(store: Store, name: str, version: str = "") -> Origin:
    """Read the origin of a version (default: the champion).

    Raises ConfigError if it was not recorded, DataError if the files of the release were changed.
    """
    release = tracking.find_version(name, version) if version else tracking.champion(name)
    if not release and version:
        raise ConfigError(f'version {version} of the model "{name}" does not exist: `rekindle ui` shows all versions.')
    if not release:
        raise ConfigError(
            f'the model "{name}" does not have a champion: `rekindle ui` shows all models and versions. A pipeline '
            "that releases no trained model, such as batch scoring or a check for drift, has nothing to reproduce."
        )
    prefix = ArtifactKey(release.uri.rstrip("/"), f"the tag {tracking.URI} of version {release.version}").prefix
    try:
        with TemporaryDirectory() as folder:
            record = download(store, prefix, Path(folder))
            model = read_description(Path(folder)).model_dump(exclude_unset=True)
        run = json.loads(store.get(prefix + FILE))
    except NotFound as error:
        raise ConfigError(
            f"version {release.version} of {name} cannot be reproduced: {error} Versions that an earlier Rekindle "
            "released lack this file: train and release again."
        ) from error
    if not run["manifest"] or not run["parameters"].get("config"):
        raise ConfigError(
            f"version {release.version} of {name} cannot be reproduced: it was not released by a workflow that "
            "`rekindle run` or `rekindle submit` rendered from a config."
        )
    curve = read_curve(store, prefix)
    return Origin(
        name,
        release.version,
        prefix,
        release.sha256,
        record.provenance,
        record.files,
        model,
        run,
        curve,
        release.run_id,
    )


def read_curve(store: Store, prefix: str) -> Curve:
    """Return the losses of the model at `prefix`; {} if it was not trained step by step."""
    try:
        return dict(json.loads(store.get(prefix + CURVE)))
    except NotFound:
        return {}
