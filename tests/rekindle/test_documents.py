"""A malformed document of the object store or a folder is one line that names it, for every reader
and every field."""

import hashlib
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

from argolocal.common.checked_names import INVISIBLE
from rekindle import tracking
from rekindle.blocks.manifest import workflow_origin
from rekindle.cache import claims, difference, entries
from rekindle.cache.lookup import reused_tasks
from rekindle.content.weights import read_description
from rekindle.documents import InvalidDocument, ModelFile, parse, read_file
from rekindle.errors import RekindleError
from rekindle.names import RunName
from rekindle.operations.reproduce.comparison import compare
from rekindle.release import origin, promotion, release_files
from rekindle.release.retention import ownership
from rekindle.release.serve_config import DriftConfig
from rekindle.release.watch import drift
from rekindle.release.watch.scores import ZERO_COUNTS
from rekindle.storage import Store
from rekindle.training.sweep.study import Study
from rekindle.training.sweep.sweep_config import Sweep
from rekindle.workload import dataset_facts
from tests.rekindle.mutations import mutations

SHA256 = "ab" * 32
KEY = "cd" * 32
CONFIG = {
    "data": {"source": "rows.csv"},
    "cluster": {"image": "i", "pods": {"train": {"image": "j"}}},
    "sweep": {"space": {"model": {"hidden": [1]}}},
}
RELEASE: dict[str, Any] = {
    "release.json": {
        "name": "shop",
        "version": "1",
        "workload": "steps.shop",
        "model_sha256": SHA256,
        "run_id": "r1",
        "provenance": {"git_sha": "abc"},
    },
    "model.json": {
        "sha256": SHA256,
        "workload": "steps.shop",
        "family": "",
        "start": "releases/shop/0123456789ab",
        "digest": "d1",
        "step": 3,
        "model": {"hidden": 8},
        "train": {"seed": 1},
        "fingerprint": {"torch": "2"},
        "best": {"step": 1, "validation_loss": 0.5, "released": True},
    },
    "origin.json": {
        "parameters": {"config": json.dumps(CONFIG), "rows": "7"},
        "manifest": {
            "spec": {
                "arguments": {"parameters": [{"name": "rows", "value": "7"}]},
                "templates": [{"name": "a"}],
            }
        },
        "created": "2026-11-02T03:00:00Z",
        "champion": "1",
        "python": "3.12.1",
        "packages": ["torch-2.8.0"],
        "modules": ["steps.shop"],
        "code": {"steps.shop": SHA256},
    },
    "curve.json": [[1, 0.5], [2, 0.25]],
    "dataset.json": {"facts": {"data_until": "2024-03-01T00:00:00+00:00"}, "digest": "d1"},
    "verdict.json": {"rows": 5, "max_batch": 2},
}
LOADED = {
    name: hashlib.sha256(json.dumps(RELEASE[name]).encode()).hexdigest()
    for name in ("model.json", "dataset.json")
}
RELEASE["release.json"]["files"] = LOADED
HASH = release_files.content_hash(LOADED)
ROLLBACK = {
    "version": "1",
    "deployment": "shop-1",
    "champion": "2",
    "replicas": 1,
    "decided": False,
}
PROMOTION = {
    "version": "2",
    "deployment": "shop-2",
    "former": "shop-1",
    "run_id": "r1",
    "rollback": ROLLBACK,
}
ENTRY: dict[str, Any] = {
    "key": KEY,
    "at": "shop-1/prepare",
    "outputs": {"rows": "7"},
    "artifacts": {"dataset": {"sha256": SHA256, "files": 1, "bytes": 5}},
    "facts": {
        "step": "steps.prepare",
        "code": SHA256,
        "inputs": {"rows": "7", "train": "{}"},
        "data_read": {"a": "b"},
    },
    "seconds": 1.5,
    "made": 1e9,
}
HISTOGRAMS = {"rows": 5, "scores": {"a": [1, *ZERO_COUNTS[1:]]}, "features": {"b": ZERO_COUNTS}}
DRIFT = {"version": "1", "workflow": "w", "before": {"p": HISTOGRAMS}, "seen": {}, "retrained": 5.0}
MARK = {
    "store": "s",
    "pipeline": "shop",
    "number": 1,
    "whole": False,
    "tasks": ["train"],
    "ended": 5.0,
}
SWEEP = Sweep.model_validate({"trials": 2, "rungs": 1, "space": {"model": {"hidden": [4, 8]}}})
STUDY: dict[str, Any] = {
    "jobs/00000.json": {
        "trial": 0,
        "rung": 0,
        "pod": 1,
        "settings": {"model.hidden": 4},
        "attrs": {"a": 1},
    },
    "jobs/00001.json": {"stop": {"limit": 1.0, "hours": 2.0, "expected": 3.0}},
    "seconds/1.json": {"0/0": 1.5},
    "trials/0/rung-0/model.json": RELEASE["model.json"],
    "trials/0/rung-0/validation.json": {"loss": 0.5, "step": 3},
}


@dataclass(frozen=True)
class Objects:
    """The object store with one valid document of each kind. `prefix`: of a release of `name`, and
    of other objects."""

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
    tracking.register(name, prefix, s3.uri(prefix), SHA256, run_id, {})
    return Objects(s3, name, prefix, tmp_path)


def read_origin(objects: Objects) -> None:
    found = origin.read(objects.store, objects.name, "1")
    assert found.config.data.source == found.whole_config["data"]["source"]


def read_release(objects: Objects) -> None:
    release_files.read_owner(objects.store, objects.prefix)
    for key in ("release.json", "model.json", "verdict.json", "dataset.json"):
        (objects.folder / key).write_bytes(objects.store.get(objects.prefix + key))
    read_file(release_files.Record, objects.folder / "release.json")
    read_description(objects.folder)
    release_files.read_verdict(objects.folder)
    dataset_facts(objects.folder)


def read_cache(objects: Objects) -> None:
    entry = entries.read(objects.store, KEY)
    if entry:
        json.dumps(entry.outputs)
        entries.reason_invalid(entry, lambda name: (1, len(name)))
        difference.differences(objects.store, entry.facts, {**ENTRY["facts"], "code": "other"})
    entries.list_stale(objects.store, 1, 1.0)


def read_claims(objects: Objects) -> None:
    claims.claimed_tasks(objects.store, 1.0)


def read_promotion(objects: Objects) -> None:
    promotion.list_versions_in_use(objects.store, objects.name)
    promotion.read_pending_rollback(objects.store, objects.name)


def read_reference(objects: Objects) -> None:
    reference = drift.read_object(
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
    study = Study(objects.store, f"{objects.name}/search", SWEEP)
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


IDS = [f"{key} {read.__name__}" for key, _, read in READERS]


@pytest.mark.parametrize(("key", "document", "read"), READERS, ids=IDS)
def test_every_field_of_a_document_is_validated_where_it_is_read(
    objects: Objects, key: str, document: Any, read: Callable[[Objects], None]
) -> None:
    for other, content in STUDY.items() if key.startswith("NAME/search") else ():
        objects.store.put(f"{objects.name}/search/{other}", json.dumps(content).encode())

    key = key.replace("NAME", objects.name)
    objects.store.put(key, json.dumps(document).encode())
    read(objects)
    rejected = 0

    for data in mutations(document):
        objects.store.put(key, data)
        try:
            read(objects)
        except RekindleError as error:
            assert error.exit_code in (1, 65, 78), (data, error)
            assert "\n" not in str(error) and not set(str(error)) & set(
                INVISIBLE.replace("-", "")
            ), (data, error)
            rejected += 1
        except Exception as error:
            raise AssertionError(f"{type(error).__name__} {error} for {data[:2000]!r}") from error

    objects.store.delete([key])
    assert rejected or key.startswith("cache") or key.endswith(".rekindle.json")


@pytest.mark.parametrize("document", ["release.json", "model.json", "origin.json", "curve.json"])
def test_a_command_prints_one_line_for_a_malformed_document(
    objects: Objects, document: str
) -> None:
    objects.store.put(objects.prefix + document, b'{"\x1b[31m": 5}')
    command = [sys.executable, "-m", "rekindle", "reproduce", f"{objects.name}@1", "--check"]
    environment = {**os.environ, "REKINDLE_HOME": str(objects.folder / "home")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    [line] = done.stderr.splitlines()
    assert done.returncode == 1
    assert line.startswith("error: ")
    assert f"{objects.store.uri(objects.prefix)}{document} is malformed: " in line


@pytest.mark.parametrize("text", ["5", "[]", "{", "null", '{"a": 1, "a": 2}', "[" * 100_000])
def test_a_malformed_parameter_of_a_workflow_is_an_error_with_the_name_of_the_run(
    text: str,
) -> None:
    parameters = [{"name": "config", "value": text}, {"name": "cached", "value": text}]
    workflow = {"metadata": {"name": "shop-1"}, "spec": {"arguments": {"parameters": parameters}}}
    with pytest.raises(InvalidDocument, match="the parameter `config` of shop-1 is malformed: "):
        workflow_origin.config(workflow)
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
    assert str(caught.value).startswith("s3://b/model.json is malformed: ") and reason in str(
        caught.value
    )


def test_a_folder_instead_of_a_file_is_an_invalid_document(tmp_path: Path) -> None:
    with pytest.raises(InvalidDocument, match=r"cannot be read: Is a directory"):
        read_file(ModelFile, tmp_path)
