"""A rendered manifest is deterministic, its hash covers everything that affects the result, and it
contains no secrets."""

import base64
import copy
import json
import os
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from argolocal.language.yaml_text import parse_one
from rekindle.blocks.manifest.config import Config, load_config
from rekindle.blocks.manifest.render import (
    Kind,
    check_golden,
    manifest_sha256,
    render_manifest,
    sort_keys_for_reading,
    to_yaml,
)

GOLDEN = Path(__file__).parents[3] / "golden"
KINDS: tuple[Kind, ...] = ("workflow", "template", "cron")


@pytest.fixture(scope="module")
def config() -> Config:
    return load_config(GOLDEN / "config.yaml", environment={}).config


@pytest.fixture(scope="module")
def workflow(config: Config) -> dict[str, Any]:
    return render_manifest(config)


@pytest.mark.parametrize("kind", ["workflow", "cron"])
def test_the_manifest_matches_the_golden_file(kind: Kind, config: Config) -> None:
    """REGENERATE=1 pytest tests/rekindle/blocks/manifest/test_render.py updates the golden
    manifests."""
    check_golden(render_manifest(config, kind), GOLDEN / f"{kind}.yaml")


@pytest.mark.parametrize("kind", KINDS)
def test_the_yaml_has_the_same_content_as_the_manifest(kind: Kind, config: Config) -> None:
    manifest = render_manifest(config, kind)
    assert yaml.safe_load(to_yaml(manifest)) == manifest == json.loads(json.dumps(manifest))


def test_a_recorded_config_renders_the_same_manifest(tmp_path: Path) -> None:
    pods = {"train": {"cpu": "50m", "preset": ["small"]}, "evaluate": {"memory": "1Gi"}}
    cluster = {
        "image": "registry/rekindle@sha256:1f",
        "pods": pods,
        "presets": {"small": {"memory": "3Gi"}},
    }

    given = tmp_path / "given.yaml"
    recorded = tmp_path / "recorded.yaml"
    given.write_text(
        yaml.safe_dump(yaml.safe_load((GOLDEN / "config.yaml").read_text()) | {"cluster": cluster})
    )
    manifest = render_manifest(load_config(given, environment={}).config)
    (text,) = (
        p["value"] for p in manifest["spec"]["arguments"]["parameters"] if p["name"] == "config"
    )
    recorded.write_text(text)
    repeated_manifest = render_manifest(load_config(recorded, environment={}).config)
    assert manifest_sha256(repeated_manifest) == manifest_sha256(manifest)


def test_another_process_renders_the_same_bytes() -> None:
    """The manifest does not depend on the order of sets or on the environment."""
    script = (
        "import sys; from pathlib import Path; from rekindle.blocks.manifest.config import"
        " load_config;from rekindle.blocks.manifest.render import render_manifest,"
        " to_yaml;sys.stdout.write(to_yaml(render_manifest(load_config(Path(sys.argv[1]),"
        " environment={}).config)))"
    )

    outputs = set()

    for seed in ("1", "2"):
        environment = {
            **os.environ,
            "PYTHONHASHSEED": seed,
            "S3_ENDPOINT_URL": f"http://10.0.0.{seed}:9000",
        }
        command = [sys.executable, "-c", script, str(GOLDEN / "config.yaml")]
        outputs.add(
            subprocess.run(command, env=environment, capture_output=True, check=True).stdout
        )

    assert len(outputs) == 1


def test_manual_and_scheduled_runs_have_the_same_hash(
    config: Config, workflow: dict[str, Any]
) -> None:
    template = render_manifest(config, "template")
    assert template["spec"] == workflow["spec"]
    assert manifest_sha256(template) == manifest_sha256(workflow)


def test_a_run_has_the_hash_of_its_manifest(workflow: dict[str, Any]) -> None:
    parameters = {p["name"]: p["value"] for p in workflow["spec"]["arguments"]["parameters"]}
    assert parameters["manifest_hash"] == manifest_sha256(workflow)
    assert len(parameters["config_hash"]) == 64


def test_a_run_contains_its_config_and_a_manifest_to_repeat_it(
    config: Config, workflow: dict[str, Any]
) -> None:
    parameters = {p["name"]: p["value"] for p in workflow["spec"]["arguments"]["parameters"]}
    assert type(config).model_validate_json(parameters["config"]) == config
    recorded_manifest = yaml.safe_load(zlib.decompress(base64.b64decode(parameters["manifest"])))
    assert [
        p.pop("value")
        for p in recorded_manifest["spec"]["arguments"]["parameters"]
        if p["name"] == "manifest"
    ] == [""]
    workflow_copy = copy.deepcopy(workflow)
    del next(
        p for p in workflow_copy["spec"]["arguments"]["parameters"] if p["name"] == "manifest"
    )["value"]
    assert recorded_manifest == workflow_copy


def test_the_hash_does_not_cover_provenance(workflow: dict[str, Any]) -> None:
    other = copy.deepcopy(workflow)
    other["metadata"] = {"name": "cards-abcde"}
    for parameter in other["spec"]["arguments"]["parameters"]:
        parameter["value"] = "another"
    assert manifest_sha256(other) == manifest_sha256(workflow)
    other["spec"]["entrypoint"] = "ship"
    assert manifest_sha256(other) != manifest_sha256(workflow)


@pytest.mark.parametrize(
    "change", ["train.seed=12", "data.test_weeks=3", "cluster.image=b:1", "gate.tolerance=0.2"]
)
def test_a_setting_that_affects_the_result_changes_the_hash(
    change: str, workflow: dict[str, Any]
) -> None:
    changed = load_config(GOLDEN / "config.yaml", [change], environment={}).config
    assert manifest_sha256(render_manifest(changed)) != manifest_sha256(workflow)


def test_the_hash_does_not_cover_the_schedule(workflow: dict[str, Any]) -> None:
    changed = load_config(
        GOLDEN / "config.yaml", ["schedule.cron=0 4 * * *"], environment={}
    ).config
    assert manifest_sha256(render_manifest(changed)) == manifest_sha256(workflow)


def test_a_manifest_contains_neither_addresses_nor_credentials(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    secrets = {
        "S3_ENDPOINT_URL": "http://127.0.0.1:45871",
        "S3_BUCKET": "bucket-45871",
        "MLFLOW_TRACKING_URI": "http://127.0.0.1:45872",
        "AWS_ACCESS_KEY_ID": "AKIA45873",
        "AWS_SECRET_ACCESS_KEY": "secret-45874",
    }
    for name, value in secrets.items():
        monkeypatch.setenv(name, value)

    for kind in KINDS:
        text = to_yaml(render_manifest(config, kind))
        assert not [name for name in secrets if name in text]
        assert "4587" not in text
        assert str(Path.cwd()) not in text


def test_a_workflow_without_the_parameters_of_rekindle_can_be_hashed() -> None:
    arguments = {"parameters": [{"name": "n", "value": 1}]}
    manifest = {"kind": "Workflow", "spec": {"entrypoint": "a", "arguments": arguments}}
    other = copy.deepcopy(manifest)
    other["spec"]["arguments"]["parameters"][0]["value"] = 2
    assert manifest_sha256(manifest) != manifest_sha256(other)


PLAIN_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(st.dictionaries(st.text(max_size=8), PLAIN_VALUES, max_size=4))
def test_any_text_survives_a_round_trip_through_yaml(values: dict[str, Any]) -> None:
    assert yaml.safe_load(to_yaml(values)) == values
    assert sort_keys_for_reading(values) == values


@pytest.mark.parametrize(
    "text", ["1e-05", "0o7", ".5", "y", "N", "on", "1_000", "1:30", "2024-01-01", "~"]
)
def test_kubernetes_reads_a_text_of_the_manifest_as_a_text(text: str) -> None:
    values = {"value": text, "values": [text, 8, 1e-05, -1.5, True]}
    assert parse_one(to_yaml(values), "it") == values
