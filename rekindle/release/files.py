"""The files of a release in the object store.

`releases/NAME/HASH/` contains model.safetensors, model.json, workload.json (digest of the serving code), dataset.json,
state/ (the serving state), example.json (a request: the first row of the report's predictions), verdict.json,
reference.json (histograms of the test rows), origin.json and curve.json (rekindle/release/origin.py), MLmodel with its
examples (rekindle/release/pyfunc/) and, written last,
release.json with the sha256 of every file that affects predictions. HASH is computed over the names and contents of
these files, so the same release always has the same prefix.
"""

import gzip
import hashlib
import json
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field

from argolocal.common.json_text import to_json
from rekindle.documents import MODEL_FILE, Document, InvalidDocument, ModelFile, name_field, read_file, read_object
from rekindle.errors import DataError
from rekindle.keys import CURVE
from rekindle.names import ArtifactKey, Digest, ModelName, Version
from rekindle.release.watch.reference import REFERENCE
from rekindle.storage import NotFound, Store, file_sha256
from rekindle.tracking import Release
from rekindle.workload import digest_files, load

MODEL = ("model.safetensors", MODEL_FILE)
EXAMPLE, CODE = "example.json", "workload.json"
RECORD, VERDICT = "release.json", "verdict.json"
RELEASE_KEY = re.compile("releases/[^/]+/[0-9a-f]{12}")
Sha256 = Annotated[str, name_field(Digest)]
# file in the report; each line is {"request": ..., "predictions": [...], ...} for some test rows
PREDICTIONS = "predictions.jsonl.gz"


class Owner(Document):
    """The version that the files of a release belong to, in release.json."""

    model_config = ConfigDict(extra="allow")

    name: Annotated[str, name_field(ModelName)]
    version: Annotated[str, name_field(Version)]
    removed: bool = False  # True while retention removes the files


class Record(Document):
    """release.json: the version, and the sha256 of each file that affects predictions."""

    name: Annotated[str, name_field(ModelName)]
    version: Annotated[str, name_field(Version)]
    workload: str
    model_sha256: Sha256
    provenance: dict[str, str] = Field(default_factory=dict)
    files: dict[Annotated[str, name_field(ArtifactKey)], Sha256]


class ServingCode(Document):
    """workload.json: the digest of the code that computes predictions."""

    sha256: str


class Verdict(Document):
    """verdict.json, as far as later steps use it."""

    rows: int = Field(default=0, ge=0)
    max_batch: int = Field(default=1, ge=1)


def model_description(model: Path) -> dict[str, Any]:
    """Return model.json of a trained model, with at least `sha256` and `workload`. Raises DataError."""
    try:
        return read_file(ModelFile, model / MODEL_FILE).as_json()
    except InvalidDocument as error:
        raise DataError(f"{model} is not a trained model ({error})") from error


def read_verdict(folder: Path) -> Verdict:
    """Return the verdict in a report or a release; the default values if it is missing. Raises InvalidDocument."""
    file = folder / VERDICT
    return read_file(Verdict, file) if file.exists() else Verdict()


def collect(folder: Path, model: Path, dataset: Path, report: Path) -> dict[str, str]:
    """Create links in `folder` to the files of a release, except release.json.

    Return {file: sha256}. Raises DataError.
    """
    shutil.rmtree(folder, ignore_errors=True)
    files, example = serving_files(model, dataset), _example(report)
    reports = [VERDICT, *([REFERENCE] if (report / REFERENCE).exists() else [])]
    link(folder, files | {name: report / name for name in reports})
    link(folder, {CURVE: model / CURVE} if (model / CURVE).exists() else {})
    if example:
        (folder / EXAMPLE).write_bytes(example)
    name = model_description(model)["workload"]
    (folder / CODE).write_text(to_json({"workload": name, "sha256": code_digest(load(name))}))
    return {key: file_sha256(folder / key) for key in [*files, CODE, *([EXAMPLE] if example else [])]}


def describe_changes(store: Store, champion: Release, workload: Any, servers: str) -> str:
    """Return the differences from a champion of equal weights: code, and the digest `servers` (empty: not compared)."""
    try:
        champion_code = read_object(ServingCode, store, f"{champion.uri.rstrip('/')}/{CODE}").sha256
    except NotFound:
        champion_code = ""
    differs = {"its code": champion_code and champion_code != code_digest(workload)}
    differs["its servers"] = servers and champion.deployment and not champion.deployment.endswith(f"-{servers}")
    return " and ".join(name for name, different in differs.items() if different)


def upload(store: Store, name: str, folder: Path, hashes: dict[str, str]) -> str:
    """Upload a folder that `collect` has filled, and return the key prefix of the release."""
    prefix = f"releases/{name}/{_content_hash(hashes)[:12]}/"
    store.upload(folder, prefix)
    return prefix


def commit(store: Store, prefix: str, record: dict[str, Any]) -> None:
    """Write release.json, which makes the release servable."""
    store.put(f"{prefix}{RECORD}", to_json(record, indent=1).encode())


def read_owner(store: Store, prefix: str) -> Owner | None:
    """Return the owner of a release; None if release.json is missing or malformed. Raises StorageError."""
    try:
        return read_object(Owner, store, f"{prefix}{RECORD}")
    except (NotFound, InvalidDocument):
        return None


def is_release(key: str) -> bool:
    """True if a key is releases/NAME/HASH, as `upload` writes it."""
    return RELEASE_KEY.fullmatch(key) is not None


def download(store: Store, prefix: str, folder: Path) -> Record:
    """Download a release into `folder`, and return release.json.

    Raises StorageError, or DataError if a file is damaged.
    """
    store.download(prefix.rstrip("/") + "/", folder)
    try:
        record = read_file(Record, folder / RECORD)
        damaged = [key for key, sha256 in record.files.items() if file_sha256(folder / key) != sha256]
    except (OSError, InvalidDocument) as error:
        raise DataError(f"{store.uri(prefix)} is not a complete release ({error}). Release it again.") from error
    if damaged:
        raise DataError(f"{store.uri(prefix)}: {', '.join(damaged)} changed since the release. Release it again.")
    return record


def download_champion(store: Store, prefix: str, folder: Path) -> Path:
    """Download the champion's release into `folder`, for the comparison. Raises NotFound if a file was deleted."""
    try:
        store.download(prefix.rstrip("/") + "/", folder)
        for file in (*MODEL, "dataset.json", VERDICT):
            if not (folder / file).exists():
                raise NotFound(f"{store.uri(prefix.rstrip('/'))}/{file} does not exist.")
    except NotFound as error:
        raise NotFound(
            f"the champion's release is incomplete: {error} Restore it, or remove the alias `champion` from that "
            "version in MLflow, so that the candidate is judged without a champion."
        ) from error
    return folder


def record_predictions(report: Path, requests: Iterable[tuple[dict[str, Any], list[Any]]], numerics: str = "") -> None:
    """Write requests with their expected predictions into a report, for `verify` (compare.read_predictions).

    `numerics`: if not empty, servers with these numerics that predict one instance at a time give the same bits.
    """
    with gzip.open(report / PREDICTIONS, "wt", compresslevel=1) as file:
        for request, predictions in requests:
            line = {"request": request, "predictions": predictions, "numerics": numerics}
            file.write(to_json(line) + "\n")


def serving_files(model: Path, dataset: Path) -> dict[str, Path]:
    """Return {key below the release's prefix: file} for all files that affect predictions. Raises DataError."""
    files = {name: model / name for name in MODEL} | {"dataset.json": dataset / "dataset.json"}
    files |= {str(file.relative_to(dataset)): file for file in (dataset / "state").rglob("*") if file.is_file()}
    for key, path in files.items():
        if not path.is_file():
            raise DataError(f"{path} does not exist: a release needs {key}. Train, or prepare, again.")
    return files


def link(folder: Path, files: dict[str, Path]) -> None:
    """Create links to the files in `folder`, with their keys as names."""
    for key, path in files.items():
        (folder / key).parent.mkdir(parents=True, exist_ok=True)
        (folder / key).symlink_to(path.absolute())


def _example(report: Path) -> bytes:
    """Return a request with the first test row of the report's predictions, or b"" without predictions."""
    if not (report / PREDICTIONS).exists():
        return b""
    with gzip.open(report / PREDICTIONS, "rt") as lines:
        return to_json({"instances": json.loads(next(lines))["request"]["instances"][:1]}).encode()


def _content_hash(hashes: dict[str, str]) -> str:
    lines = (f"{content}  {key}\n" for key, content in sorted(hashes.items()))
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def code_digest(workload: Any) -> str:
    """Return the sha256 over the Python files of a workload: its module, or its whole package."""
    file = Path(workload.__file__)
    package = file.name == "__init__.py"
    return digest_files(sorted(file.parent.rglob("*.py")) if package else [file], file.parent)
