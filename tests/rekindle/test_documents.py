"""A malformed document in the object store or in a folder leads to one line that names the
document, whichever of its fields is wrong and whichever function reads it."""

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from argolocal.common.checked_names import INVISIBLE_CHARACTERS
from rekindle import tracking
from rekindle.blocks.manifest import workflow_origin
from rekindle.cache import claims, difference, entries
from rekindle.cache.lookup import reused_tasks
from rekindle.content.weights import read_description
from rekindle.documents import InvalidDocument, ModelFile, parse, read_file, read_object
from rekindle.errors import RekindleError
from rekindle.names import RunName
from rekindle.operations.reproduce.comparison import compare
from rekindle.release import origin, promotion, release_files
from rekindle.release.retention import ownership
from rekindle.release.serve_config import DriftConfig
from rekindle.release.watch import drift
from rekindle.storage import Store
from rekindle.training.sweep.study import SweepStudy
from rekindle.workload import read_dataset_facts
from tests.rekindle.mutations import make_mutations
from tests.rekindle.valid_documents import (
    DRIFT,
    ENTRY,
    HASH,
    HISTOGRAMS,
    KEY,
    MARK,
    PROMOTION,
    RELEASE,
    SHA256,
    STUDY,
    SWEEP,
)


@dataclass(frozen=True)
class Objects:
    """The object store with one valid document of each kind. `prefix`: key prefix of a release of
    `name`, and of other objects."""

    store: Store
    name: str
    prefix: str
    folder: Path


@pytest.fixture
def objects(
    s3: Store, mlflow_server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Objects:
    monkeypatch.setattr(promotion, "UNFINISHED_TIMEOUT_S", 0.0)
    name = f"shop-{uuid.uuid4().hex[:6]}"
    prefix = f"releases/{name}/{HASH}/"
    for file, document in RELEASE.items():
        s3.put(prefix + file, json.dumps(document).encode())
    run_id = tracking.start_run(name, name)
    tracking.register_version(name, prefix, s3.uri(prefix), SHA256, run_id, {})
    return Objects(s3, name, prefix, tmp_path)


def read_origin(objects: Objects) -> None:
    origin_record = origin.read(objects.store, objects.name, "1")
    assert origin_record.config.data.source == origin_record.whole_config["data"]["source"]


def read_release(objects: Objects) -> None:
    release_files.read_owner(objects.store, objects.prefix)
    for key in ("release.json", "model.json", "verdict.json", "dataset.json"):
        (objects.folder / key).write_bytes(objects.store.get(objects.prefix + key))
    read_file(release_files.ReleaseRecord, objects.folder / "release.json")
    read_description(objects.folder)
    release_files.read_verdict(objects.folder)
    read_dataset_facts(objects.folder)


def read_cache(objects: Objects) -> None:
    entry = entries.read_entry(objects.store, KEY)
    if entry:
        json.dumps(entry.outputs)
        entries.reason_invalid(entry, lambda name: (1, len(name)))
        difference.list_differences(objects.store, entry.facts, {**ENTRY["facts"], "code": "other"})
    entries.list_stale_entries(objects.store, 1, 1.0)


def read_claims(objects: Objects) -> None:
    claims.claimed_tasks(objects.store, 1.0)


def read_promotion(objects: Objects) -> None:
    promotion.list_versions_in_use(objects.store, objects.name)
    promotion.read_pending_rollback(objects.store, objects.name)


def read_reference(objects: Objects) -> None:
    reference = read_object(
        drift.Reference, objects.store, f"{objects.prefix}reference.json"
    ).model_dump()
    drift.compute_shifts(reference, {"rows": 5, "scores": {}, "features": {}}, [])


def read_drift(objects: Objects) -> None:
    drift.claim_retraining(objects.store, DriftConfig.model_validate({"model": objects.name}), "v")


def read_mark(objects: Objects) -> None:
    ownership.read(objects.store, RunName(objects.name))


def compare_models(objects: Objects) -> None:
    compare(origin.read(objects.store, objects.name, "1"), objects.store, objects.name)


def read_study(objects: Objects) -> None:
    study = SweepStudy(objects.store, f"{objects.name}/search", SWEEP)
    study.read()
    study.read_seconds()


def release_file(name: str) -> tuple[str, Any]:
    return f"releases/NAME/{HASH}/{name}", RELEASE[name]


READERS: list[tuple[str, Any, Callable[[Objects], None]]] = [
    *(
        (*release_file(name), read_origin)
        for name in ("release.json", "model.json", "origin.json", "curve.json")
    ),
    *(
        (*release_file(name), read_release)
        for name in ("release.json", "model.json", "dataset.json", "verdict.json")
    ),
    (f"cache/{KEY}", ENTRY, read_cache),
    ("cache-book.json", {KEY: ["etag", ENTRY]}, read_cache),
    ("cache-claims/NAME", {"NAME/train": 5.0}, read_claims),
    ("releases/NAME/promotion.json", PROMOTION, read_promotion),
    ("releases/NAME/drift.json", DRIFT, read_drift),
    (f"releases/NAME/{HASH}/reference.json", HISTOGRAMS, read_reference),
    ("NAME/.rekindle.json", MARK, read_mark),
    ("NAME/train/model/model.json", RELEASE["model.json"], compare_models),
    *((f"NAME/search/{name}", document, read_study) for name, document in STUDY.items()),
]


# each field has 14 wrong values; every 13th value is tested: one per field, mostly a different one
STEP = 13
IDS = [f"{key} {read.__name__}" for key, _, read in READERS]


@pytest.mark.parametrize("step", [STEP, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("key", "document", "read"), READERS, ids=IDS)
def test_every_field_of_a_document_is_validated_where_it_is_read(
    objects: Objects, key: str, document: Any, read: Callable[[Objects], None], step: int
) -> None:
    for other, content in STUDY.items() if key.startswith("NAME/search") else ():
        objects.store.put(f"{objects.name}/search/{other}", json.dumps(content).encode())

    key = key.replace("NAME", objects.name)
    objects.store.put(key, json.dumps(document).encode())
    read(objects)
    rejected = 0

    for data in list(make_mutations(document))[::step]:
        objects.store.put(key, data)
        try:
            read(objects)
        except RekindleError as error:
            assert error.exit_code in (1, 65, 78), (data, error)
            assert "\n" not in str(error), (data, error)
            assert not set(str(error)) & set(INVISIBLE_CHARACTERS.replace("-", "")), (data, error)
            rejected += 1
        except Exception as error:
            raise AssertionError(f"{type(error).__name__} {error} for {data[:2000]!r}") from error

    objects.store.delete([key])
    assert rejected or key.startswith("cache") or key.endswith(".rekindle.json")


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("document", ["release.json", "model.json", "origin.json", "curve.json"])
def test_a_command_prints_one_line_for_a_malformed_document(
    objects: Objects, document: str
) -> None:
    objects.store.put(objects.prefix + document, b'{"\x1b[31m": 5}')
    command = [sys.executable, "-m", "rekindle", "reproduce", f"{objects.name}@1", "--check"]
    environment = {**os.environ, "REKINDLE_HOME": str(objects.folder / "home")}
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    [line] = result.stderr.splitlines()
    assert result.returncode == 1
    assert line.startswith("error: ")
    assert f"{objects.store.uri(objects.prefix)}{document} is malformed: " in line


@pytest.mark.parametrize("text", ["5", "[]", "{", "null", '{"a": 1, "a": 2}', "[" * 100_000])
def test_a_malformed_parameter_of_a_workflow_is_an_error_with_the_name_of_the_run(
    text: str,
) -> None:
    parameters = [{"name": "config", "value": text}, {"name": "cached", "value": text}]
    workflow = {"metadata": {"name": "shop-1"}, "spec": {"arguments": {"parameters": parameters}}}
    with pytest.raises(InvalidDocument, match="the parameter `config` of shop-1 is malformed: "):
        workflow_origin.read_config(workflow)
    with pytest.raises(InvalidDocument, match="the parameter `cached` is malformed: "):
        reused_tasks(workflow)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "not valid JSON"),
        (b"[]", "should be an object"),
        (b'{"sha256": 5}', '"sha256": Input should be a valid string'),
        (b'{"sha256": "a"}', '"workload": Field required'),
        (b'{"sha256": "a", "workload": "b", "step": 1e999}', '"1e999" is not a finite number'),
        (b'{"sha256": "a", "sha256": "b"}', 'the key "sha256" occurs twice'),
        (b'{"a": "\\ud800"}', "surrogates not allowed"),
        (b'{"a": "\xff"}', "invalid start byte"),
        (b"[" * 100_000, "nested values"),
        (b"9" * 5000, "5,000 digits"),
    ],
)
def test_the_message_names_the_document_the_field_and_the_rule(data: bytes, reason: str) -> None:
    with pytest.raises(InvalidDocument) as caught:
        parse(ModelFile, data, "s3://b/model.json")
    assert str(caught.value).startswith("s3://b/model.json is malformed: ")
    assert reason in str(caught.value)


def test_a_folder_instead_of_a_file_is_an_invalid_document(tmp_path: Path) -> None:
    with pytest.raises(InvalidDocument, match=r"cannot be read: Is a directory"):
        read_file(ModelFile, tmp_path)
