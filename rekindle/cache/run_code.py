"""Find the code that the steps of a run load, as far as the run's manifest names it.

    modules = modules_in(manifest, folders)
    identity = code.code_identity(modules)

Names of modules are searched in the whole manifest. Files of the project are found in the commands
of containers and training programs: a module that begins with `./` is such a file.
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
from rekindle.project import SHARED
from rekindle.project.folders import ENGINE

WORD = re.compile(r"\b[A-Za-z_]\w*")
FILE_NAME = re.compile(r"[\w.+@~/-]+")
# JSON escapes in a text, which would hide where a word begins
ESCAPES = re.compile(r"\\+[nrtbf\"]")
PROGRAM = "program"  # the flag and the parameter that contain the section `program` of a config
EMPTY_SECTIONS = ("", "{}", "null")


def modules_in(manifest: Mapping[str, Any], folders: Iterable[str]) -> list[str]:
    """Return the modules of the project and of Rekindle, such as steps and workloads, whose names
    occur in the templates of a workflow, and the files of the project that its commands name."""
    folders = list(folders)
    templates = manifest["spec"].get("templates") or []
    texts = [ESCAPES.sub(" ", text) for text in _texts(templates)]
    names = {name for text in texts for name in code.DOTTED_NAME.findall(text)}

    # modules of Rekindle and of the packages of a project are found by their dotted names
    packages = {*SHARED, *(folder.name for folder in ENGINE)}
    names |= {name for text in texts for name in WORD.findall(text)} - packages

    files = {path for text in _command_texts(templates) for path in files_named_in(text, folders)}
    return sorted([*code.existing_modules(names, folders), *files])


def files_named_in(text: str, folders: Iterable[str]) -> list[str]:
    """Return the files of the project whose paths occur in a command."""
    names = FILE_NAME.findall(ESCAPES.sub(" ", text))
    return [file for name in names if (file := file_name(name, folders))]


def file_name(path: str, folders: Iterable[str]) -> str:
    """Return the name of a file of the project as a module, such as `./tools/train.py`; "" if the
    project does not have the file."""
    for folder in folders:
        file = os.path.normpath(os.path.join(folder, path))
        with suppress(OSError, ValueError):
            if Path(file).is_relative_to(folder) and os.path.isfile(file):
                return code.FILE_PREFIX + os.path.relpath(file, folder)
    return ""


def program_sections(manifest: Mapping[str, Any]) -> list[str]:
    """Return the sections `program` (JSON) of the training programs that a workflow runs."""
    templates = manifest["spec"].get("templates") or []
    return sorted(set(_program_sections(templates)))


def reason_other_images(manifest: Mapping[str, Any]) -> str:
    """Return the reason why not all steps of the workflow run the code of this pod; "" if they do.
    On this machine, the image of a pod is ignored."""
    if KUBERNETES_SERVICE_HOST not in os.environ:
        return ""

    images = {
        container.get("image", "")
        for container in _containers(manifest["spec"].get("templates") or [])
        if _runs_rekindle(container)
    }
    by_tag = sorted(image for image in images if not code.image_digest(image))
    if code.image_digest(os.environ.get(REKINDLE_IMAGE, "")):
        others = by_tag
    else:
        others = by_tag if len(by_tag) > 1 else []

    if others:
        return (
            f"the code in {' and '.join(others)} cannot be compared: pin the image by digest, or"
            " use one image for all steps"
        )
    return ""


def _texts(value: object) -> Iterator[str]:
    """Yield all texts in a value; if a text is JSON, also yield the texts in it."""
    value = _parsed(value)
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield str(key)
            yield from _texts(item)
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)


def _parsed(value: object) -> object:
    """Return the object or list in a JSON text; return any other value unchanged."""
    if isinstance(value, str) and value.strip()[:1] in ("{", "["):
        with suppress(ValueError, TypeError):
            return loads(value)
    return value


def _containers(value: object) -> Iterator[Mapping[str, Any]]:
    """Yield the containers and scripts in templates, and in the objects that they apply."""
    value = _parsed(value)
    if isinstance(value, Mapping):
        if "args" in value or "command" in value or "source" in value:
            yield value
        for item in value.values():
            yield from _containers(item)
    elif isinstance(value, list):
        for item in value:
            yield from _containers(item)


def _words(container: Mapping[str, Any]) -> list[str]:
    """Return the command and the arguments of a container, as the kubelet passes them."""
    words = [*(container.get("command") or []), *(container.get("args") or [])]
    return [word.replace("$$", "$") for word in words if isinstance(word, str)]


def _runs_rekindle(container: Mapping[str, Any]) -> bool:
    words = _words(container)
    modules = [word for flag, word in itertools.pairwise(words) if flag == "-m"]
    return any(module.partition(".")[0] == ENGINE[0].name for module in modules[:1])


def _command_texts(templates: object) -> Iterator[str]:
    """Yield the commands of the containers that do not run Rekindle, and of training programs.
    Inputs of steps are left out, because they may name files that contain data."""
    for container in _containers(templates):
        if not _runs_rekindle(container):
            yield from _words(container)
            yield str(container.get("source") or "")

    for section in _program_sections(templates):
        yield section
        yield from _texts(section)


def _program_sections(templates: object) -> Iterator[str]:
    prefix = f"--{PROGRAM}="
    for container in _containers(templates):
        for word in _words(container):
            if word.startswith(prefix):
                yield word.removeprefix(prefix)

    for parameter in _parameters(templates):
        value = parameter.get("value", parameter.get("default"))
        if parameter.get("name") == PROGRAM and value is not None:
            yield value if isinstance(value, str) else to_json(value)


def _parameters(value: object) -> Iterator[Mapping[str, Any]]:
    """Yield all parameters with a value in templates."""
    if isinstance(value, Mapping):
        for parameter in value.get("parameters") or []:
            if isinstance(parameter, Mapping):
                yield parameter
        for item in value.values():
            yield from _parameters(item)
    elif isinstance(value, list):
        for item in value:
            yield from _parameters(item)
