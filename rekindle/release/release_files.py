"""The files of a release in the object store.

`releases/NAME/HASH/` contains the files that a server or MLflow loads: model.safetensors (or
result/, the files of a training program's result), model.json, workload.json (digest of the serving
code, maximum size of a batch), dataset.json, dataset.files.json, state/ (the serving state),
example.json (a request with the first test row of the report), MLmodel with its examples
(rekindle/release/pyfunc/). HASH is a hash of the names and contents of these files, so the same
release always has the same prefix. release.json, which is written last, contains the sha256 of each
file.

Other files are not loaded and not part of HASH: verdict.json, which a promotion replaces,
reference.json (histograms of the test rows), origin.json and curve.json
(rekindle/release/origin.py). release.json contains the sha256 of reference.json, origin.json and
curve.json, and a checksum of its own fields.
"""

import gzip
import hashlib
import shutil
import zlib
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field, JsonValue

from argolocal.common.json_text import MAX_BYTES, to_json
from rekindle import project
from rekindle.cache import code
from rekindle.content.dataset import FILE_LIST
from rekindle.content.dataset_record import DATASET
from rekindle.content.hashes import file_sha256
from rekindle.content.verified_release import (
    DESCRIBED_FILES,
    REFERENCE,
    RELEASE_RECORD,
    REMEDY,
    VERDICT,
    FileHashes,
    Sha256,
    content_hash,
    read_verified,
    reject_other_files,
    reject_other_folder,
    reject_other_hash,
)
from rekindle.content.weights import list_model_files, parse_description, read_description
from rekindle.documents import (
    MODEL_FILE,
    Document,
    InvalidDocument,
    name_field,
    parse,
    read_file,
    read_object,
    seal,
    validate,
)
from rekindle.errors import Conflict, DataError, in_one_line
from rekindle.keys import CURVE
from rekindle.names import ArtifactKey, ModelName, Version
from rekindle.project.folders import ENGINE
from rekindle.storage import NotFound, Store
from rekindle.tracking import Release
from rekindle.workload import digest_files, load

EXAMPLE = "example.json"
CODE = "workload.json"
# file in the report; each line is one request of some test rows: {"request": ..., "predictions":
# [...], ...}
PREDICTIONS = "predictions.jsonl.gz"


class Owner(Document):
    """The part of release.json that names the version to which the files belong."""

    model_config = ConfigDict(extra="allow")

    name: Annotated[str, name_field(ModelName)]
    version: Annotated[str, name_field(Version)]
    model_sha256: str = ""
    files: dict[Annotated[str, name_field(ArtifactKey)], Sha256] = Field(default_factory=dict)
    removed: bool = False  # True: retention is removing the files


class Record(FileHashes):
    """release.json: the version of a release, and the sha256 of each file."""

    name: Annotated[str, name_field(ModelName)]
    version: Annotated[str, name_field(Version)]
    workload: str
    model_sha256: Sha256
    provenance: dict[str, str] = Field(default_factory=dict)


class ServingCode(Document):
    """workload.json: module name and sha256 of the code that computes predictions, and the batch
    size and number of rows of the evaluation."""

    workload: str = ""
    sha256: str = ""  # sha256 of the code
    # number of rows that the evaluation predicted together; 0: not recorded
    max_batch: int = Field(default=0, ge=0)
    # number of rows of the evaluation; 0: not recorded
    rows: int = Field(default=0, ge=0)


class PredictionLine(Document):
    """A request with its expected predictions, as `record_predictions` writes it."""

    request: dict[str, JsonValue]
    predictions: list[JsonValue]
    numerics: str = ""


class Verdict(Document):
    """The part of verdict.json that later steps use."""

    rows: int = Field(default=0, ge=0)
    max_batch: int = Field(default=0, ge=0)


def read_serving_code(release: Path) -> ServingCode:
    """Return workload.json; the default values if it is missing. Raises DataError."""
    file = release / CODE
    try:
        if file.exists():
            return read_file(ServingCode, file)
        return ServingCode()
    except InvalidDocument as error:
        raise DataError(f"{error} {REMEDY}") from error


def read_evaluated_rows(release: Path) -> int:
    """Return the number of rows on which a release was evaluated; 0 if it is unknown. Raises
    DataError, InvalidDocument."""
    return read_serving_code(release).rows or read_verdict(release).rows


def read_verdict(folder: Path) -> Verdict:
    """Return verdict.json of a report or a release; the default values if it is missing. Raises
    InvalidDocument."""
    file = folder / VERDICT
    if file.exists():
        return read_file(Verdict, file)
    return Verdict()


def collect_files(folder: Path, model: Path, dataset: Path, report: Path) -> dict[str, str]:
    """Fill `folder` with the files of a release except release.json; existing files are linked.

    Returns {file: sha256} of the files that are part of the release's hash. Raises DataError.
    """
    shutil.rmtree(folder, ignore_errors=True)
    files = list_serving_files(model, dataset)
    link(folder, {**files, VERDICT: report / VERDICT})

    for name, source in ((REFERENCE, report), (CURVE, model)):
        if (source / name).exists():
            link(folder, {name: source / name})

    example = _read_example(report)
    if example:
        (folder / EXAMPLE).write_bytes(example)

    name = read_description(model).workload
    verdict = read_verdict(report)
    serving_code = {
        "workload": name,
        "sha256": compute_code_digest(load(name)),
        "max_batch": verdict.max_batch,
        "rows": verdict.rows,
    }

    (folder / CODE).write_text(to_json(serving_code))

    return {
        key: file_sha256(folder / key) for key in [*files, CODE, *([EXAMPLE] if example else [])]
    }


def hash_describing_files(folder: Path) -> dict[str, str]:
    """Return {file: sha256} of the files of a release that are not part of its hash."""
    return {
        name: file_sha256(folder / name) for name in DESCRIBED_FILES if (folder / name).exists()
    }


def describe_changes(store: Store, champion: Release, workload: Any, servers: str) -> str:
    """Describe how a release differs from a champion with equal weights: its code, its servers, or
    both. `servers`: digest of the new servers ("": not compared).

    Raises DataError if the champion's workload.json was changed.
    """
    key = champion.uri.rstrip("/")
    try:
        champion_code = parse(
            ServingCode, read_verified(store, key, [CODE])[CODE], store.uri(f"{key}/{CODE}")
        ).sha256
    except NotFound:
        champion_code = ""

    differs = {
        "its code": champion_code and champion_code != compute_code_digest(workload),
        "its servers": servers
        and champion.deployment
        and not champion.deployment.endswith(f"-{servers}"),
    }
    return " and ".join(name for name, different in differs.items() if different)


def upload(store: Store, name: str, folder: Path, hashes: dict[str, str]) -> str:
    """Upload a folder that `collect_files` has filled, and return the key prefix of the release."""
    prefix = f"releases/{name}/{content_hash(hashes)}/"
    store.upload(folder, prefix)
    return prefix


def commit(store: Store, prefix: str, folder: Path, record: dict[str, Any]) -> None:
    """Upload the files that release.json describes, then release.json, which makes the release
    loadable.

    If several processes release the same files at once, release.json and the files that it
    describes all come from one of them.
    """
    key = f"{prefix}{RELEASE_RECORD}"
    while True:
        current = store.head(key)
        for name in record.get("described", {}):
            store.upload(folder / name, f"{prefix}{name}")

        try:
            store.put(
                key,
                seal(record),
                if_match=current.etag if current else None,
                if_absent=current is None,
            )
        except (Conflict, NotFound):
            # another process has written or removed release.json, and may have replaced the files
            continue
        return


def read_owner(store: Store, prefix: str) -> Owner | None:
    """Return the owner of a release; None if release.json is missing or malformed. Raises
    StorageError."""
    try:
        return read_object(Owner, store, f"{prefix}{RELEASE_RECORD}")
    except (NotFound, InvalidDocument):
        return None


def download(store: Store, prefix: str, folder: Path) -> Record:
    """Download a release into `folder`, and return its release.json.

    Raises StorageError, or DataError if `prefix` is not a release, or if a file was changed, added
    or removed.
    """
    reject_other_folder(prefix, store.uri(prefix))
    store.download(prefix.rstrip("/") + "/", folder)
    return verify_release(folder, prefix, store.uri(prefix))


def verify_release(folder: Path, prefix: str, address: str) -> Record:
    """Return release.json of the release in `folder`. Raises DataError if a file does not match its
    recorded hash.

    `prefix`: key prefix, which ends with the hash of the release (empty: unknown). `address`: name
    of the release in messages.
    """
    try:
        record = parse(
            Record,
            (folder / RELEASE_RECORD).read_bytes(),
            f"{address.rstrip('/')}/{RELEASE_RECORD}",
            REMEDY,
        )
        model = (folder / MODEL_FILE).read_bytes()
        description = parse_description(model, f"{address.rstrip('/')}/{MODEL_FILE}")
    except (OSError, InvalidDocument, DataError) as error:
        raise DataError(f"{address} is not a complete release ({error}). {REMEDY}") from error

    reject_other_hash(prefix.rstrip("/"), record.files, address)
    # the files in `described` are not checked: an interrupted release may have replaced them
    reject_other_files(folder, record.files, address)
    if description.sha256 != record.model_sha256:
        raise DataError(
            f"{address}: the weights have the sha256 {description.sha256} in {MODEL_FILE}, and"
            f" {record.model_sha256} in {RELEASE_RECORD}. {REMEDY}"
        )

    return record


def download_champion(store: Store, prefix: str, folder: Path) -> Path:
    """Download the champion's release into `folder`, to compare the candidate with it.

    Raises NotFound if a file was deleted, DataError if a file was changed.
    """
    try:
        reject_other_folder(prefix, store.uri(prefix))
        store.download(prefix.rstrip("/") + "/", folder)
        _require_files(store, prefix, folder, [MODEL_FILE, DATASET, VERDICT, RELEASE_RECORD])
        _require_files(store, prefix, folder, list_model_files(read_description(folder)))
        verify_release(folder, prefix, store.uri(prefix))
    except (NotFound, DataError) as error:
        kind = type(error)
        raise kind(
            f"the champion's release is incomplete: {error} Restore it, or remove the alias"
            " `champion` from that version in MLflow, so that the candidate is judged without a"
            " champion."
        ) from error

    return folder


def _require_files(store: Store, prefix: str, folder: Path, names: Iterable[str]) -> None:
    """Raise NotFound if a file of the release in `folder` is missing."""
    for name in names:
        if not (folder / name).exists():
            raise NotFound(f"{store.uri(prefix.rstrip('/'))}/{name} does not exist.")


def record_predictions(
    report: Path, requests: Iterable[tuple[dict[str, Any], list[Any]]], numerics: str = ""
) -> None:
    """Write requests with their expected predictions to a report, from which `verify` reads them
    (compare.read_predictions).

    `numerics`: result of `device.describe_numerics`. Servers with equal numerics and max_batch 1
    must return the same bits ("": not required).
    """
    with gzip.open(report / PREDICTIONS, "wt", compresslevel=1) as file:
        for request, predictions in requests:
            line = {"request": request, "predictions": predictions, "numerics": numerics}
            file.write(to_json(line) + "\n")


def list_serving_files(model: Path, dataset: Path) -> dict[str, Path]:
    """Return all files that affect predictions, by their key relative to the release's prefix.
    Raises DataError."""
    files = {name: model / name for name in list_model_files(read_description(model))}
    files[DATASET] = dataset / DATASET
    files.update({FILE_LIST: dataset / FILE_LIST} if (dataset / FILE_LIST).exists() else {})

    files.update(
        {
            str(file.relative_to(dataset)): file
            for file in (dataset / "state").rglob("*")
            if file.is_file()
        }
    )

    for key, path in files.items():
        if not path.is_file():
            raise DataError(
                f"{path} does not exist: a release needs {key}. Train, or prepare, again."
            )

    return files


def link(folder: Path, files: dict[str, Path]) -> None:
    """Create links in `folder` to the files, named by their keys."""
    for key, path in files.items():
        (folder / key).parent.mkdir(parents=True, exist_ok=True)
        (folder / key).symlink_to(path.absolute())


def _read_example(report: Path) -> bytes:
    """Return a request with the first test row in the report, or b"" if the report has none."""
    if not (report / PREDICTIONS).exists():
        return b""

    for line in read_prediction_lines(report):
        instances = line.request.get("instances")
        if isinstance(instances, list):
            return to_json({"instances": instances[:1]}).encode()
    return b""


def read_prediction_lines(report: Path) -> Iterator[PredictionLine]:
    """Yield the lines of a report's predictions. Raises DataError."""
    try:
        with gzip.open(report / PREDICTIONS) as file:
            for data in iter(partial(file.readline, MAX_BYTES + 1), b""):
                if len(data) > MAX_BYTES:
                    raise ValueError(f"a line has more than {MAX_BYTES:,} bytes")
                yield validate(PredictionLine, data)
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise DataError(
            f"{report / PREDICTIONS} does not contain predictions ({in_one_line(str(error))}): run"
            " the step evaluate again."
        ) from error


def compute_code_digest(workload: Any) -> str:
    """Return the sha256 over the code that computes a workload's predictions: its module and all
    modules of the project that it imports, also C extensions, and all files of its package.

    The code of Rekindle, which the servers' image determines, is not included.
    """
    digests = code.module_digests([workload.__name__], project.search_path())
    packages = tuple(folder.name for folder in ENGINE)
    own_digests = {
        name: digest
        for name, digest in digests.items()
        if name.partition(".")[0].partition("/")[0] not in packages
    }
    # module_digests omits the workload's module if it belongs to an installed package
    own_digests.setdefault(workload.__name__, _digest_own_files(Path(workload.__file__ or "")))
    return hashlib.sha256(to_json(own_digests).encode()).hexdigest()


def _digest_own_files(file: Path) -> str:
    """Return the sha256 over a module's file or, for an `__init__.py`, over all Python files of its
    package."""
    files = sorted(file.parent.rglob("*.py")) if file.name == "__init__.py" else [file]
    return digest_files(files, file.parent)
