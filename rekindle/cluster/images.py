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
from rekindle.errors import ConfigError, RekindleError, write_stderr

ImageName = Literal["train", "serve", "mlflow", "project"]
# builder flags of each image; the image `train` can run every kind of pod
BUILD_ARGUMENTS = {
    "train": [],
    "serve": ["--build-arg", "EXTRAS=serve"],
    "mlflow": ["--build-arg", "EXTRAS=mlflow", "--target", "mlflow"],
    # name of the image that is built from the project's Dockerfile, on top of the image `train`
    "project": [],
}
# remedy for a failure of the builder, by the subcommand that has failed
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
    image_name: ImageName,
    tag: str,
    *,
    pushes_image: bool = False,
    is_insecure: bool = False,
    builder_flags: Sequence[str] = (),
) -> Image:
    """Build an image as `tag`; `builder_flags` are passed to the builder, whose output goes to
    stderr.

    `is_insecure`: push without TLS, or to a registry whose certificate this machine does not trust.

    Raises ConfigError without a Dockerfile or a builder, RekindleError if the build fails.
    """
    project_root = (
        project.find_project_root(Path.cwd()) if image_name == "project" else project.REFERENCE
    )
    file = project_root / "images/Dockerfile"

    if image_name != "project" and not (project_root / "uv.lock").is_file():
        raise ConfigError(
            f"{project_root}/uv.lock is missing: images are built from a clone, not from a wheel."
        )

    if image_name == "project" and (project_root == project.REFERENCE or not file.is_file()):
        raise ConfigError(
            f"{file} is not the Dockerfile of a project: `rekindle init NAME` creates a project"
            " with one."
        )

    builder_tool = _find_tool()
    with TemporaryDirectory() as scratch_folder:
        id_file = Path(scratch_folder, "id")
        builder_arguments = ["--file", str(file), "--tag", tag, "--iidfile", str(id_file)]
        # enable the layer cache of buildah, because only docker uses a layer cache by default
        if builder_tool == "buildah":
            builder_arguments.append("--layers")

        _run_builder(
            builder_tool,
            "build",
            *builder_arguments,
            *BUILD_ARGUMENTS[image_name],
            *builder_flags,
            str(project_root),
        )
        built_image = Image(tag, id_file.read_text().strip())

        if pushes_image:
            return replace(
                built_image,
                digest=_push(
                    builder_tool, built_image, Path(scratch_folder, "digest"), is_insecure
                ),
            )

        return built_image


def _push(builder_tool: str, image: Image, file: Path, is_insecure: bool) -> str:
    """Push the image; return its digest in the registry."""
    if builder_tool == "buildah":
        push_flags = ["--tls-verify=false"] if is_insecure else []
        _run_builder("buildah", "push", *push_flags, "--digestfile", str(file), image.tag)
        return file.read_text().strip()

    # docker has no flag for TLS: the configuration of its daemon lists the registries without TLS
    _run_builder("docker", "push", image.tag)
    builder_output = _run_builder(
        "docker", "image", "inspect", "--format", "{{json .RepoDigests}}", image.tag
    )
    image_names = [
        name for name in json.loads(builder_output) if name.startswith(f"{image.repository}@")
    ]
    return image_names[0].partition("@")[2]


def _find_tool() -> str:
    """Return the first builder that works, docker or buildah. Raises ConfigError without a working
    builder."""
    for builder_tool, probe_command in TOOL_PROBES.items():
        if (
            shutil.which(builder_tool)
            and subprocess.run(probe_command, capture_output=True, timeout=60).returncode == 0
        ):
            return builder_tool

    installed_tools = [builder_tool for builder_tool in TOOL_PROBES if shutil.which(builder_tool)]
    if installed_tools:
        failure_cause = f"{' and '.join(installed_tools)} fails (is the daemon running?)"
    else:
        failure_cause = "neither is on the PATH"

    raise ConfigError(
        f"images are built with docker or buildah, and {failure_cause}. Install one (apt-get"
        " install buildah), start docker or build on another machine: images/Dockerfile needs only"
        " the repository."
    )


def _run_builder(*command: str) -> str:
    """Run the builder, and return its stdout. Also copy the builder's output to stderr, because
    stdout of the command is reserved for the result."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as builder_process:
        assert builder_process.stdout
        builder_output = ""
        for output_line in builder_process.stdout:
            write_stderr(output_line.rstrip("\n"))
            builder_output += output_line

    if builder_process.returncode:
        raise RekindleError(
            f"`{' '.join(command)}` ended with {builder_process.returncode}: see the end of its"
            f" output. {REMEDIES[command[1]]}"
        )

    return builder_output
