"""Create a project from the folder `template` (`rekindle init`)."""

import re
import shutil
from pathlib import Path

from rekindle.errors import ConfigError
from rekindle.project import REFERENCE

NAME_PATTERN = re.compile(r"[a-z]([-a-z0-9]{0,28}[a-z0-9])?")
# files of the template that `create` copies with `only_workload`
WORKLOAD_FILES = ("steps/MODULE.py", "data/power.csv", "configs/PROJECT.yaml")


def create(project_folder: Path, only_workload: bool = False) -> list[Path]:
    """Create a project with the name of `project_folder`, and return its files. Raises
    ConfigError if a file already exists."""
    name = project_folder.resolve().name
    template_folder = REFERENCE / "template"

    if not NAME_PATTERN.fullmatch(name):
        raise ConfigError(
            f'"{name}" cannot name a project: models and deployments are named after it. Give a'
            " name of at most 30 lower-case letters, digits and hyphens that begins with a letter."
        )

    if only_workload:
        template_files = [template_folder / path for path in WORKLOAD_FILES]
    else:
        template_files = sorted(template_folder.rglob("*"))

    files_by_target = {
        _fill_in_names(str(path.relative_to(template_folder)), name): path
        for path in template_files
        if path.is_file()
    }
    existing_files = [path for path in files_by_target if (project_folder / path).exists()]
    if existing_files:
        raise ConfigError(
            f"{project_folder / existing_files[0]} exists already: give another name, or remove it."
        )

    for path, template_file in files_by_target.items():
        (project_folder / path).parent.mkdir(parents=True, exist_ok=True)
        text = _fill_in_names(template_file.read_text(), name)
        if only_workload:
            text = text.replace("pipeline: pipelines.nightly\n", "")

        (project_folder / path).write_text(text)
        shutil.copymode(template_file, project_folder / path)

    return [project_folder / path for path in files_by_target]


def _fill_in_names(template_text: str, project_name: str) -> str:
    return template_text.replace("PROJECT", project_name).replace(
        "MODULE", project_name.replace("-", "_")
    )
