"""Container images from the repository's Dockerfiles, with docker or buildah, whichever works here.

rekindle images build train --tag registry.example.com/rekindle:0.1 --push
"""

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

Name = Literal["train", "serve", "mlflow"]
# build arguments of each image; without any the Dockerfile makes the one for every pod
ARGUMENTS = {
    "train": [],
    "serve": ["--build-arg", "EXTRAS=serve"],
    "mlflow": ["--build-arg", "EXTRAS=mlflow", "--target", "mlflow"],
}
# a client without its daemon is no help; buildah needs none
TOOLS = {"docker": ["docker", "info"], "buildah": ["buildah", "info"]}


@dataclass(frozen=True)
class Image:
    """What was built. `digest` names it in a registry, so only a pushed image has one."""

    tag: str
    id: str
    digest: str = ""

    @property
    def repository(self) -> str:
        """The tag without its version; a registry's port is none."""
        return self.tag.rpartition(":")[0] if ":" in self.tag.rpartition("/")[2] else self.tag

    @property
    def pinned(self) -> str:
        """How a manifest names exactly this image; "" before it is pushed."""
        return f"{self.repository}@{self.digest}" if self.digest else ""


def build(name: Name, tag: str, *, push: bool = False, more: Sequence[str] = ()) -> Image:
    """Build an image as `tag`; `more` are flags of the builder, such as --build-arg.

    What the builder says goes to stderr. Raises ConfigError without a Dockerfile or a builder, RekindleError if it
    fails.
    """
    file = project.file("images/Dockerfile")
    root = file.parents[1]
    if not (root / "uv.lock").is_file():
        raise ConfigError(f"{root} has no uv.lock: images are built from a clone of the repository, not from a wheel.")
    tool = _tool()
    with TemporaryDirectory() as scratch:
        identity = Path(scratch, "id")
        layers = ["--layers"] if tool == "buildah" else []  # docker keeps them without being asked
        named = ["--file", str(file), "--tag", tag, "--iidfile", str(identity)]
        _run(tool, "build", *layers, *named, *ARGUMENTS[name], *more, str(root))
        image = Image(tag, identity.read_text().strip())
        return replace(image, digest=_pushed(tool, image, Path(scratch, "digest"))) if push else image


def _pushed(tool: str, image: Image, file: Path) -> str:
    """The digest that the registry knows the image by, once it is there."""
    if tool == "buildah":
        _run("buildah", "push", "--digestfile", str(file), image.tag)
        return file.read_text().strip()
    _run("docker", "push", image.tag)
    found = _run("docker", "image", "inspect", "--format", "{{json .RepoDigests}}", image.tag)
    return next(each for each in json.loads(found) if each.startswith(f"{image.repository}@")).partition("@")[2]


def _tool() -> str:
    for tool, probe in TOOLS.items():
        if shutil.which(tool) and subprocess.run(probe, capture_output=True, timeout=60).returncode == 0:
            return tool
    there = [tool for tool in TOOLS if shutil.which(tool)]
    why = f"{' and '.join(there)} cannot work here (is the daemon running?)" if there else "neither is on the PATH"
    raise ConfigError(
        f"images are built with docker or buildah, and {why}. Install one (apt-get install buildah), start docker, or "
        "build where they are: the Dockerfiles in images/ need nothing of this machine."
    )


def _run(*command: str) -> str:
    """What the builder says on stdout, which is shown on stderr as well: ours is for the result."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        said = ""
        for line in process.stdout:
            say(line.rstrip("\n"))
            said += line
    if process.returncode:
        raise RekindleError(
            f"`{' '.join(command)}` ended with {process.returncode}: its last lines above say why. Behind a proxy or "
            "another index, hand flags to the builder: rekindle images build ... -- --build-arg PIP_INDEX_URL=..."
        )
    return said
