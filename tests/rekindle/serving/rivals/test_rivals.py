"""A run whose champion changes before its promotion judges its candidate again, and ends with the
last verdict."""

import json
import os
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest

from rekindle import tracking
from rekindle.local.cluster import LocalCluster
from rekindle.storage import Store
from tests.commands import ROOT
from tests.ports import free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
CONFIG = """
name: {name}
pipeline: tests.rekindle.serving.rivals.pipeline
workload: benchmarks.workloads.quality
data: {{source: "rows://"}}
gate: {{minimum: {{quality: 0}}}}
serve: {{min_replicas: 1, drain_seconds: 0.1, port: {port}}}
"""


def run(home: Path, config: Path, **rivalry: float) -> tuple[int, dict[str, Any]]:
    """Run the pipeline, and return its exit code and its JSON output."""
    sets = (
        flag for name, value in rivalry.items() for flag in ("--set", f"rivalry.{name}={value}")
    )
    command = [sys.executable, "-m", "rekindle", "run", str(config), *sets, "-o", "json"]
    environment = {**os.environ, "REKINDLE_HOME": str(home)}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.stdout, result.stderr
    return result.returncode, json.loads(result.stdout)


def test_the_last_evaluation_decides_about_the_promotion(
    tmp_path: Path, s3: Store, mlflow_server: str
) -> None:
    name = f"rivals-{uuid.uuid4().hex[:6]}"
    config = tmp_path / "rivals.yaml"
    cluster = LocalCluster(tmp_path / "home")
    config.write_text(CONFIG.format(name=name, port=free_port()))
    deployments = cluster.kinds.controllers(cluster, cluster.home / "run")["Deployment"]

    try:
        code, _ = run(cluster.home, config, quality=0.5, rival=0)
        assert code == 0
        code, result = run(cluster.home, config, quality=0.7, rival=0.6)
        champion = tracking.champion(name)
        tags = tracking.read_tags(result["run_id"])
        assert champion
        assert code == 0
        assert result["verdict"] == "release"
        assert "against 0.6000 of the champion (version 2)" in result["reason"] == tags["reason"]
        assert tags["rekindle.promoted"] == f"{name} {champion.version}"
        verdict = json.loads(s3.get(f"{champion.uri}verdict.json"))
        assert verdict["verdict"] == "release"
        assert verdict["champion"]["version"] == "2"
        servers = deployments.names()

        code, result = run(cluster.home, config, quality=0.8, rival=0.9)
        champion = tracking.champion(name)
        tags = tracking.read_tags(result["run_id"])

        assert champion
        assert code == 3
        assert result["verdict"] == "keep"
        assert champion.deployment == f"{name}-rival"

        assert f"(version {champion.version})" in result["reason"] == tags["reason"]
        assert tags["verdict"] == "keep"
        assert [(row["task"], row["verdict"], row["version"]) for row in result["verdicts"]] == [
            ("evaluate", "keep", None)
        ]
        assert deployments.names() == servers
        assert "rekindle.promoted" not in tags
    finally:
        cluster.down()
