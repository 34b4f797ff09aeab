"""The files of a release in the object store.

Below `releases/NAME/HASH/` lie model.safetensors, model.json, workload.json (a digest of the code that answers),
dataset.json, state/ (what the server must know of the past), example.json (a request, the first row of the report's
predictions), verdict.json, reference.json (histograms of the test rows), MLmodel with its examples
(rekindle/release/pyfunc.py) and, written last, release.json with the sha256 of every file that decides what the server
answers.
HASH is taken over the names and contents of these files, so the same release always has the same prefix.
"""

import gzip
import hashlib
import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rekindle.errors import DataError
from rekindle.release.watch.reference import REFERENCE
from rekindle.storage import NotFound, Store, file_sha256
from rekindle.tracking import Release
from rekindle.workload import code_digest, load

MODEL = ("model.safetensors", "model.json")
EXAMPLE, CODE = "example.json", "workload.json"
PREDICTIONS = "predictions.jsonl.gz"  # of the report: {"request": ..., "predictions": [...]} a line, of some test rows


def model_description(model: Path) -> dict[str, Any]:
    """model.json of a trained model: at least its `sha256` and `workload`. Raises DataError."""
    try:
        description = json.loads((model / "model.json").read_text())
        return description | {name: description[name] for name in ("sha256", "workload")}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{model} holds no trained model ({error!r}): model.json must say what it is.") from error


def collect(folder: Path, model: Path, dataset: Path, report: Path) -> dict[str, str]:
    """Link the files of a release in `folder`, all but release.json; gives file → sha256. Raises DataError."""
    shutil.rmtree(folder, ignore_errors=True)
    files, example = serving_files(model, dataset), _example(report)
    about = ["verdict.json", *([REFERENCE] if (report / REFERENCE).exists() else [])]
    link(folder, files | {name: report / name for name in about})
    if example:
        (folder / EXAMPLE).write_bytes(example)
    name = model_description(model)["workload"]
    (folder / CODE).write_text(json.dumps({"workload": name, "sha256": code_digest(load(name))}))
    return {key: file_sha256(folder / key) for key in [*files, CODE, *([EXAMPLE] if example else [])]}


def changes(store: Store, champion: Release, workload: Any, servers: str) -> str:
    """What differs between the champion as it serves and the same weights served by this code and these `servers` (the
    digest of what makes them; empty: not compared); empty if nothing does, or nothing is known."""
    try:
        code = json.loads(store.get(f"{champion.uri.rstrip('/')}/{CODE}"))["sha256"]
    except NotFound:
        code = ""
    differs = {"its code": code and code != code_digest(workload)}
    differs["its servers"] = servers and champion.deployment and not champion.deployment.endswith(f"-{servers}")
    return " and ".join(name for name, different in differs.items() if different)


def upload(store: Store, name: str, folder: Path, hashes: dict[str, str]) -> str:
    """Copy a folder of `collect`; gives its prefix."""
    prefix = f"releases/{name}/{_content_hash(hashes)[:12]}/"
    store.upload(folder, prefix)
    return prefix


def commit(store: Store, prefix: str, record: dict[str, Any]) -> None:
    """Write release.json: from now on the release can be served."""
    store.put(f"{prefix}release.json", json.dumps(record, indent=1).encode())


def download(store: Store, prefix: str, folder: Path) -> dict[str, Any]:
    """Fetch a whole release into `folder`; gives release.json. Raises StorageError, and DataError if it is damaged."""
    store.download(prefix.rstrip("/") + "/", folder)
    try:
        record = json.loads((folder / "release.json").read_text())
        damaged = [key for key, sha256 in record["files"].items() if file_sha256(folder / key) != sha256]
        record |= {name: record[name] for name in ("name", "workload", "model_sha256", "version")}
    except (OSError, ValueError, KeyError) as error:
        raise DataError(
            f"{store.uri(prefix)} is not a whole release ({type(error).__name__}: {error}). Release it again."
        ) from error
    if damaged:
        raise DataError(f"{store.uri(prefix)}: {', '.join(damaged)} changed since the release. Release it again.")
    return record


def download_champion(store: Store, prefix: str, folder: Path) -> Path:
    """Fetch the champion's release into `folder`, to judge it as it serves. Raises NotFound if a file was deleted."""
    try:
        store.download(prefix.rstrip("/") + "/", folder)
        for file in (*MODEL, "dataset.json", "verdict.json"):
            if not (folder / file).exists():
                raise NotFound(f"{store.uri(prefix.rstrip('/'))}/{file} does not exist.")
    except NotFound as error:
        raise NotFound(
            f"the champion cannot be compared with: {error} Put its release back, or take the alias `champion` from "
            "that version in MLflow so that the candidate is judged alone."
        ) from error
    return folder


def record_predictions(report: Path, requests: Iterable[tuple[dict[str, Any], list[Any]]]) -> None:
    """Write requests, each with the predictions to expect, into a report: `verify` reads them by compare.recorded."""
    with gzip.open(report / PREDICTIONS, "wt", compresslevel=1) as file:
        for request, predictions in requests:
            file.write(json.dumps({"request": request, "predictions": predictions}) + "\n")


def serving_files(model: Path, dataset: Path) -> dict[str, Path]:
    """Key below the prefix → file, of everything that decides what the server answers. Raises DataError."""
    files = {name: model / name for name in MODEL} | {"dataset.json": dataset / "dataset.json"}
    files |= {str(file.relative_to(dataset)): file for file in (dataset / "state").rglob("*") if file.is_file()}
    for key, path in files.items():
        if not path.is_file():
            raise DataError(f"{path} is not there: a release needs {key}. Train, or prepare, again.")
    return files


def link(folder: Path, files: dict[str, Path]) -> None:
    """Make the files appear in `folder`, by their keys."""
    for key, path in files.items():
        (folder / key).parent.mkdir(parents=True, exist_ok=True)
        (folder / key).symlink_to(path.absolute())


def _example(report: Path) -> bytes:
    """A request with the first of the test rows whose predictions the report holds; nothing if it holds none."""
    if not (report / PREDICTIONS).exists():
        return b""
    with gzip.open(report / PREDICTIONS, "rt") as lines:
        return json.dumps({"instances": json.loads(next(lines))["request"]["instances"][:1]}).encode()


def _content_hash(hashes: dict[str, str]) -> str:
    lines = (f"{content}  {key}\n" for key, content in sorted(hashes.items()))
    return hashlib.sha256("".join(lines).encode()).hexdigest()
