"""Tests of `rekindle images build`: the builder's arguments, and the messages; the builders are
replaced by scripts on the PATH."""

import hashlib
import json
import os
import re
import shlex
import subprocess
import sys
import zipfile
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from rekindle.project.template import create
from tests.commands import BIN, ROOT

REKINDLE = str(Path(sys.executable).with_name("rekindle"))
DIGEST = "sha256:" + "d1" * 32
DOCKER = f"""#!/bin/sh
echo "docker $*" >> "$CALLS"
case "$1 $2" in
"info "*) exit ${{DAEMON:-0}};;
"image inspect") echo '["other/rekindle@sha256:0", "r.example.com:5000/rekindle@{DIGEST}"]'; exit;;
esac
while [ $# -gt 0 ]; do [ "$1" = --iidfile ] && printf sha256:1d > "$2"; shift; done
echo "step 1 of 1"
"""
BUILDAH = f"""#!/bin/sh
echo "buildah $*" >> "$CALLS"
while [ $# -gt 0 ]; do
  [ "$1" = --iidfile ] && printf sha256:1d > "$2"
  [ "$1" = --digestfile ] && printf {DIGEST} > "$2"
  [ "$1" = BROKEN=1 ] && exit 3
  shift
done
exit 0
"""


class Builders:
    """A PATH with some builders on it, and the recorded calls of these builders."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "bin"
        self.call_log = folder / "calls"
        self.folder.mkdir()

    def add(self, name: str, script: str) -> "Builders":
        (self.folder / name).write_text(script)
        (self.folder / name).chmod(0o755)
        return self

    def __call__(
        self, *args: str, cwd: Path | None = None, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        path = {
            "PATH": f"{self.folder}:/nowhere",
            "CALLS": str(self.call_log),
            "HOME": os.environ["HOME"],
        }
        command = [REKINDLE, "images", "build", *args]
        return subprocess.run(
            command, env=path | environment, cwd=cwd, capture_output=True, text=True, timeout=60
        )

    def calls(self) -> list[str]:
        return self.call_log.read_text().splitlines()


@pytest.fixture
def builders(tmp_path: Path) -> Builders:
    return Builders(tmp_path)


@pytest.mark.parametrize("name, script", [("docker", DOCKER), ("buildah", BUILDAH)])
def test_a_pushed_image_is_named_by_its_digest(builders: Builders, name: str, script: str):
    builders.add(name, script)
    result = builders("train", "--tag", "r.example.com:5000/rekindle:0.1", "--push", "-o", "json")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["pinned"] == f"r.example.com:5000/rekindle@{DIGEST}"
    assert any(call.startswith(f"{name} push") for call in builders.calls())


@pytest.mark.parametrize("flags", [(), ("--insecure",)])
def test_pushing_without_tls_needs_the_option_insecure(builders: Builders, flags: tuple[str, ...]):
    result = builders.add("buildah", BUILDAH)(
        "train", "--tag", "localhost:5001/rekindle:0.1", "--push", *flags
    )
    assert result.stdout == f"localhost:5001/rekindle@{DIGEST}\n"
    (push,) = (call for call in builders.calls() if call.startswith("buildah push"))
    assert ("--tls-verify=false" in push) == bool(flags)


def test_a_failed_push_explains_registries_without_tls(builders: Builders):
    builders.add("buildah", BUILDAH.replace("while", '[ "$1" = push ] && exit 125\nwhile'))
    result = builders("train", "--tag", "r:1", "--push")
    assert result.returncode == 1
    assert "--insecure" in result.stderr
    assert "insecure-registries" in result.stderr


def test_an_image_gets_its_digest_only_by_a_push(builders: Builders):
    result = builders.add("buildah", BUILDAH)("serve", "--tag", "rekindle-serve:0.1", "-o", "json")
    assert json.loads(result.stdout) == {
        "tag": "rekindle-serve:0.1",
        "id": "sha256:1d",
        "digest": None,
        "pinned": None,
    }
    assert not any(" push " in call for call in builders.calls())


@pytest.mark.parametrize("name, extras", [("train", ""), ("serve", "--build-arg EXTRAS=serve")])
def test_the_serving_image_is_built_from_the_same_dockerfile(
    builders: Builders, name: str, extras: str
):
    builders.add("docker", DOCKER)(name, "--tag", "r:1")
    (build,) = (call for call in builders.calls() if call.startswith("docker build"))
    assert "images/Dockerfile" in build
    assert ("EXTRAS" in build) == bool(extras)
    assert extras in build


def test_a_project_is_built_from_its_own_dockerfile(builders: Builders, tmp_path: Path):
    builders.add("docker", DOCKER)
    assert "rekindle init" in builders("project", "--tag", "shop:1").stderr
    create(tmp_path / "shop")
    assert builders("project", "--tag", "shop:1", cwd=tmp_path / "shop").returncode == 0
    (build,) = (call for call in builders.calls() if call.startswith("docker build"))
    assert f"--file {tmp_path}/shop/images/Dockerfile" in build
    assert build.endswith(f" {tmp_path}/shop")


def test_flags_after_the_dashes_reach_the_builder(builders: Builders):
    builders.add("docker", DOCKER)(
        "mlflow", "--tag", "m:1", "--", "--build-arg", "BASE=python:3.12-slim"
    )
    (build,) = (call for call in builders.calls() if call.startswith("docker build"))
    assert "--build-arg BASE=python:3.12-slim" in build
    assert "--target mlflow" in build


def test_buildah_is_used_if_the_docker_daemon_does_not_run(builders: Builders):
    builders.add("docker", DOCKER).add("buildah", BUILDAH)
    assert builders("train", "--tag", "r:1", DAEMON="1").returncode == 0
    assert any(call.startswith("buildah build") for call in builders.calls())


def test_a_missing_builder_comes_with_install_instructions(builders: Builders):
    result = builders("train", "--tag", "r:1")
    assert result.returncode == 2
    assert "neither is on the PATH" in result.stderr
    assert "apt-get install buildah" in result.stderr


def test_a_failed_build_prints_no_image(builders: Builders):
    result = builders.add("buildah", BUILDAH)(
        "train", "--tag", "r:1", "--", "--build-arg", "BROKEN=1"
    )
    assert result.returncode == 1
    assert result.stdout == ""
    assert "ended with 3" in result.stderr


DOCKERFILE = (ROOT / "images/Dockerfile").read_text()
TORCH = "torch==2.15.0+cpu --hash=sha256:" + "c0" * 32


def export_requirements(folder: Path, torch: str) -> list[str]:
    """Run the commands of the Dockerfile that write requirements.txt; return one line per
    requirement."""
    stage = DOCKERFILE.partition(" AS requirements")[2].partition("FROM ")[0]
    extras = re.findall(r'^ARG EXTRAS="(.+)"', stage, re.MULTILINE)[0]

    for name in ("pyproject.toml", "uv.lock"):
        (folder / name).write_text((ROOT / name).read_text())

    # the first of the commands installs uv
    commands = re.findall(r"^RUN ((?:.*\\\n)*.*)", stage, re.MULTILINE)[1:]
    environment = {
        "EXTRAS": extras,
        "TORCH": torch,
        "PATH": f"{BIN}:/usr/bin:/bin",
        "HOME": os.environ["HOME"],
    }
    for command in commands:
        text = re.sub(r"(?<=[ >])/(?=[a-z]+\.txt)", f"{folder}/", command)
        subprocess.run(["sh", "-ec", text], env=environment, cwd=folder, check=True)

    return re.findall(
        r"^[a-z].*", (folder / "requirements.txt").read_text().replace("\\\n", ""), re.MULTILINE
    )


@pytest.mark.parametrize("torch", ["", TORCH])
def test_every_package_of_an_image_has_a_hash_also_another_build_of_pytorch(
    tmp_path: Path, torch: str
) -> None:
    lines = export_requirements(tmp_path, torch)
    assert len(lines) > 30
    assert [line for line in lines if "--hash=sha256:" not in line] == []
    assert any(line == TORCH for line in lines) == bool(torch)
    assert len([line for line in lines if line.startswith("torch==")]) == 1
    assert any(line.startswith("nvidia-") for line in lines) != bool(torch)
    assert {"sympy", "numpy", "boto3"} <= {line.partition("==")[0] for line in lines}


@pytest.mark.slow
def test_a_second_index_cannot_replace_a_locked_package(tmp_path: Path) -> None:
    """The command of the Dockerfile is tried with two real package indexes with different files of
    the same version."""
    hashes = [_add_package(tmp_path / name, package_code=name) for name in ("first", "second")]
    (install,) = re.findall(r"/venv/bin/pip (install .*) --requirement \S+", DOCKERFILE)
    server = ThreadingHTTPServer(
        ("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=str(tmp_path))
    )
    Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"

    environment = {
        "PIP_INDEX_URL": f"{url}/first",
        "PIP_EXTRA_INDEX_URL": f"{url}/second",
        "PIP_CONFIG_FILE": os.devnull,
    }

    def installed(*lines: str) -> str:
        (tmp_path / "requirements.txt").write_text("\n".join(lines))
        target = [
            "--target",
            str(tmp_path / "site"),
            "--upgrade",
            "--requirement",
            str(tmp_path / "requirements.txt"),
        ]

        command = [BIN / "python", "-m", "pip", *shlex.split(install), *target]

        result = subprocess.run(command, env=environment, capture_output=True, text=True)
        if result.returncode:
            return result.stderr

        return (tmp_path / "site/pkg.py").read_text()

    try:
        for name, digest in zip(("first", "second"), hashes, strict=True):
            assert installed(f"pkg==1.0 --hash=sha256:{digest}") == name

        assert "DO NOT MATCH" in installed(f"pkg==1.0 --hash=sha256:{'0' * 64}")
        # pip refuses, and prints the missing hash
        assert "pkg==1.0 --hash=sha256:" in installed("pkg==1.0")
    finally:
        server.shutdown()
        server.server_close()


def _add_package(index_folder: Path, package_code: str) -> str:
    """Add pkg 1.0 to a package index in a folder; return the hash of the package's file."""
    (index_folder / "pkg").mkdir(parents=True)
    wheel = index_folder / "pkg/pkg-1.0-py3-none-any.whl"
    info = "pkg-1.0.dist-info"

    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("pkg.py", package_code)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: pkg\nVersion: 1.0\n")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(
            f"{info}/RECORD", f"pkg.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n"
        )

    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    (index_folder / "pkg/index.html").write_text(
        f'<a href="{wheel.name}#sha256={digest}">{wheel.name}</a>'
    )
    return digest
