"""The pod that prepares the data finds the models of identical trainings, and copies them to its
own run."""

import json
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from argolocal.validate import check
from rekindle import blocks, tracking
from rekindle.blocks.manifest.config import load_config
from rekindle.blocks.manifest.render import render_manifest
from rekindle.cache import entries, lookup
from rekindle.cache.entries import Entry
from rekindle.cache.reused_models import MODEL_FILES, copy_reused_models
from rekindle.keys import CACHED_PARAMETER
from rekindle.step import encode_parameter
from rekindle.storage import Store
from tests.commands import ROOT, open_shell
from tests.ports import free_port

IMAGE = "cluster.image=registry.example.com/rekindle@sha256:" + "ab" * 32
OUTPUTS = {"digest": "ab" * 32, "rows": "7", "unchanged": ""}


def load_test_config(*sets: str) -> Any:
    return load_config(
        ROOT / "configs/demo.yaml", ["families=[transformer]", *sets], environment={}
    ).config


def render_demo(*sets: str) -> dict[str, Any]:
    return render_manifest(load_test_config(*sets))


def parameters_of(manifest: dict[str, Any]) -> dict[str, str]:
    return {row["name"]: row["value"] for row in manifest["spec"]["arguments"]["parameters"]}


def reused_models(
    store: Store, manifest: dict[str, Any], run: str, outputs: dict[str, str] = OUTPUTS
) -> dict[str, str]:
    """Return the location of the model of each training, after `prepare` of `run` has looked up
    these models."""
    cached_parameter = json.loads(parameters_of(manifest)[CACHED_PARAMETER])
    rows = copy_reused_models(
        store, encode_parameter(json.dumps(manifest)), cached_parameter, f"{run}/prepare", outputs
    )
    assert rows.keys() == cached_parameter.keys(), "the conditions of the workflow need every row"
    return {
        row["task"]: row["at"]
        for row in rows.values()
        if isinstance(row, dict) and row["task"] != "prepare"
    }


SETTINGS = IMAGE, f"train.seed={uuid.uuid4().int % 10**9}"


@pytest.fixture
def trained(s3: Store, monkeypatch: pytest.MonkeyPatch) -> str:
    """RUN/TASK of a training on a cluster with the config `SETTINGS`; the cache has an entry of
    this training."""
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    at = f"one-{uuid.uuid4().hex[:6]}/train"
    prepared = {"task": "prepare", **OUTPUTS, "at": "zero/prepare"}
    rows = json.dumps({"prepare": prepared, "train": {"task": "train", "at": ""}})
    (result,) = lookup.look_up_tasks(
        render_demo(*SETTINGS), {CACHED_PARAMETER: rows}, s3, is_on_cluster=True
    )

    for name in MODEL_FILES:
        s3.put(f"{at}/model/{name}", name.encode())

    artifacts = {
        "model": {"sha256": "", "files": len(MODEL_FILES), "bytes": len("".join(MODEL_FILES))}
    }
    entries.remove_entries(s3, [entry] if (entry := entries.read_entry(s3, result.key)) else [])
    entries.record_entry(s3, Entry(result.key, at, {}, artifacts, result.facts or {}, 1.0))

    return at


def test_the_model_of_an_identical_training_is_copied_to_the_run(s3: Store, trained: str) -> None:
    changes = [(), ("gate.minimum.auc=0.7",), ("train.workers=4", "data.tolerated_rejects=0.01")]
    for number, change in enumerate(changes):
        assert reused_models(s3, render_demo(*SETTINGS, *change), f"two-{number}") == {
            "train": trained
        }
        assert [s3.get(f"two-{number}/train/model/{name}") for name in MODEL_FILES] == [
            name.encode() for name in MODEL_FILES
        ]
        assert s3.get(f"two-{number}/train/cached").decode() == trained
    assert reused_models(s3, render_demo(*SETTINGS), trained.partition("/")[0]) == {"train": ""}, (
        "a retry of the same run"
    )


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize(
    "artifacts",
    [
        {},
        {"model": {"sha256": "", "files": 0, "bytes": 0}},
        {"another": {"sha256": "", "files": 1, "bytes": 1}},
    ],
)
def test_an_entry_of_a_training_without_its_model_is_not_reused(
    s3: Store, trained: str, artifacts: dict[str, Any]
) -> None:
    s3.put(f"{trained}/another/x", b"1")
    prepared = {"task": "prepare", **OUTPUTS, "at": "zero/prepare"}
    rows = json.dumps({"prepare": prepared, "train": {"task": "train", "at": ""}})
    values = {CACHED_PARAMETER: rows}
    (result,) = lookup.look_up_tasks(render_demo(*SETTINGS), values, s3, is_on_cluster=True)
    assert result.entry
    assert result.entry.at == trained

    s3.delete([f"{trained}/model/{name}" for name in MODEL_FILES])
    entries.record_entry(s3, replace(result.entry, artifacts=artifacts))
    (result,) = lookup.look_up_tasks(render_demo(*SETTINGS), values, s3, is_on_cluster=True)
    assert not result.entry


@pytest.mark.slow
def test_another_training_is_not_reused(s3: Store, trained: str) -> None:
    image, seed = SETTINGS
    for settings in [
        (*SETTINGS, "train.seed=1"),
        (*SETTINGS, "model.layers=1"),
        (f"{image}cd", seed),
        (seed,),
    ]:
        assert reused_models(s3, render_demo(*settings), "with-another-training") == {"train": ""}
    assert reused_models(
        s3, render_demo(*SETTINGS), "with-another-training", OUTPUTS | {"digest": "de" * 32}
    ) == {"train": ""}
    assert not list(s3.list("with-another-training/"))


def test_the_value_of_a_parameter_of_the_pipeline_is_not_taken_from_the_manifest(
    s3: Store, trained: str
) -> None:
    loaded = load_test_config(*SETTINGS)
    models = {}
    for start in ("", "{{workflow.parameters.start}}"):
        with blocks.pipeline(loaded, arguments={"start": ""}) as workflow:
            if start:
                blocks.train(blocks.prepare(), start=start)
            else:
                blocks.train(blocks.prepare())
        models[start] = reused_models(s3, workflow.to_dict(), "asked")["train"]
    assert models == {"": trained, "{{workflow.parameters.start}}": ""}


def test_a_training_in_a_group_is_found(s3: Store, trained: str) -> None:
    with blocks.pipeline(load_test_config(*SETTINGS)) as workflow:
        data = blocks.prepare(task="prepare")
        with blocks.group("deep"), blocks.group("deeper"):
            blocks.train(data)
    manifest = workflow.to_dict()
    assert [str(finding) for finding in check(manifest) if "error" in str(finding)] == []
    assert reused_models(s3, manifest, "nested") == {"train": trained}


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("loss", ["file", "store", "manifest"])
def test_a_failure_of_the_look_up_leads_to_a_training(
    s3: Store, trained: str, loss: str, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = render_demo(*SETTINGS)
    store = s3
    cached_parameter = json.loads(parameters_of(manifest)[CACHED_PARAMETER])
    packed = "" if loss == "manifest" else encode_parameter(json.dumps(manifest))

    # the cache entry looks complete, because another file has as many bytes as the missing file
    if loss == "file":
        curve = f"{trained}/model/{MODEL_FILES[1]}"
        s3.put(f"{curve}.copy", s3.get(curve))
        s3.delete([curve])
    elif loss == "store":
        store = Store(
            s3.bucket, f"http://127.0.0.1:{free_port()}", "key", "secret", short_retries=True
        )

    assert (
        copy_reused_models(store, packed, cached_parameter, f"lost-{loss}/prepare", OUTPUTS)
        == cached_parameter
    )
    assert "are not looked up further" in capsys.readouterr().err
    assert s3.head(f"lost-{loss}/train/model/model.json") is None, (
        "it would mark the training as complete"
    )


@pytest.mark.slow
@pytest.mark.timeout(600)  # three runs
def test_a_scheduled_run_with_a_reused_model_starts_no_job(
    tmp_path: Path, s3_environment: dict[str, str], mlflow_server: str
) -> None:
    settings = {
        "DATA__SOURCE": "simulate://7?cards=150&terminals=300&days=70",
        "FAMILIES": "[transformer]",
        "TRAIN__EPOCHS": "1",
        "GATE__MINIMUM": "{auc: 0.999}",
        "HOME": str(tmp_path / "home"),
    }

    environment = {f"REKINDLE_{name}": value for name, value in settings.items()} | s3_environment
    # a CronWorkflow starts its runs with these parameters, without a look-up in the cache
    cached_parameter = parameters_of(render_demo())[CACHED_PARAMETER]
    command = (
        f"rekindle run {ROOT}/configs/demo.yaml -o json -p scheduled-time=2024-04-15T03:00:00Z"
    )
    results = []
    seed = uuid.uuid4().int % 10**9

    with open_shell(tmp_path, **environment, MLFLOW_TRACKING_URI=mlflow_server) as typed:
        # with other limits of the data, `prepare` computes the same dataset again
        for more in ("", "--set gate.tolerance=0.02", "--set data.tolerated_rejects=0.01"):
            completed = typed(
                f"{command} -p 'cached={cached_parameter}' --set train.seed={seed} {more}"
            )
            assert completed.returncode == 3, f"{completed.stdout}{completed.stderr}"
            results.append(json.loads(completed.stdout))

    first_result, *later_results = results
    for result in later_results:
        step = next(step for step in result["steps"] if step["name"] == "train")
        assert step["phase"] == "Cached"
        assert step["message"] == f"by {first_result['workflow']}/train"
        assert result["verdict"] == first_result["verdict"]
        assert result["model_sha256"] == first_result["model_sha256"]
        tags = tracking.read_tags(result["run_id"])
        assert tags["rekindle.cached.train"] == f"{first_result['workflow']}/train"
        assert ("rekindle.cached.prepare" in tags) == (result is results[1])

    jobs = [file.stem for file in (tmp_path / "home/objects/PyTorchJob").glob("[!.]*.json")]
    assert jobs == [f"{first_result['workflow']}-train"]
