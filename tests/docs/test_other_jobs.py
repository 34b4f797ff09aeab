"""The examples of docs/other-jobs.md render and lint, and contain every kind that the page
names."""

import sys
from pathlib import Path
from typing import Any

import pytest

from argolocal.validate import lint
from rekindle import blocks as rekindle_blocks
from rekindle.blocks.manifest.config import load_config
from tests.commands import ROOT, list_blocks, write_files

PAGE = ROOT / "docs/other-jobs.md"
FRAGMENTS = [block for block in list_blocks(PAGE, "python") if not block.file]
KINDS = {"TFJob", "XGBoostJob", "PaddleJob", "JAXJob", "MPIJob", "Job"}


@pytest.fixture
def rendered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The manifests of all fragments of docs/other-jobs.md; each fragment is the body of a
    pipeline."""
    write_files(PAGE, tmp_path)
    monkeypatch.setenv("REKINDLE_PATH", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    config = load_config(ROOT / "tests/golden/config.yaml", environment={}).config
    manifests = []
    for fragment in FRAGMENTS:
        with rekindle_blocks.pipeline(config) as workflow:
            exec(fragment.text, {"config": config, "blocks": rekindle_blocks})
        manifests.append(workflow.to_dict())
    yield manifests
    sys.modules.pop("trainer", None)


def test_every_example_of_other_jobs_renders_and_lints(rendered: Any) -> None:
    applied_kinds: set[str] = set()
    for fragment, manifest in zip(FRAGMENTS, rendered, strict=True):
        templates = manifest["spec"]["templates"]
        applied_manifests = [
            template["resource"].get("manifest", "")
            for template in templates
            if "resource" in template
        ]

        applied_kinds.update(
            {kind for kind in KINDS for text in applied_manifests if f'"kind": "{kind}"' in text}
        )

        if len(templates) == 1:  # skip the volume claim, which users apply by hand
            continue

        errors = [str(finding) for finding in lint(manifest) if finding.fatal]
        assert errors == [], fragment

    assert applied_kinds == KINDS
