"""Build container images from the Dockerfile of the repository or of a project, with docker or
buildah."""

import json
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

from rekindle import project
from rekindle.errors import ConfigError, RekindleError, say

ImageName = Literal["train", "serve", "mlflow", "project"]
# builder flags of each image; the image `train` can run every kind of pod
BUILD_ARGUMENTS = {
    "train": [],
    "serve": ["--build-arg", "EXTRAS=serve"],
    "mlflow": ["--build-arg", "EXTRAS=mlflow", "--target", "mlflow"],
    "project": [],  # image that is built from the project's Dockerfile, on top of the image `train`
}
# remedy for a failure of each builder, by its command
REMEDIES = {
    "build": (
        "Behind a proxy or with another index, pass flags to the builder: rekindle images build ..."
        " -- --build-arg PIP_INDEX_URL=..."
    ),
    "push": (
        "Log in to the registry (docker login, buildah login). For a registry without TLS, add"
        ' --insecure with buildah; docker accepts only localhost and the "insecure-registries" in'
        " /etc/docker/daemon.json."
    ),
    "image": "Check that the image still exists.",
}
# commands that succeed only if the builder works; the command for docker also tests whether its
# daemon runs
TOOL_PROBES = {"docker": ["docker", "info"], "buildah": ["buildah", "info"]}


@dataclass(frozen=True)
class Image:
    """A built image; `digest` identifies a pushed image in its registry."""

    tag: str
    id: str
    digest: str = ""

    @property
    def repository(self) -> str:
        """The image's name without its version."""
        # ignore a colon before the last slash, because it precedes the registry's port
        if ":" in self.tag.rpartition("/")[2]:
            return self.tag.rpartition(":")[0]
        return self.tag

    @property
    def pinned(self) -> str:
        """The image's name with its digest, for manifests; "" if the image was not pushed."""
        if self.digest:
            return f"{self.repository}@{self.digest}"
        return ""


def build_image(
    name: ImageName,
    tag: str,
    *,
    push: bool = False,
    insecure: bool = False,
    flags: Sequence[str] = (),
) -> Image:
    """Build an image as `tag`; `flags` are passed to the builder, whose output goes to stderr.

    `insecure`: push without TLS, or to a registry whose certificate this machine does not trust.

    Raises ConfigError without a Dockerfile or a builder, RekindleError if the build fails.
    """
    root = project.find(Path.cwd()) if name == "project" else project.REFERENCE
    file = root / "images/Dockerfile"

    if name != "project" and not (root / "uv.lock").is_file():
        raise ConfigError(
            f"{root}/uv.lock is missing: images are built from a clone, not from a wheel."
        )

    if name == "project" and (root == project.REFERENCE or not file.is_file()):
        raise ConfigError(
            f"{file} is not the Dockerfile of a project: `rekindle init NAME` creates a project"
            " with one."
        )

    tool = _find_tool()
    with TemporaryDirectory() as scratch:
        id_file = Path(scratch, "id")
        arguments = ["--file", str(file), "--tag", tag, "--iidfile", str(id_file)]
        # enable the layer cache, which docker uses by default
        if tool == "buildah":
            arguments.append("--layers")

        _run_builder(tool, "build", *arguments, *BUILD_ARGUMENTS[name], *flags, str(root))
        image = Image(tag, id_file.read_text().strip())

        if push:
            return replace(image, digest=_push(tool, image, Path(scratch, "digest"), insecure))

        return image


def _push(tool: str, image: Image, file: Path, insecure: bool) -> str:
    """Push the image; return its digest in the registry."""
    if tool == "buildah":
        flags = ["--tls-verify=false"] if insecure else []
        _run_builder("buildah", "push", *flags, "--digestfile", str(file), image.tag)
        return file.read_text().strip()

    # no flag for TLS, because the configuration of docker's daemon lists the registries without TLS
    _run_builder("docker", "push", image.tag)
    output = _run_builder(
        "docker", "image", "inspect", "--format", "{{json .RepoDigests}}", image.tag
    )
    names = [name for name in json.loads(output) if name.startswith(f"{image.repository}@")]
    return names[0].partition("@")[2]


def _find_tool() -> str:
    for tool, probe in TOOL_PROBES.items():
        if (
            shutil.which(tool)
            and subprocess.run(probe, capture_output=True, timeout=60).returncode == 0
        ):
            return tool

    installed_tools = [tool for tool in TOOL_PROBES if shutil.which(tool)]
    if installed_tools:
        cause = f"{' and '.join(installed_tools)} fails (is the daemon running?)"
    else:
        cause = "neither is on the PATH"

    raise ConfigError(
        f"images are built with docker or buildah, and {cause}. Install one (apt-get install"
        " buildah), start docker or build on another machine: images/Dockerfile needs only the"
        " repository."
    )


def _run_builder(*command: str) -> str:
    """Run the builder, and return its stdout. Also copy this output to stderr, because our own
    stdout is reserved for the result."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        output = ""
        for line in process.stdout:
            say(line.rstrip("\n"))
            output += line

    if process.returncode:
        raise RekindleError(
            f"`{' '.join(command)}` ended with {process.returncode}: see the end of its output."
            f" {REMEDIES[command[1]]}"
        )

    return output
