"""Differences between a release and this machine are reported before anything is trained."""

import json
import os
import platform
import subprocess
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from argolocal.errors import InvalidDocument
from rekindle.blocks.manifest import provenance
from rekindle.cache import code, key
from rekindle.documents import ModelFile, parse
from rekindle.errors import ConfigError
from rekindle.operations.reproduce import known_differences
from rekindle.operations.reproduce.checkout import check_out, find_commit
from rekindle.operations.reproduce.known_differences import (
    RawData,
    ReleaseCommit,
    find_code_differences,
    find_environment_differences,
    find_machine_differences,
)
from rekindle.operations.reproduce.reproduction import (
    RunInputs,
    find_manifest_differences,
    list_program_findings,
    make_run_parameters,
    make_training_config,
)
from rekindle.operations.reproduce.suspended_values import find_missing_values, resume_at_once
from rekindle.release.origin import Origin, RunFile
from rekindle.storage import Store

STEP = "from pydantic import BaseModel\n\nLIMIT = 3\n"


def run_git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@b")
    return subprocess.run(
        ["git", *identity, *arguments], cwd=folder, check=True, capture_output=True, text=True
    ).stdout


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository whose project is in the folder `shop`; the working directory is the project."""
    folder = tmp_path / "repository"

    files = {
        "shop/pipelines/a.py": "",
        "shop/steps/shop.py": STEP,
        "shop/data/sales.csv": "1,2\n",
        "uv.lock": "v1",
        ".gitattributes": "*.csv export-ignore\n",
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)

    run_git(folder, "init", "-q")
    run_git(folder, "add", "-A")
    run_git(folder, "commit", "-qm", "first")
    monkeypatch.chdir(folder / "shop")
    monkeypatch.delenv("REKINDLE_PATH", raising=False)

    return folder


@pytest.fixture
def make_origin(repository: Path) -> Callable[..., Origin]:
    """Return the function that describes a release of the repository, in its current state."""

    def make(**changes: Any) -> Origin:
        folder = repository / "shop"
        source = str(changes.pop("source", folder / "data/sales.csv"))
        facts = {
            "git_sha": run_git(repository, "rev-parse", "HEAD").strip(),
            "lock_hash": provenance.hash_lock_file(folder),
        }
        facts.update({"source_digest": key.data_digest(source)} | changes.pop("provenance", {}))

        run = {
            "python": platform.python_version(),
            "packages": code.list_packages(),
            "modules": ["steps.shop"],
            "code": code.module_digests(["steps.shop"], [str(folder)]),
            "created": "2026-11-02T03:00:00Z",
        }

        run.update(
            {"parameters": {"config": json.dumps({"data": {"source": source}})}}
            | changes.pop("run", {})
        )
        run = parse(RunFile, json.dumps({"manifest": {}} | run), "origin.json")
        model = {"sha256": "ab", "workload": "steps.shop"} | changes.pop("model", {})
        model_file = parse(ModelFile, json.dumps(model), "model.json")

        return Origin("shop", "3", "releases/shop/1/", "ab", facts, {}, model_file, run, {})

    return make


def test_a_commit_is_checked_out_without_a_trace_in_the_repository(
    repository: Path, tmp_path: Path
) -> None:
    earlier_paths = sorted(str(path) for path in repository.rglob("*"))
    folder = check_out(find_commit("HEAD"), tmp_path / "checkout")
    assert folder == tmp_path / "checkout/shop"
    assert (folder / "data/sales.csv").read_text() == "1,2\n"
    assert sorted(str(path) for path in repository.rglob("*")) == earlier_paths
    assert run_git(repository, "worktree", "list").count("\n") == 1
    assert not run_git(repository, "status", "--short")


def test_an_unchanged_project_has_no_findings(
    make_origin: Callable[..., Origin], tmp_path: Path
) -> None:
    origin = make_origin()
    commit = ReleaseCommit(origin, "")
    folder = check_out(commit.sha, tmp_path / "checkout")
    differences = [
        *commit.findings(),
        *find_code_differences(origin, commit, folder),
        *find_environment_differences(origin),
    ]
    assert [*differences, *RawData(origin, "", folder).findings()] == []


@pytest.mark.parametrize(
    ("sha", "text"), [("0" * 40, "is not in the repository"), ("", "outside of a git repository")]
)
def test_a_missing_commit_is_refused(
    make_origin: Callable[..., Origin], sha: str, text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        ReleaseCommit(make_origin(provenance={"git_sha": sha}), "")
    assert ReleaseCommit(make_origin(provenance={"git_sha": sha}), "HEAD").sha


@pytest.mark.parametrize(
    ("changed", "is_fatal"), [("steps/shop.py", True), ("pipelines/a.py", False)]
)
def test_uncommitted_changes_are_fatal_only_in_the_code_of_the_run(
    repository: Path,
    make_origin: Callable[..., Origin],
    tmp_path: Path,
    changed: str,
    is_fatal: bool,
) -> None:
    (repository / "shop" / changed).write_text("LIMIT = 4\n")
    origin = make_origin(
        provenance={"git_sha": run_git(repository, "rev-parse", "HEAD").strip() + "-dirty"}
    )
    commit = ReleaseCommit(origin, "")
    [finding] = find_code_differences(origin, commit, check_out(commit.sha, tmp_path / "checkout"))
    assert finding.fatal is is_fatal
    assert ("steps.shop" if is_fatal else "uncommitted changes") in finding.text


def test_a_module_that_only_the_work_tree_has_is_not_in_the_commit(
    repository: Path,
    make_origin: Callable[..., Origin],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(repository / "shop"))
    (repository / "shop/steps/shop.py").write_text("from . import extra\nimport single\n")
    (repository / "shop/steps/extra.py").touch()
    (repository / "shop/single.py").touch()
    origin = make_origin(
        provenance={"git_sha": run_git(repository, "rev-parse", "HEAD").strip() + "-dirty"}
    )
    commit = ReleaseCommit(origin, "")
    [finding] = find_code_differences(origin, commit, check_out(commit.sha, tmp_path / "checkout"))
    assert finding.fatal
    assert "single, steps.extra, steps.shop: " in finding.text


def test_another_environment_is_reported(
    repository: Path, make_origin: Callable[..., Origin]
) -> None:
    image = {"image": "registry/shop:1", "image_digest": "sha256:1"}
    packages = [name for name in code.list_packages() if not name.startswith("torch-")]
    origin = make_origin(
        provenance=image, run={"python": "3.9.1", "packages": [*packages, "torch-1.0.0"]}
    )
    (repository / "uv.lock").write_text("v2")
    differences = {
        finding.subject: finding.text for finding in find_environment_differences(origin)
    }
    assert differences.keys() == {"python", "lock", "packages", "image"}

    assert "3.9.1" in differences["python"]
    assert "torch 1.0.0 → " in differences["packages"]
    assert "registry/shop:1" in differences["image"]


def test_changed_data_is_an_error_with_both_digests(
    repository: Path, make_origin: Callable[..., Origin], tmp_path: Path
) -> None:
    raw = tmp_path / "raw.csv"
    raw.write_text("1,2\n3,4\n")
    origin = make_origin(source=raw)
    wanted = origin.provenance["source_digest"]
    raw.write_text("1,2\n3,5\n")
    [finding] = RawData(origin, "", tmp_path).findings()
    assert finding.fatal
    assert wanted in finding.text
    assert key.data_digest(str(raw)) in finding.text
    raw.unlink()
    [finding] = RawData(origin, "", tmp_path).findings()
    assert finding.fatal
    assert "does not exist" in finding.text
    assert wanted in finding.text
    moved = tmp_path / "moved.csv"
    moved.write_text("1,2\n3,4\n")
    data = RawData(origin, str(moved), tmp_path)
    assert not [*data.findings()]
    assert data.source == str(moved)
    assert RawData(origin, str(moved), tmp_path / "checkout").description == str(moved)


def test_changed_and_deleted_objects_are_errors_with_the_digest_of_the_release(
    s3: Store, make_origin: Callable[..., Origin], tmp_path: Path
) -> None:
    key = uuid.uuid4().hex
    uri = f"s3://{s3.bucket}/{key}"
    s3.put(f"{key}/sales.csv", b"1,2")
    origin = make_origin(source=uri)
    s3.put(f"{key}-copy/sales.csv", b"1,2")
    assert not [*RawData(origin, "", tmp_path).findings()], "a neighbour is not part of the data"
    s3.put(f"{key}/sales.csv", b"1,3")
    [changed] = RawData(origin, "", tmp_path).findings()
    s3.delete([f"{key}/sales.csv", f"{key}-copy/sales.csv"])
    [deleted] = RawData(origin, "", tmp_path).findings()
    [unknown] = RawData(origin, "s3://missing-bucket/sales.csv", tmp_path).findings()
    assert all(
        f.fatal and origin.provenance["source_digest"] in f.text
        for f in (changed, deleted, unknown)
    )
    assert "its digest is" in changed.text
    assert all("does not exist" in f.text for f in (deleted, unknown))


def test_data_in_the_repository_is_read_from_the_commit(
    repository: Path, make_origin: Callable[..., Origin], tmp_path: Path
) -> None:
    origin = make_origin()
    (repository / "shop/data/sales.csv").write_text("changed")
    folder = check_out(find_commit("HEAD"), tmp_path / "checkout")
    data = RawData(origin, "", folder)
    assert not [*data.findings()]
    assert data.source == str(folder / "data/sales.csv")
    assert data.description == "data/sales.csv of the commit"


def test_data_that_steps_cannot_access_is_an_error(
    make_origin: Callable[..., Origin], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path / "sales.csv"
    data.write_text("1,2\n")
    origin = make_origin(provenance={"source_digest": key.data_digest(str(data))})
    monkeypatch.setattr(known_differences, "POD_PRIVATE", tmp_path)
    [finding] = RawData(origin, str(data), tmp_path / "checkout").findings()
    assert finding.fatal
    assert "each step has its own /tmp" in finding.text


@pytest.mark.slow
def test_another_processor_is_an_error(make_origin: Callable[..., Origin]) -> None:
    facts = {
        "torch": "1.0.0",
        "instruction set": "riscv64 DEFAULT",
        "device": "cpu",
        "threads": 1,
        "data": "d",
    }
    model = {"workload": "steps.shop", "model": {}, "train": {"threads": 1}, "fingerprint": facts}
    differences = list(find_machine_differences(make_origin(model=model)))
    assert {finding.subject for finding in differences} == {"torch", "instruction set"}
    assert all(each.fatal for each in differences)


@pytest.mark.parametrize("reads_time", [True, False])
def test_a_moving_window_ends_when_the_run_was_created(
    make_origin: Callable[..., Origin], reads_time: bool
) -> None:
    tag = "{{workflow.parameters.scheduled-time}}"
    manifest = {"spec": {"templates": [{"arguments": tag if reads_time else ""}]}}
    config = json.dumps({"data": {"source": "rows.csv"}})
    parameters = {"config": config, "cached": "{}", "scheduled-time": "", "rows": "7"}
    values = make_run_parameters(make_origin(run={"parameters": parameters, "manifest": manifest}))
    created = "2026-11-02T03:00:00Z" if reads_time else ""
    assert values == {"scheduled-time": created, "rows": "7", "backfill": "true"}


def suspended_manifest() -> dict[str, Any]:
    """Return a DAG with three suspended steps: without a default, with a default, and
    conditional."""
    supplied: list[Any] = [{"supplied": {}}, {"supplied": {}, "default": "5"}, {"supplied": {}}]
    names = ("reviewer", "limit", "address")
    tasks: list[Any] = [{"name": f"ask-{name}", "template": name} for name in names]
    tasks[2]["depends"] = "ask-reviewer"
    tasks[2]["when"] = "{{tasks.ask-reviewer.outputs.parameters.reviewer}} == ann"

    templates = [
        {
            "name": name,
            "suspend": {},
            "outputs": {"parameters": [{"name": name, "valueFrom": source}]},
        }
        for name, source in zip(names, supplied, strict=True)
    ]

    main_template = {"name": "main", "dag": {"tasks": tasks}}

    return {
        "spec": {
            "entrypoint": "main",
            "templates": [main_template, *templates],
            "arguments": {"parameters": []},
        }
    }


def test_unknown_values_of_suspended_steps_are_named_before_the_training() -> None:
    manifest = suspended_manifest()
    differences = {
        finding.text.split('"')[1]: finding for finding in find_missing_values(manifest, {}, {}, {})
    }
    assert {name: finding.fatal for name, finding in differences.items()} == {
        **{"reviewer": True, "limit": False, "address": False},
    }
    assert "ask-reviewer is not recorded" in differences["reviewer"].text
    assert "-p reviewer=VALUE" in differences["reviewer"].text
    assert "its default '5' is used" in differences["limit"].text
    values = {"reviewer": "ann", "limit": "6"}
    assert [*find_missing_values(manifest, {}, values, {"address": "b"})] == []

    with pytest.raises(ConfigError, match=r'-p reviwer: .* Did you mean "reviewer"\?'):
        list(find_missing_values(manifest, {}, {"reviwer": "ann"}, {}))

    resume_at_once(manifest, values)
    sources = {
        each["name"]: each["outputs"]["parameters"][0]["valueFrom"]
        for each in manifest["spec"]["templates"][1:]
    }
    assert {name: source.get("default") for name, source in sources.items()} == values | {
        "address": None
    }


def test_a_training_may_start_from_another_training_of_its_run(
    s3: Store, make_origin: Callable[..., Origin]
) -> None:
    starts = ("releases/base/1f", "shop-4k2xp/train-base/model")
    origins = [make_origin(model={"start": start}, run={"champion": ""}) for start in starts]
    [missing_release], from_run = ([*RunInputs(origin, s3, "").findings()] for origin in origins)
    assert missing_release.fatal
    assert "releases/base/1f" in missing_release.text
    assert not from_run


def test_only_the_released_trial_of_a_sweep_is_trained(make_origin: Callable[..., Origin]) -> None:
    space = {
        "model": {"hidden": {"choices": [4, 8]}},
        "train": {"learning_rate": {"low": 0.001, "high": 0.1}},
    }
    sweep = {"trials": 9, "rungs": 2, "budget": {"hours": 1.0}, "seed": 3, "space": space}
    config = {"name": "shop", "data": {"source": "rows.csv"}, "sweep": sweep}
    model = {"model": {"hidden": 8, "depth": 2}, "train": {"learning_rate": 0.0123, "epochs": 4}}
    run = {"parameters": {"config": json.dumps(config)}, "modules": ["steps.search.trial"]}
    trial = {"model": {"hidden": [8]}, "train": {"learning_rate": [0.0123]}}
    changed = make_training_config(make_origin(run=run, model=model))
    assert changed["sweep"] == {"trials": 1, "rungs": 1, "budget": {}, "seed": 3, "space": trial}
    assert make_training_config(make_origin(run=run | {"modules": []}, model=model)) == config


@pytest.mark.parametrize("place", ["/dev/zero", "fifo"])
def test_data_without_an_end_cannot_be_verified(tmp_path: Path, place: str) -> None:
    path = tmp_path / place
    if place == "fifo":
        os.mkfifo(path)
    assert key.data_digest_or_empty(str(path)) == ""


@pytest.mark.parametrize(
    "revision", ["main", "origin/main", "HEAD~1", ":/message", "HEAD-dirty", "--all"]
)
def test_a_release_cannot_name_another_revision_than_a_commit(
    repository: Path, make_origin: Callable[..., Origin], revision: str
) -> None:
    with pytest.raises(
        ConfigError, match=r"is not the id of a commit \(git_sha of releases/shop/1/release\.json\)"
    ):
        ReleaseCommit(make_origin(provenance={"git_sha": revision}), "")


@pytest.mark.parametrize(
    "name", ["/tmp/x", "steps..shop", "../x", "./../x", ".//x", "steps.a-b", ""]
)
def test_a_module_of_a_release_has_the_name_of_a_module(
    make_origin: Callable[..., Origin], name: str
) -> None:
    with pytest.raises(InvalidDocument, match="is neither the dotted name of a module"):
        make_origin(run={"modules": [name]})


def test_values_of_a_release_cannot_look_like_another_finding(
    make_origin: Callable[..., Origin],
) -> None:
    forged = "3.9\nerror    commit: \x1b[31mforged"
    [finding] = find_environment_differences(make_origin(run={"python": forged}))
    assert "forged" in str(finding)
    assert len(str(finding).splitlines()) == 1
    assert "\x1b" not in str(finding)


def test_the_manifest_of_a_release_may_have_no_arguments(
    make_origin: Callable[..., Origin],
) -> None:
    origin = make_origin(run={"manifest": {"spec": {"templates": []}}})
    [finding] = find_manifest_differences(origin, suspended_manifest())
    assert "+  entrypoint: main" in str(finding).splitlines()


def test_the_result_of_a_program_is_not_trained_again(
    make_origin: Callable[..., Origin],
) -> None:
    assert not list(list_program_findings(make_origin()))

    files = {"final.bin": {"size": 3, "sha256": "cd" * 32}}
    origin = make_origin(model={"files": files})
    [finding] = list_program_findings(origin)
    assert not finding.fatal
    assert "shop 3 is the result of a program, which may write other bits" in str(finding)
