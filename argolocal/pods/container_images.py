"""Container images on this machine. Images are not pulled: each image is mapped to a command and an
environment."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from argolocal.errors import ConfigError

# name of the file in the home in which users define images
IMAGES_FILE = "images.yaml"
# images whose programs exist on every machine: name → CMD of the Dockerfile
BASE_IMAGES = {
    "python": ("python3",),
    "alpine": ("/bin/sh",),
    "busybox": ("sh",),
    "debian": ("bash",),
    "ubuntu": ("/bin/bash",),
    "bash": ("bash",),
}


@dataclass(frozen=True)
class Image:
    """An image on this machine.

    `python`: Python interpreter to use for the command `python` of the container. `env`:
    environment variables of the image. `command`, `args` and `directory`: ENTRYPOINT, CMD and
    WORKDIR of the image.
    """

    python: str = sys.executable
    env: Mapping[str, str] = field(default_factory=dict)
    command: Sequence[str] = ()
    args: Sequence[str] = ()
    directory: str | None = None

    @classmethod
    def read_table(cls, file: Path) -> "dict[str, Image]":
        """Read a YAML file that maps the name of each image to its entrypoint, command and other
        fields. Raises ConfigError."""
        if not file.exists():
            return {}

        from argolocal.language.yaml_text import parse_one, read_text

        types = {"python": str, "env": dict, "command": list, "args": list, "directory": str}

        try:
            images = parse_one(read_text(file), str(file)) or {}
            for name, fields in images.items():
                for key, value in fields.items():
                    if not isinstance(value, types.get(key, ())):
                        if key in types:
                            rule = f"a {types[key].__name__}"
                        else:
                            rule = f"one of {', '.join(types)}"

                        raise ConfigError(f"{file}: {name}.{key} is {value!r}: it must be {rule}.")
        except AttributeError as error:
            raise ConfigError(
                f"{file} must map images to their fields ({', '.join(types)}): {error}"
            ) from None

        return {name: cls(**fields) for name, fields in images.items()}


def base_name(image: str) -> str:
    """Return an image's name without registry, tag and digest."""
    return image.split("@")[0].rpartition("/")[2].partition(":")[0]
