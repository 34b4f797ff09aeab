"""Container images on this machine. Images are not pulled: each image is mapped to a command and an
environment."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from argolocal.errors import ConfigError

# name of the file in the home (the directory of all runs) in which users define images
IMAGES_FILE_NAME = "images.yaml"
# images whose programs exist on every machine: name → default command of the image
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
    """The properties of an image on this machine.

    `python` is the Python interpreter that runs if the command of a container is `python`. `env`:
    environment variables of the image. `command`, `args`, `directory` are the ENTRYPOINT, CMD and
    WORKDIR of the image.
    """

    python: str = sys.executable
    env: Mapping[str, str] = field(default_factory=dict)
    command: Sequence[str] = ()
    args: Sequence[str] = ()
    directory: str | None = None

    @classmethod
    def read_table(cls, file: Path) -> "dict[str, Image]":
        """Read a YAML file that maps the name of each image to the fields of an Image. Return {} if
        the file does not exist. Raises ConfigError."""
        if not file.exists():
            return {}

        from argolocal.language.yaml_text import parse_one, read_text

        field_types = {"python": str, "env": dict, "command": list, "args": list, "directory": str}

        try:
            fields_by_image = parse_one(read_text(file), str(file)) or {}
            for image_name, image_fields in fields_by_image.items():
                for field_name, field_value in image_fields.items():
                    if not isinstance(field_value, field_types.get(field_name, ())):
                        if field_name in field_types:
                            type_requirement = f"a {field_types[field_name].__name__}"
                        else:
                            type_requirement = f"one of {', '.join(field_types)}"

                        raise ConfigError(
                            f"{file}: {image_name}.{field_name} is {field_value!r}: it must be"
                            f" {type_requirement}."
                        )
        except AttributeError as error:
            raise ConfigError(
                f"{file} must map images to their fields ({', '.join(field_types)}): {error}"
            ) from None

        return {
            image_name: cls(**image_fields) for image_name, image_fields in fields_by_image.items()
        }


def image_base_name(image: str) -> str:
    """Return an image's name without registry, tag and digest."""
    return image.split("@")[0].rpartition("/")[2].partition(":")[0]
