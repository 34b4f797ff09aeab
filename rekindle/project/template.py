"""Create a project from the folder `template`: `rekindle init`."""

import re
import shutil
from pathlib import Path

from rekindle.errors import ConfigError
from rekindle.project import REFERENCE

NAME = re.compile(r"[a-z]([-a-z0-9]{0,28}[a-z0-9])?")
# files of the template that `create` copies with `only_workload`
WORKLOAD = ("steps/MODULE.py", "data/power.csv", "configs/PROJECT.yaml")


def create(folder: Path, only_workload: bool = False) -> list[Path]:
    """Create a project with the name of `folder`, and return its files. Raises ConfigError if a
    file already exists."""
    name = folder.resolve().name
    template = REFERENCE / "template"

    if not NAME.fullmatch(name):
        raise ConfigError(
            f'"{name}" cannot name a project: models and deployments are named after it. Give a'
            " name of at most 30 lower-case letters, digits and hyphens that begins with a letter."
        )

    if only_workload:
        sources = [template / path for path in WORKLOAD]
    else:
        sources = sorted(template.rglob("*"))

    files = {
        _fill_in(str(path.relative_to(template)), name): path for path in sources if path.is_file()
    }
    existing = [path for path in files if (folder / path).exists()]
    if existing:
        raise ConfigError(
            f"{folder / existing[0]} exists already: give another name, or remove it."
        )

    for path, source in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        text = _fill_in(source.read_text(), name)
        if only_workload:
            text = text.replace("pipeline: pipelines.nightly\n", "")

        (folder / path).write_text(text)
        shutil.copymode(source, folder / path)

    return [folder / path for path in files]


def _fill_in(text: str, name: str) -> str:
    return text.replace("PROJECT", name).replace("MODULE", name.replace("-", "_"))
