"""Cached tasks are found from the manifest alone, before anything runs, for runs on this machine
and on a cluster."""

import json
from typing import Any

from argolocal.validate import check
from rekindle.blocks.manifest.config import load_config
from rekindle.blocks.manifest.render import manifest_sha256, render_manifest
from rekindle.cache import entries, lookup
from rekindle.cache.entries import Entry
from rekindle.keys import CACHED_PARAMETER
from rekindle.storage import Store
from tests.commands import ROOT

IMAGE = "cluster.image=registry.example.com/rekindle@sha256:" + "ab" * 32


def render_demo(*sets: str) -> dict[str, Any]:
    return render_manifest(
        load_config(
            ROOT / "configs/demo.yaml", ["families=[transformer]", *sets], environment={}
        ).config
    )


def record_run(
    s3: Store,
    cache_result: lookup.CacheResult,
    outputs: dict[str, str],
    artifact: str,
    workflow: str,
) -> None:
    """Record the outputs of a task in the cache, as results of the run `workflow`."""
    s3.put(f"{workflow}/{cache_result.task}/{artifact}/part", b"123")
    artifacts = {artifact: {"sha256": "a" * 64, "files": 1, "bytes": 3}}
    entries.record_entry(
        s3,
        Entry(
            cache_result.key,
            f"{workflow}/{cache_result.task}",
            outputs,
            artifacts,
            {"step": "steps.x"},
            1.0,
        ),
    )


def find_phases(manifest: dict[str, Any], s3: Store, on_cluster: bool = True) -> dict[str, str]:
    return {
        cache_result.task: cache_result.entry.at if cache_result.entry else cache_result.reason
        for cache_result in lookup.look_up_tasks(manifest, {}, s3, is_on_cluster=on_cluster)
    }


def test_a_run_on_a_cluster_skips_tasks_that_are_cached_for_its_image(s3: Store) -> None:
    manifest = render_demo(IMAGE)
    assert [finding for finding in check(manifest) if "error" in str(finding)] == []
    first_manifest, second_manifest = lookup.look_up_tasks(manifest, {}, s3, is_on_cluster=True)
    assert first_manifest.entry is None
    assert second_manifest.reason == "the input digest is known only at run time"
    outputs = {
        "digest": "ab" * 32,
        "rows": "7",
        "source_digest": "",
        "warnings": "[]",
        "unchanged": "",
    }
    record_run(s3, first_manifest, outputs, "dataset", "demo-one")
    _, second_manifest = lookup.look_up_tasks(manifest, {}, s3, is_on_cluster=True)
    record_run(s3, second_manifest, {}, "model", "demo-two")
    cached_tasks = {"prepare": "demo-one/prepare", "train": "demo-two/train"}
    assert find_phases(manifest, s3) == cached_tasks

    same_image_tasks = [
        render_demo(IMAGE, change)
        for change in ("gate.minimum.auc=0.7", "train.workers=4", "serve.port=9000")
    ]
    assert [find_phases(other, s3) for other in same_image_tasks] == [cached_tasks] * 3
    other = find_phases(render_demo(IMAGE, "train.seed=2"), s3)
    assert other["prepare"] == cached_tasks["prepare"]
    assert other["train"].startswith("no cached result")
    assert "demo-one" not in find_phases(render_demo(IMAGE, "data.test_weeks=1"), s3)["prepare"]
    assert "not pinned by digest" in find_phases(render_demo(), s3)["prepare"]
    assert "demo-one" not in find_phases(render_demo(IMAGE + "cd"), s3)["prepare"]
    assert "demo-one" not in find_phases(manifest, s3, on_cluster=False)["prepare"], (
        "this machine runs other code"
    )


def test_the_hash_of_a_manifest_does_not_depend_on_cached_results(s3: Store) -> None:
    manifest = render_demo()
    value = lookup.cached_parameter(
        manifest,
        [
            lookup.CacheResult(
                "prepare", Entry("k", "demo-one/prepare", {"digest": "ab" * 32}, {}, {}, 1)
            )
        ],
    )

    parameter = next(
        p for p in manifest["spec"]["arguments"]["parameters"] if p["name"] == CACHED_PARAMETER
    )
    original = manifest_sha256(manifest)
    parameter["value"] = value
    assert manifest_sha256(manifest) == original
    assert lookup.reused_tasks(manifest) == {"prepare": "demo-one/prepare"}
    assert json.loads(lookup.cached_parameter(manifest, [], allows_reuse=False))["reuse"] == "no"
