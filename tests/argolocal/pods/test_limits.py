"""Tests of memory limits: a step that would be killed on a cluster is killed on this machine, too,
and leaves no processes or cgroups."""

import os
import subprocess
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from argolocal.common import processes
from argolocal.controllers import pod_process as pods
from argolocal.errors import ConfigError
from argolocal.language.quantity import parse_quantity
from argolocal.pods import limits
from argolocal.runner.cluster import LocalCluster
from argolocal.runner.preflight import check_workflow
from tests import builders
from tests.argolocal.running import execute_manifest
from tests.waiting import until

needs_cgroups = pytest.mark.skipif(not limits.supports_memory_limits(), reason="needs cgroups")
NAME = f"limited-{os.getpid()}"
MAIN = "from rekindle.cli import main; raise SystemExit(main())"
COMMAND_WITHOUT_CGROUPS = [
    "unshare",
    "--mount",
    "sh",
    "-c",
    'mount -t tmpfs none /sys/fs/cgroup && exec "$@"',
    "sh",
]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
GREEDY_PROGRAM = "import sys; x = bytearray(int(sys.argv[1]) << 20)"


def make_limited_workflow(megabytes: int, limit: str, **more: Any) -> dict[str, Any]:
    container = {
        "image": "python:3.11",
        "command": ["python3", "-c", GREEDY_PROGRAM, str(megabytes)],
        "resources": {"limits": {"memory": limit}},
    }
    template = {"name": "main", "container": container, **more}
    return builders.make_workflow(template, name=NAME)


def list_cgroups() -> list[Path]:
    parent = limits._find_cgroup_parent()
    if parent:
        return [*parent[0].glob(f"{limits.CGROUP_PREFIX}*-{NAME}*")]
    return []


@needs_cgroups
def test_a_step_over_its_memory_limit_is_oom_killed(tmp_path: Path) -> None:
    status = execute_manifest(make_limited_workflow(200, "100Mi"), {}, LocalCluster(tmp_path))
    assert status["phase"] == "Failed"
    assert status["message"] == "main: OOMKilled (exit code 137)"
    assert not list_cgroups()


@needs_cgroups
def test_a_step_within_its_memory_limit_succeeds(tmp_path: Path) -> None:
    assert (
        execute_manifest(make_limited_workflow(20, "100Mi"), {}, LocalCluster(tmp_path))["phase"]
        == "Succeeded"
    )
    assert not list_cgroups()


@needs_cgroups
def test_a_retry_can_have_more_memory(tmp_path: Path) -> None:
    memory = '"{{=(sprig.int(retries) + 1) * 100}}Mi"'
    patch = (
        '{"containers": [{"name": "main", "resources": {"limits": {"memory": MEMORY}}}]}'.replace(
            "MEMORY", memory
        )
    )
    retry = {"limit": "2", "expression": 'lastRetry.exitCode == "137"'}
    status = execute_manifest(
        make_limited_workflow(150, "1Gi", podSpecPatch=patch, retryStrategy=retry),
        {},
        LocalCluster(tmp_path),
    )
    phases = {node["name"]: node["phase"] for node in status["nodes"].values()}
    assert phases == {NAME: "Succeeded", f"{NAME}(0)": "Failed", f"{NAME}(1)": "Succeeded"}


@needs_cgroups
def test_a_program_that_cannot_start_leaves_no_cgroup(tmp_path: Path) -> None:
    manifest = make_limited_workflow(1, "100Mi")
    manifest["spec"]["templates"][0]["container"]["command"] = ["/no/such/program"]
    assert execute_manifest(manifest, {}, LocalCluster(tmp_path))["phase"] == "Failed"
    assert not list_cgroups()


@needs_cgroups
def test_memory_limits_apply_to_the_pods_of_a_job(tmp_path: Path) -> None:
    container = {
        "name": "main",
        "image": "python:3.11",
        "command": [sys.executable, "-c", GREEDY_PROGRAM, "200"],
    }
    spec = {"containers": [{**container, "resources": {"limits": {"memory": "100Mi"}}}]}
    pod = pods.Pod(LocalCluster(tmp_path), "p", spec, tmp_path, {})
    assert until("the pod to end", pod.poll) == 137


@needs_cgroups
def test_processes_that_a_step_leaves_end_with_the_step(tmp_path: Path) -> None:
    manifest = make_limited_workflow(1, "100Mi")
    script = "setsid sleep 300 & echo $!; sleep 0.2"
    manifest["spec"]["templates"][0]["container"]["command"] = ["sh", "-c", script]
    assert execute_manifest(manifest, {}, LocalCluster(tmp_path))["phase"] == "Succeeded"
    pid = int(next((tmp_path / f"runs/{NAME}/logs").iterdir()).read_text())
    assert not list_cgroups()
    assert processes.read_start_ticks(pid) is None


@needs_cgroups
def test_a_runner_does_not_remove_the_cgroups_of_another_live_runner() -> None:
    own_cgroup = limits.create_memory_cgroup(
        {"resources": {"limits": {"memory": "100Mi"}}}, f"{NAME}.main"
    )
    assert own_cgroup
    other = "from argolocal.pods import limits; assert limits.supports_memory_limits()"
    subprocess.run([sys.executable, "-c", other], check=True, env=ENVIRONMENT)
    assert own_cgroup.folder.exists()
    own_cgroup.close()
    assert not own_cgroup.folder.exists()


@needs_cgroups
def test_cgroups_of_a_dead_runner_are_removed_by_the_next_runner() -> None:
    dies = (
        "from argolocal.pods import limits\nmemory = limits.create_memory_cgroup({'resources': {'limits':"
        " {'memory': '1Gi'}}}, 'dies')\nprint(memory.folder)"
    )
    cgroup = Path(
        subprocess.check_output([sys.executable, "-c", dies], text=True, env=ENVIRONMENT).strip()
    )
    assert cgroup.exists()
    limits._remove_abandoned_cgroups(cgroup.parent)
    assert not cgroup.exists()


def test_a_memory_limit_that_is_not_enforced_is_reported(tmp_path: Path) -> None:
    manifest = make_limited_workflow(1, "1Gi")
    manifest["spec"]["templates"][0]["container"]["resources"]["limits"] = {
        "cpu": "1",
        "nvidia.com/gpu": 1,
    }
    assert any(
        "not enforced here: cpu, nvidia.com/gpu" in note
        for note in check_workflow(manifest, LocalCluster(tmp_path))
    )


@pytest.mark.parametrize("memory", ["1 Gi", "much", "{{inputs.parameters.memory}}", True, "-1Mi"])
def test_an_invalid_memory_limit_is_reported(memory: Any, tmp_path: Path) -> None:
    manifest = make_limited_workflow(1, "1Gi")
    manifest["spec"]["templates"][0]["container"]["resources"]["limits"]["memory"] = memory
    with pytest.raises(ConfigError, match=r"templates\[0\]\.container\.resources\.limits.*memory"):
        check_workflow(manifest, LocalCluster(tmp_path))


@pytest.mark.skipif(
    subprocess.run([*COMMAND_WITHOUT_CGROUPS, "true"], capture_output=True).returncode != 0,
    reason="needs mounts",
)
def test_a_run_says_that_memory_limits_are_not_enforced(tmp_path: Path) -> None:
    manifest = tmp_path / "w.yaml"
    manifest.write_text(
        yaml.safe_dump({"apiVersion": "argoproj.io/v1alpha1", **make_limited_workflow(20, "10Mi")})
    )
    run = [*COMMAND_WITHOUT_CGROUPS, sys.executable, "-c", MAIN, "run", "--manifest"]
    ended = subprocess.run(
        [*run, str(manifest)], cwd=tmp_path, capture_output=True, text=True, env=ENVIRONMENT
    )
    assert ended.returncode == 0, ended.stderr
    assert "limits of containers that are not enforced here: memory" in ended.stderr


@given(
    st.integers(0, 10**6),
    st.sampled_from(["", "m", "k", "M", "G", "T", "Ki", "Mi", "Gi", "e3", "E2", "Ei", "E"]),
)
def test_quantities_are_parsed_as_in_kubernetes(number: int, unit: str) -> None:
    powers = {"": 0, "m": -3, "k": 3, "M": 6, "G": 9, "T": 12, "e3": 3, "E2": 2, "E": 18}
    exponents = {"Ki": 10, "Mi": 20, "Gi": 30, "Ei": 60}
    expected = Decimal(number) * (
        2 ** exponents[unit] if unit in exponents else Decimal(10) ** powers[unit]
    )
    assert parse_quantity(f"{number}{unit}") == expected
    assert parse_quantity(f"{number}.5{unit}") > expected
