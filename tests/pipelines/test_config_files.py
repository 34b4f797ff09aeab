"""Every config in the repository renders to valid manifests."""

from pathlib import Path

import pytest

from argolocal import validate
from rekindle.blocks.manifest.render import Kind
from tests.rendered import render_kinds

ROOT = Path(__file__).parents[2]
KINDS: list[Kind] = ["workflow", "template", "cron"]


@pytest.mark.parametrize(
    "file", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda file: file.name
)
def test_a_config_of_the_repository_renders_to_manifests_without_findings(file: Path):
    manifests = dict(render_kinds(file.name))
    for kind in KINDS:
        findings = validate.lint(manifests[f"{file.name} {kind}"])
        assert [finding for finding in findings if finding.rule != "image"] == []


@pytest.mark.parametrize(
    "name", ["demo", "sweep", "nightly", "mpi", "trees", "finetuning", "refresh", "approval"]
)
def test_a_release_keeps_the_digest_of_the_raw_data(name: str):
    manifest = dict(render_kinds(f"{name}.yaml"))[f"{name}.yaml workflow"]
    tasks = (
        task
        for template in manifest["spec"]["templates"]
        for task in template.get("dag", {}).get("tasks", [])
    )

    releases = [
        task["arguments"]["parameters"] for task in tasks if task.get("template") == "release"
    ]
    digests = [
        {p["name"]: p["value"] for p in parameters}["source_digest"] for parameters in releases
    ]
    assert digests
    assert all("source_digest" in digest for digest in digests)


def test_every_section_of_the_demo_has_a_comment():
    sections = [line for line in (ROOT / "configs/demo.yaml").read_text().split("\n\n")[1:]]
    assert len(sections) >= 5
    assert [section for section in sections if "#" not in section and "serve" not in section] == []
