"""Differences between a release and this machine that are known before the training starts."""

import json
import platform
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from argolocal.common.json_text import to_json
from argolocal.common.processes import python_command
from argolocal.common.wording import first_names, one_line, visible
from rekindle.blocks.manifest import provenance
from rekindle.cache import code
from rekindle.cache.key import data_digest_or_empty
from rekindle.errors import ConfigError, RekindleError
from rekindle.operations.reproduce.checkout import find_commit
from rekindle.operations.reproduce.comparison import DERIVED_ENTRIES
from rekindle.release.origin import Origin
from rekindle.training.spec import TrainConfig
from rekindle.workload import POD_PRIVATE

MAX_NAMES = 8  # maximum number of packages or modules in one finding


@dataclass(frozen=True)
class Finding:
    """A difference. `fatal`: True if the weights cannot be equal, False if they may differ. `diff`:
    lines to show below the text."""

    subject: str
    text: str
    fatal: bool = False
    diff: str = ""

    def __str__(self) -> str:
        # the subject and the text may contain values of origin.json, which may have line breaks or
        # control characters
        line = one_line(f"{self.subject}: {self.text}")
        message = f"{'error' if self.fatal else 'warning':9}{line}"
        if self.diff:
            return f"{message}\n{visible(self.diff)}"
        return message

    def as_json(self) -> dict[str, Any]:
        text = f"{self.text}\n{self.diff}" if self.diff else self.text
        return {"subject": self.subject, "text": text, "fatal": self.fatal}


class Commit:
    """The commit to check out: the commit of the release, unless the user gives another
    revision."""

    def __init__(self, origin: Origin, revision: str) -> None:
        self.recorded_sha = origin.commit.removesuffix("-dirty")
        self.is_dirty = origin.commit.endswith("-dirty")

        self.sha = find_commit(revision or self.recorded_sha)
        if self.sha:
            return

        release = f"{origin.name} {origin.version}"
        if revision:
            reason = f"revision {revision} does not exist"
        elif self.recorded_sha:
            reason = (
                f"{release} was made from commit {self.recorded_sha}, which is not in the"
                " repository of this folder"
            )
        else:
            reason = f"{release} was made outside of a git repository"

        raise ConfigError(
            f"{reason}: run the command in a clone that has the commit (`git fetch --all`), or"
            " give another revision with --commit."
        )

    def findings(self) -> Iterator[Finding]:
        if self.sha != self.recorded_sha:
            recorded = self.recorded_sha or "unknown"
            yield Finding("commit", f"{self.sha} is used; the commit of the release is {recorded}")


def code_findings(origin: Origin, commit: Commit, folder: Path) -> Iterator[Finding]:
    """Compare the code of the release with the files of the commit, and with the installed packages
    of Rekindle."""
    recorded = origin.run.code
    current = code.module_digests(origin.run.modules, [str(folder)])
    names = sorted(
        name for name in recorded.keys() | current.keys() if recorded.get(name) != current.get(name)
    )

    packages = ("rekindle", "argolocal")
    rekindle_modules = [name for name in names if name.partition(".")[0] in packages]
    project_modules = [name for name in names if name not in rekindle_modules]
    if project_modules:
        yield Finding(
            "code",
            f"{first_names(project_modules, MAX_NAMES)}: commit {commit.sha[:12]} has other code"
            " than the release",
            True,
        )
    elif commit.is_dirty and commit.sha == commit.recorded_sha:
        text = (
            "the release was made with uncommitted changes, but its steps and workload equal the"
            " commit"
        )
        yield Finding("commit", text)

    if rekindle_modules:
        differing = first_names(rekindle_modules, MAX_NAMES)
        yield Finding("code", f"Rekindle itself differs from the release, in {differing}")


def environment_findings(origin: Origin) -> Iterator[Finding]:
    """Compare the Python version, packages, lock file and image of the release with this
    environment."""
    recorded = origin.run.python
    current = platform.python_version()
    if recorded != current:
        yield Finding("python", f"the release was made with Python {recorded}, this is {current}")

    lock = provenance.hash_lock_file()
    recorded_lock = origin.provenance.get("lock_hash", "")
    if lock != recorded_lock:
        file = provenance.find_lock_file()
        here = f"{file.name if file else 'the lock file'} has the sha256 {lock or '(missing)'}"
        yield Finding("lock", f"{here}; the release was made with {recorded_lock or '(missing)'}")

    recorded_packages = _split_versions(origin.run.packages)
    current_packages = _split_versions(code.list_packages())
    names = sorted(recorded_packages.keys() | current_packages.keys())
    changes = [
        f"{name} {recorded_packages.get(name, '(missing)')} →"
        f" {current_packages.get(name, '(missing)')}"
        for name in names
        if recorded_packages.get(name) != current_packages.get(name)
    ]

    if changes:
        advice = "install the lock file of the commit to have the same packages"
        yield Finding("packages", f"{first_names(changes, MAX_NAMES)} (release → here): {advice}")

    image = origin.provenance.get("image", "host")
    digest = origin.provenance.get("image_digest", "host")
    if image != "host":
        text = (
            f"the release was made in {image} ({digest}); here its steps run on the packages of"
            " this environment"
        )
        yield Finding("image", text)


def machine_findings(origin: Origin) -> Iterator[Finding]:
    """If Rekindle trained the model, compare the torch, device and processor of the training with
    this machine."""
    model = origin.model
    recorded = model.fingerprint
    if not recorded:
        return

    settings = {
        name: value for name, value in model.train.items() if name in TrainConfig.model_fields
    }
    spec = to_json([model.workload, model.model, settings, model.family])
    command = python_command("-m", "rekindle.operations.reproduce.machine_facts", spec)
    process = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if process.returncode:
        text = f"the facts of this machine are unknown: {process.stderr.strip()[-500:]}"
        yield Finding("machine", text, True)
        return

    current = json.loads(process.stdout.splitlines()[-1])
    for name, value in recorded.items():
        if name not in DERIVED_ENTRIES and current.get(name) != value:
            text = f"the release was trained with {value}, here it is {current.get(name)}"
            yield Finding(name, text, True)


class Data:
    """The raw data of the release: its current place, and whether its content is unchanged.

    The project may have moved since the release, so the last parts of the recorded path are also
    tried below the project folder of the commit.
    """

    def __init__(self, origin: Origin, source: str, folder: Path) -> None:
        self.recorded_source = origin.config.data.source
        self.recorded_digest = origin.provenance.get("source_digest", "")
        self.given_source = source
        self.folder = folder

    @cached_property
    def digests(self) -> Mapping[str, str]:
        """The digest of the data at each possible place; "" if the data does not exist there or
        cannot be verified."""
        source = self.given_source or self.recorded_source
        places = list[str]()
        if not self.given_source and "://" not in self.recorded_source:
            parts = Path(self.recorded_source).parts[1:]
            places = [str(self.folder.joinpath(*parts[start:])) for start in range(len(parts))]

        digests = {place: _digest_or_empty(place) for place in [*places, source]}
        return {place: digest for place, digest in digests.items() if digest or place == source}

    @cached_property
    def source(self) -> str:
        """The place of the data to use: the first with the content of the release, else the first
        that exists."""
        existing = [place for place, digest in self.digests.items() if digest]
        equal = (place for place in existing if self.digests[place] == self.recorded_digest)
        return next(equal, existing[0] if existing else self.given_source or self.recorded_source)

    @property
    def description(self) -> str:
        """The place of the data, for messages; for a file of the commit, its path in the
        project."""
        path = Path(self.source)
        if path.is_relative_to(self.folder):
            return f"{path.relative_to(self.folder)} of the commit"
        return self.source

    def findings(self) -> Iterator[Finding]:
        digest = self.digests.get(self.source, "")
        if not self.recorded_digest:
            yield Finding(
                "data",
                f"the release does not have a digest of {self.recorded_source}, so it cannot be"
                " verified",
            )
        elif digest != self.recorded_digest:
            if digest:
                state = f"its digest is {digest}"
            else:
                state = "it does not exist, or cannot be read"

            remedy = "restore it, or give the place of the same data with --data"
            yield Finding(
                "data",
                f"{self.description}: {state}; the release has the digest {self.recorded_digest}:"
                f" {remedy}",
                True,
            )
        elif self._is_private():
            text = (
                f"{self.source}: each step has its own /tmp and cannot access it: copy it, and use"
                " --data"
            )
            yield Finding("data", text, True)

    def _is_private(self) -> bool:
        """Return True if the data is in a folder that the pods of steps cannot see."""
        path = Path(self.source)
        return path.is_relative_to(POD_PRIVATE) and not path.is_relative_to(self.folder)


def _digest_or_empty(uri: str) -> str:
    try:
        return data_digest_or_empty(uri)
    except RekindleError:
        # raised if a bucket is missing, or the object store is unavailable
        return ""


def _split_versions(names: list[str]) -> dict[str, str]:
    """Split package names with versions, such as torch-2.8.0, into name and version."""
    parts = (package.rpartition("-") for package in names)
    return {name: version for name, _, version in parts}
