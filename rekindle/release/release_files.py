"""The files of a release in the object store.

`releases/NAME/HASH/` contains the files that a server or MLflow loads: model.safetensors (or
result/, the files of a training program's result), model.json, workload.json (digest of the serving
code, maximum size of a batch), dataset.json, dataset.files.json, state/ (the serving state),
example.json (a request with the first test row of the report), MLmodel with its examples
(rekindle/release/pyfunc/). HASH is a hash of the names and contents of these files, so the same
release always has the same prefix. release.json, which is written last, contains the sha256 of each
file.

The following files are not loaded by servers, and are not part of HASH: verdict.json, which a
promotion replaces, reference.json (histograms of the test rows), origin.json and curve.json
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
    compute_content_hash,
    read_verified_files,
    reject_wrong_hash,
    require_release_key,
    verify_release_files,
)
from rekindle.content.weights import list_model_files, parse_description, read_description
from rekindle.documents import (
    MODEL_FILE,
    Document,
    InvalidDocument,
    name_field,
    parse,
    parse_and_validate,
    read_file,
    read_object,
    seal_fields,
)
from rekindle.errors import Conflict, DataError, format_in_one_line
from rekindle.keys import CURVE
from rekindle.names import ArtifactKey, ModelName, Version
from rekindle.project.folders import ENGINE_FOLDERS
from rekindle.storage import NotFound, Store
from rekindle.tracking import Release
from rekindle.workload import digest_files, load

EXAMPLE_FILE = "example.json"
CODE_FILE = "workload.json"
# file in the report; each line is one request of some test rows: {"request": ..., "predictions":
# [...], ...}
PREDICTIONS_FILE = "predictions.jsonl.gz"


class ReleaseOwner(Document):
    """The part of release.json that names the version to which the files belong."""

    model_config = ConfigDict(extra="allow")

    name: Annotated[str, name_field(ModelName)]
    version: Annotated[str, name_field(Version)]
    model_sha256: str = ""
    files: dict[Annotated[str, name_field(ArtifactKey)], Sha256] = Field(default_factory=dict)
    # True if retention is removing the files of the release
    removed: bool = False


class ReleaseRecord(FileHashes):
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
    # sha256 of the code
    sha256: str = ""
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


def read_serving_code(release_folder: Path) -> ServingCode:
    """Return the content of workload.json; the default values if the file is missing. Raises
    DataError."""
    code_file = release_folder / CODE_FILE
    try:
        if code_file.exists():
            return read_file(ServingCode, code_file)
        return ServingCode()
    except InvalidDocument as error:
        raise DataError(f"{error} {REMEDY}") from error


def read_evaluated_rows(release_folder: Path) -> int:
    """Return the number of rows on which a release was evaluated; 0 if the number is unknown.
    Raises DataError, InvalidDocument."""
    return read_serving_code(release_folder).rows or read_verdict(release_folder).rows


def read_verdict(report_folder: Path) -> Verdict:
    """Return the content of verdict.json of a report or a release; the default values if the file
    is missing. Raises InvalidDocument."""
    verdict_file = report_folder / VERDICT
    if verdict_file.exists():
        return read_file(Verdict, verdict_file)
    return Verdict()


def collect_files(
    release_folder: Path, model_folder: Path, dataset_folder: Path, report_folder: Path
) -> dict[str, str]:
    """Fill `release_folder` with all files of a release except release.json. Existing files are
    linked, not copied.

    Returns {file: sha256} of the files that are part of the release's hash. Raises DataError.
    """
    shutil.rmtree(release_folder, ignore_errors=True)
    serving_files = list_serving_files(model_folder, dataset_folder)
    link_files(release_folder, {**serving_files, VERDICT: report_folder / VERDICT})

    for file_name, source_folder in ((REFERENCE, report_folder), (CURVE, model_folder)):
        if (source_folder / file_name).exists():
            link_files(release_folder, {file_name: source_folder / file_name})

    example_bytes = _read_example(report_folder)
    if example_bytes:
        (release_folder / EXAMPLE_FILE).write_bytes(example_bytes)

    workload_name = read_description(model_folder).workload
    verdict = read_verdict(report_folder)
    serving_code = {
        "workload": workload_name,
        "sha256": compute_code_digest(load(workload_name)),
        "max_batch": verdict.max_batch,
        "rows": verdict.rows,
    }

    (release_folder / CODE_FILE).write_text(to_json(serving_code))

    return {
        key: file_sha256(release_folder / key)
        for key in [*serving_files, CODE_FILE, *([EXAMPLE_FILE] if example_bytes else [])]
    }


def hash_described_files(release_folder: Path) -> dict[str, str]:
    """Return {file: sha256} of the files of a release that are not part of its hash."""
    return {
        file_name: file_sha256(release_folder / file_name)
        for file_name in DESCRIBED_FILES
        if (release_folder / file_name).exists()
    }


def describe_changes(
    object_store: Store, champion_release: Release, workload: Any, servers_digest: str
) -> str:
    """Describe how a release differs from a champion with equal weights: its code, its servers, or
    both. `servers_digest`: digest of the new servers ("": not compared).

    Raises DataError if the champion's workload.json was changed.
    """
    champion_key = champion_release.uri.rstrip("/")
    try:
        champion_code = parse(
            ServingCode,
            read_verified_files(object_store, champion_key, [CODE_FILE])[CODE_FILE],
            object_store.uri(f"{champion_key}/{CODE_FILE}"),
        ).sha256
    except NotFound:
        champion_code = ""

    differences_by_name = {
        "its code": champion_code and champion_code != compute_code_digest(workload),
        "its servers": servers_digest
        and champion_release.deployment
        and not champion_release.deployment.endswith(f"-{servers_digest}"),
    }
    return " and ".join(
        difference_name
        for difference_name, is_different in differences_by_name.items()
        if is_different
    )


def upload(
    object_store: Store, model_name: str, release_folder: Path, file_hashes: dict[str, str]
) -> str:
    """Upload a folder that `collect_files` has filled, and return the key prefix of the release."""
    release_prefix = f"releases/{model_name}/{compute_content_hash(file_hashes)}/"
    object_store.upload(release_folder, release_prefix)
    return release_prefix


def commit_release(
    object_store: Store, release_prefix: str, release_folder: Path, release_record: dict[str, Any]
) -> None:
    """Upload the files that release.json describes, then release.json, which makes the release
    loadable.

    If several processes release the same files at once, release.json and the files that it
    describes all come from one process.
    """
    record_key = f"{release_prefix}{RELEASE_RECORD}"
    while True:
        current_record = object_store.head(record_key)
        for file_name in release_record.get("described", {}):
            object_store.upload(release_folder / file_name, f"{release_prefix}{file_name}")

        try:
            object_store.put(
                record_key,
                seal_fields(release_record),
                if_match=current_record.etag if current_record else None,
                if_absent=current_record is None,
            )
        except (Conflict, NotFound):
            # another process has written or removed release.json, and may have replaced the files
            continue
        return


def read_owner(object_store: Store, release_prefix: str) -> ReleaseOwner | None:
    """Return the owner of a release's files (model and version); None if release.json is missing or
    malformed. Raises StorageError."""
    try:
        return read_object(ReleaseOwner, object_store, f"{release_prefix}{RELEASE_RECORD}")
    except (NotFound, InvalidDocument):
        return None


def download(object_store: Store, release_prefix: str, release_folder: Path) -> ReleaseRecord:
    """Download a release into `release_folder`, and return its release.json.

    Raises StorageError, or DataError if `release_prefix` is not a release, or if a file was
    changed, added or removed.
    """
    require_release_key(release_prefix, object_store.uri(release_prefix))
    object_store.download(release_prefix.rstrip("/") + "/", release_folder)
    return verify_release(release_folder, release_prefix, object_store.uri(release_prefix))


def verify_release(
    release_folder: Path, release_prefix: str, release_address: str
) -> ReleaseRecord:
    """Return release.json of the release in `release_folder`. Raises DataError if a file does not
    match its recorded hash.

    `release_prefix`: key prefix, which ends with the hash of the release (empty: unknown).
    `release_address`: name of the release in messages.
    """
    try:
        release_record = parse(
            ReleaseRecord,
            (release_folder / RELEASE_RECORD).read_bytes(),
            f"{release_address.rstrip('/')}/{RELEASE_RECORD}",
            REMEDY,
        )
        model_bytes = (release_folder / MODEL_FILE).read_bytes()
        model_description = parse_description(
            model_bytes, f"{release_address.rstrip('/')}/{MODEL_FILE}"
        )
    except (OSError, InvalidDocument, DataError) as error:
        raise DataError(
            f"{release_address} is not a complete release ({error}). {REMEDY}"
        ) from error

    reject_wrong_hash(release_prefix.rstrip("/"), release_record.files, release_address)
    # the files in `described` are not checked, because an interrupted release may have replaced
    # them
    verify_release_files(release_folder, release_record.files, release_address)
    if model_description.sha256 != release_record.model_sha256:
        raise DataError(
            f"{release_address}: the weights have the sha256 {model_description.sha256} in"
            f" {MODEL_FILE}, and {release_record.model_sha256} in {RELEASE_RECORD}. {REMEDY}"
        )

    return release_record


def download_champion(object_store: Store, release_prefix: str, release_folder: Path) -> Path:
    """Download the champion's release into `release_folder`, to compare the candidate with it.

    Raises NotFound if a file was deleted, DataError if a file was changed.
    """
    try:
        require_release_key(release_prefix, object_store.uri(release_prefix))
        object_store.download(release_prefix.rstrip("/") + "/", release_folder)
        _require_files(
            object_store,
            release_prefix,
            release_folder,
            [MODEL_FILE, DATASET, VERDICT, RELEASE_RECORD],
        )
        _require_files(
            object_store,
            release_prefix,
            release_folder,
            list_model_files(read_description(release_folder)),
        )
        verify_release(release_folder, release_prefix, object_store.uri(release_prefix))
    except (NotFound, DataError) as error:
        error_type = type(error)
        raise error_type(
            f"the champion's release is incomplete: {error} Restore it, or remove the alias"
            " `champion` from that version in MLflow, so that the candidate is judged without a"
            " champion."
        ) from error

    return release_folder


def _require_files(
    object_store: Store, release_prefix: str, release_folder: Path, file_names: Iterable[str]
) -> None:
    """Raise NotFound if a file of the release in `release_folder` is missing."""
    for file_name in file_names:
        if not (release_folder / file_name).exists():
            raise NotFound(
                f"{object_store.uri(release_prefix.rstrip('/'))}/{file_name} does not exist."
            )


def record_predictions(
    report_folder: Path, requests: Iterable[tuple[dict[str, Any], list[Any]]], numerics: str = ""
) -> None:
    """Write requests with their expected predictions to a report, from which `verify` reads them
    (compare.read_predictions).

    `numerics`: result of `device.describe_numerics`. Servers with equal numerics and max_batch 1
    must return the same bits ("": not required).
    """
    with gzip.open(report_folder / PREDICTIONS_FILE, "wt", compresslevel=1) as predictions_file:
        for request, predictions in requests:
            prediction_line = {"request": request, "predictions": predictions, "numerics": numerics}
            predictions_file.write(to_json(prediction_line) + "\n")


def list_serving_files(model_folder: Path, dataset_folder: Path) -> dict[str, Path]:
    """Return all files that affect predictions, by their key relative to the release's prefix.
    Raises DataError."""
    files_by_key = {
        file_name: model_folder / file_name
        for file_name in list_model_files(read_description(model_folder))
    }
    files_by_key[DATASET] = dataset_folder / DATASET
    if (dataset_folder / FILE_LIST).exists():
        files_by_key[FILE_LIST] = dataset_folder / FILE_LIST

    files_by_key.update(
        {
            str(state_file.relative_to(dataset_folder)): state_file
            for state_file in (dataset_folder / "state").rglob("*")
            if state_file.is_file()
        }
    )

    for key, path in files_by_key.items():
        if not path.is_file():
            raise DataError(
                f"{path} does not exist: a release needs {key}. Train, or prepare, again."
            )

    return files_by_key


def link_files(target_folder: Path, files_by_key: dict[str, Path]) -> None:
    """Create a link to each file in `target_folder`, at the path that is the file's key."""
    for key, path in files_by_key.items():
        (target_folder / key).parent.mkdir(parents=True, exist_ok=True)
        (target_folder / key).symlink_to(path.absolute())


def _read_example(report_folder: Path) -> bytes:
    """Return a request with the first test row in the report, or b"" if the report contains no
    request."""
    if not (report_folder / PREDICTIONS_FILE).exists():
        return b""

    for prediction_line in read_prediction_lines(report_folder):
        instances = prediction_line.request.get("instances")
        if isinstance(instances, list):
            return to_json({"instances": instances[:1]}).encode()
    return b""


def read_prediction_lines(report_folder: Path) -> Iterator[PredictionLine]:
    """Yield the lines of a report's predictions. Raises DataError."""
    try:
        with gzip.open(report_folder / PREDICTIONS_FILE) as predictions_file:
            for line_bytes in iter(partial(predictions_file.readline, MAX_BYTES + 1), b""):
                if len(line_bytes) > MAX_BYTES:
                    raise ValueError(f"a line has more than {MAX_BYTES:,} bytes")
                yield parse_and_validate(PredictionLine, line_bytes)
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise DataError(
            f"{report_folder / PREDICTIONS_FILE} does not contain predictions"
            f" ({format_in_one_line(str(error))}): run the step evaluate again."
        ) from error


def compute_code_digest(workload: Any) -> str:
    """Return the sha256 over the code that computes a workload's predictions: its module and all
    modules of the project that it imports, also C extensions, and all files of its package.

    The code of Rekindle, which the servers' image determines, is not included.
    """
    module_digests_by_name = code.module_digests([workload.__name__], project.search_path())
    engine_packages = tuple(engine_folder.name for engine_folder in ENGINE_FOLDERS)
    own_digests = {
        module_name: module_digest
        for module_name, module_digest in module_digests_by_name.items()
        if module_name.partition(".")[0].partition("/")[0] not in engine_packages
    }
    # module_digests omits the workload's module if it belongs to an installed package
    own_digests.setdefault(workload.__name__, _digest_own_files(Path(workload.__file__ or "")))
    return hashlib.sha256(to_json(own_digests).encode()).hexdigest()


def _digest_own_files(module_file: Path) -> str:
    """Return the sha256 over a module's file or, for an `__init__.py`, over all Python files of its
    package."""
    python_files = (
        sorted(module_file.parent.rglob("*.py"))
        if module_file.name == "__init__.py"
        else [module_file]
    )
    return digest_files(python_files, module_file.parent)
