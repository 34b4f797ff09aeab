"""Find the code that the steps of a run load, if the run's manifest names it.

    modules = list_named_modules(manifest, folders)
    identity = code.code_identity(modules)

Names of modules are searched in the whole manifest, and files of the project in the commands of
containers and training programs. A module name that begins with `./` denotes a file of the project.
"""

import itertools
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from argolocal.common.json_text import loads, to_json
from rekindle.cache import code
from rekindle.kubernetes_names import KUBERNETES_SERVICE_HOST, REKINDLE_IMAGE
from rekindle.project import SHARED_PACKAGES
from rekindle.project.folders import ENGINE_FOLDERS

WORD = re.compile(r"\b[A-Za-z_]\w*")
FILE_NAME = re.compile(r"[\w.+@~/-]+")
# JSON escapes such as \n, whose letter would otherwise become the first letter of the next word
ESCAPES = re.compile(r"\\+[nrtbf\"]")
# the flag and the parameter that contain the section `program` of a config
PROGRAM = "program"
EMPTY_SECTIONS = ("", "{}", "null")


def list_named_modules(manifest: Mapping[str, Any], project_folders: Iterable[str]) -> list[str]:
    """Return the modules of the project and of Rekindle, such as steps and workloads, whose names
    occur in the templates of a workflow, and the files of the project that its commands name."""
    project_folders = list(project_folders)
    templates = manifest["spec"].get("templates") or []
    template_texts = [ESCAPES.sub(" ", text) for text in _iterate_texts(templates)]
    dotted_names = {name for text in template_texts for name in code.DOTTED_NAME.findall(text)}

    # modules of Rekindle and of the packages of a project are found by their dotted names
    package_names = {*SHARED_PACKAGES, *(folder.name for folder in ENGINE_FOLDERS)}
    dotted_names |= {name for text in template_texts for name in WORD.findall(text)} - package_names

    named_files = {
        path
        for text in _iterate_command_texts(templates)
        for path in list_named_files(text, project_folders)
    }
    return sorted([*code.existing_modules(dotted_names, project_folders), *named_files])


def list_named_files(source_text: str, project_folders: Iterable[str]) -> list[str]:
    """Return the files of the project whose paths occur in a command."""
    candidate_names = FILE_NAME.findall(ESCAPES.sub(" ", source_text))
    project_files = (find_project_file(name, project_folders) for name in candidate_names)
    return list(filter(None, project_files))


def find_project_file(path: str, project_folders: Iterable[str]) -> str:
    """Return the name of a file of the project as a module, such as `./tools/train.py`; "" if the
    project does not have the file."""
    for folder in project_folders:
        file = os.path.normpath(os.path.join(folder, path))
        with suppress(OSError, ValueError):
            if Path(file).is_relative_to(folder) and os.path.isfile(file):
                return code.FILE_PREFIX + os.path.relpath(file, folder)
    return ""


def program_sections(manifest: Mapping[str, Any]) -> list[str]:
    """Return the sections `program` (JSON) of the training programs that a workflow runs."""
    templates = manifest["spec"].get("templates") or []
    return sorted(set(_iterate_program_sections(templates)))


def reason_other_images(manifest: Mapping[str, Any]) -> str:
    """Return the reason if it is unknown whether all steps of the workflow run the code of this
    pod; "" if all steps run this code. Outside a cluster, images are ignored."""
    if KUBERNETES_SERVICE_HOST not in os.environ:
        return ""

    image_names = {
        container.get("image", "")
        for container in _iterate_containers(manifest["spec"].get("templates") or [])
        if _runs_rekindle(container)
    }
    tagged_images = sorted(
        image_name for image_name in image_names if not code.image_digest(image_name)
    )
    if code.image_digest(os.environ.get(REKINDLE_IMAGE, "")):
        other_images = tagged_images
    else:
        other_images = tagged_images if len(tagged_images) > 1 else []

    if other_images:
        return (
            f"the code in {' and '.join(other_images)} cannot be compared: pin the image by"
            " digest, or use one image for all steps"
        )
    return ""


def _iterate_texts(manifest_value: object) -> Iterator[str]:
    """Yield all texts in a value; if a text is JSON, also yield the texts in it."""
    manifest_value = _parse_if_json(manifest_value)
    if isinstance(manifest_value, str):
        yield manifest_value
    elif isinstance(manifest_value, Mapping):
        for key, child_value in manifest_value.items():
            yield str(key)
            yield from _iterate_texts(child_value)
    elif isinstance(manifest_value, list):
        for child_value in manifest_value:
            yield from _iterate_texts(child_value)


def _parse_if_json(manifest_value: object) -> object:
    """Return the object or list in a JSON text; return any other value unchanged."""
    if isinstance(manifest_value, str) and manifest_value.strip()[:1] in ("{", "["):
        with suppress(ValueError, TypeError):
            return loads(manifest_value)
    return manifest_value


def _iterate_containers(manifest_value: object) -> Iterator[Mapping[str, Any]]:
    """Yield the containers and scripts in templates, and in the objects that they apply."""
    manifest_value = _parse_if_json(manifest_value)
    if isinstance(manifest_value, Mapping):
        if "args" in manifest_value or "command" in manifest_value or "source" in manifest_value:
            yield manifest_value
        for child_value in manifest_value.values():
            yield from _iterate_containers(child_value)
    elif isinstance(manifest_value, list):
        for child_value in manifest_value:
            yield from _iterate_containers(child_value)


def _list_command_words(container: Mapping[str, Any]) -> list[str]:
    """Return the command and the arguments of a container, as the kubelet passes them."""
    command_words = [*(container.get("command") or []), *(container.get("args") or [])]
    return [
        command_word.replace("$$", "$")
        for command_word in command_words
        if isinstance(command_word, str)
    ]


def _runs_rekindle(container: Mapping[str, Any]) -> bool:
    command_words = _list_command_words(container)
    module_words = [
        command_word
        for previous_word, command_word in itertools.pairwise(command_words)
        if previous_word == "-m"
    ]
    return any(
        module_name.partition(".")[0] == ENGINE_FOLDERS[0].name for module_name in module_words[:1]
    )


def _iterate_command_texts(templates: object) -> Iterator[str]:
    """Yield the commands of the containers that do not run Rekindle, and of training programs.
    Inputs of steps are left out, because they may name files that contain data."""
    for container in _iterate_containers(templates):
        if not _runs_rekindle(container):
            yield from _list_command_words(container)
            yield str(container.get("source") or "")

    for program_section in _iterate_program_sections(templates):
        yield program_section
        yield from _iterate_texts(program_section)


def _iterate_program_sections(templates: object) -> Iterator[str]:
    flag_prefix = f"--{PROGRAM}="
    for container in _iterate_containers(templates):
        for command_word in _list_command_words(container):
            if command_word.startswith(flag_prefix):
                yield command_word.removeprefix(flag_prefix)

    for parameter in _iterate_parameters(templates):
        parameter_value = parameter.get("value", parameter.get("default"))
        if parameter.get("name") == PROGRAM and parameter_value is not None:
            yield parameter_value if isinstance(parameter_value, str) else to_json(parameter_value)


def _iterate_parameters(manifest_value: object) -> Iterator[Mapping[str, Any]]:
    """Yield all parameters with a value in templates."""
    if isinstance(manifest_value, Mapping):
        for parameter in manifest_value.get("parameters") or []:
            if isinstance(parameter, Mapping):
                yield parameter
        for child_value in manifest_value.values():
            yield from _iterate_parameters(child_value)
    elif isinstance(manifest_value, list):
        for child_value in manifest_value:
            yield from _iterate_parameters(child_value)
