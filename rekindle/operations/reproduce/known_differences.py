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
from argolocal.common.processes import make_python_command
from argolocal.common.wording import escape_control_chars, escape_to_one_line, join_first_names
from rekindle.blocks.manifest import provenance
from rekindle.cache import code
from rekindle.cache.key import data_digest_or_empty
from rekindle.errors import ConfigError, RekindleError
from rekindle.operations.reproduce.checkout import find_commit
from rekindle.operations.reproduce.comparison import DERIVED_FACTS
from rekindle.release.origin import Origin
from rekindle.training.spec import TrainConfig
from rekindle.workload import POD_PRIVATE

# maximum number of packages or modules in one finding
MAX_NAMES = 8


@dataclass(frozen=True)
class Finding:
    """A difference between the release and this machine or the commit. `fatal` is True if the
    weights cannot be equal, False if they may be equal. `diff`: lines to show below the text of the
    finding."""

    subject: str
    text: str
    fatal: bool = False
    diff: str = ""

    def __str__(self) -> str:
        # the subject and the text may contain values of origin.json, which may have line breaks or
        # control characters
        summary_line = escape_to_one_line(f"{self.subject}: {self.text}")
        finding_message = f"{'error' if self.fatal else 'warning':9}{summary_line}"
        if self.diff:
            return f"{finding_message}\n{escape_control_chars(self.diff)}"
        return finding_message

    def as_json(self) -> dict[str, Any]:
        text = f"{self.text}\n{self.diff}" if self.diff else self.text
        return {"subject": self.subject, "text": text, "fatal": self.fatal}


class ReleaseCommit:
    """The commit to check out, which is the commit of the release unless the user gives another
    revision."""

    def __init__(self, origin: Origin, git_revision: str) -> None:
        self.recorded_sha = origin.commit.removesuffix("-dirty")
        self.is_dirty = origin.commit.endswith("-dirty")

        self.sha = find_commit(git_revision or self.recorded_sha)
        if self.sha:
            return

        release_name = f"{origin.name} {origin.version}"
        if git_revision:
            error_reason = f"revision {git_revision} does not exist"
        elif self.recorded_sha:
            error_reason = (
                f"{release_name} was made from commit {self.recorded_sha}, which is not in the"
                " repository of this folder"
            )
        else:
            error_reason = f"{release_name} was made outside of a git repository"

        raise ConfigError(
            f"{error_reason}: run the command in a clone that has the commit (`git fetch --all`),"
            " or give another revision with --commit."
        )

    def findings(self) -> Iterator[Finding]:
        if self.sha != self.recorded_sha:
            recorded_commit = self.recorded_sha or "unknown"
            yield Finding(
                "commit", f"{self.sha} is used; the commit of the release is {recorded_commit}"
            )


def find_code_differences(
    origin: Origin, commit: ReleaseCommit, project_folder: Path
) -> Iterator[Finding]:
    """Compare the code of the release with the files of the commit, and with the installed packages
    of Rekindle."""
    recorded_digests = origin.run.code
    current_digests = code.module_digests(origin.run.modules, [str(project_folder)])
    changed_modules = sorted(
        name
        for name in recorded_digests.keys() | current_digests.keys()
        if recorded_digests.get(name) != current_digests.get(name)
    )

    own_packages = ("rekindle", "argolocal")
    rekindle_modules = [name for name in changed_modules if name.partition(".")[0] in own_packages]
    project_modules = [name for name in changed_modules if name not in rekindle_modules]
    if project_modules:
        yield Finding(
            "code",
            f"{join_first_names(project_modules, MAX_NAMES)}: commit {commit.sha[:12]} has other"
            " code than the release",
            True,
        )
    elif commit.is_dirty and commit.sha == commit.recorded_sha:
        finding_text = (
            "the release was made with uncommitted changes, but its steps and workload equal the"
            " commit"
        )
        yield Finding("commit", finding_text)

    if rekindle_modules:
        differing_modules = join_first_names(rekindle_modules, MAX_NAMES)
        yield Finding("code", f"Rekindle itself differs from the release, in {differing_modules}")


def find_environment_differences(origin: Origin) -> Iterator[Finding]:
    """Compare the Python version, packages, lock file and image of the release with this
    environment."""
    recorded_python = origin.run.python
    current_python = platform.python_version()
    if recorded_python != current_python:
        yield Finding(
            "python",
            f"the release was made with Python {recorded_python}, this is {current_python}",
        )

    lock_hash = provenance.hash_lock_file()
    recorded_lock_hash = origin.provenance.get("lock_hash", "")
    if lock_hash != recorded_lock_hash:
        lock_file = provenance.find_lock_file()
        lock_description = (
            f"{lock_file.name if lock_file else 'the lock file'} has the sha256"
            f" {lock_hash or '(missing)'}"
        )
        yield Finding(
            "lock",
            f"{lock_description}; the release was made with {recorded_lock_hash or '(missing)'}",
        )

    recorded_packages = _split_versions(origin.run.packages)
    current_packages = _split_versions(code.list_packages())
    package_names = sorted(recorded_packages.keys() | current_packages.keys())
    package_changes = [
        f"{package_name} {recorded_packages.get(package_name, '(missing)')} →"
        f" {current_packages.get(package_name, '(missing)')}"
        for package_name in package_names
        if recorded_packages.get(package_name) != current_packages.get(package_name)
    ]

    if package_changes:
        install_advice = "install the lock file of the commit to have the same packages"
        yield Finding(
            "packages",
            f"{join_first_names(package_changes, MAX_NAMES)} (release → here): {install_advice}",
        )

    image_name = origin.provenance.get("image", "host")
    image_digest = origin.provenance.get("image_digest", "host")
    if image_name != "host":
        finding_text = (
            f"the release was made in {image_name} ({image_digest}); here its steps run on the"
            " packages of this environment"
        )
        yield Finding("image", finding_text)


def find_machine_differences(origin: Origin) -> Iterator[Finding]:
    """If Rekindle trained the model, compare the torch, device and processor of the training with
    this machine."""
    released_model = origin.model
    recorded_facts = released_model.fingerprint
    if not recorded_facts:
        return

    train_settings = {
        setting_name: value
        for setting_name, value in released_model.train.items()
        if setting_name in TrainConfig.model_fields
    }
    spec_json = to_json(
        [released_model.workload, released_model.model, train_settings, released_model.family]
    )
    command = make_python_command("-m", "rekindle.operations.reproduce.machine_facts", spec_json)
    facts_process = subprocess.run(
        command, capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    if facts_process.returncode:
        finding_text = (
            f"the facts of this machine are unknown: {facts_process.stderr.strip()[-500:]}"
        )
        yield Finding("machine", finding_text, True)
        return

    current_facts = json.loads(facts_process.stdout.splitlines()[-1])
    for fact_name, recorded_fact in recorded_facts.items():
        current_fact = current_facts.get(fact_name)
        if fact_name not in DERIVED_FACTS and current_fact != recorded_fact:
            finding_text = (
                f"the release was trained with {recorded_fact}, here it is {current_fact}"
            )
            yield Finding(fact_name, finding_text, True)


class RawData:
    """The raw data of the release. The data is searched at its recorded path and, since the project
    may have moved since the release, also at the last parts of the recorded path below the project
    folder of the commit.
    """

    def __init__(self, origin: Origin, source: str, project_folder: Path) -> None:
        self.recorded_source = origin.config.data.source
        self.recorded_digest = origin.provenance.get("source_digest", "")
        self.given_source = source
        self.folder = project_folder

    @cached_property
    def digests(self) -> Mapping[str, str]:
        """The digest of the data at each possible location; "" if the data does not exist there or
        cannot be verified."""
        chosen_source = self.given_source or self.recorded_source
        candidate_locations = list[str]()
        if not self.given_source and "://" not in self.recorded_source:
            path_parts = Path(self.recorded_source).parts[1:]
            candidate_locations = [
                str(self.folder.joinpath(*path_parts[start_index:]))
                for start_index in range(len(path_parts))
            ]

        digests_by_location = {
            candidate_location: _compute_digest(candidate_location)
            for candidate_location in [*candidate_locations, chosen_source]
        }
        return {
            candidate_location: location_digest
            for candidate_location, location_digest in digests_by_location.items()
            if location_digest or candidate_location == chosen_source
        }

    @cached_property
    def source(self) -> str:
        """The location of the raw data to use: the first location with the content that the release
        records, else the first location that has data."""
        existing_locations = [
            data_location
            for data_location, location_digest in self.digests.items()
            if location_digest
        ]
        unchanged_locations = (
            data_location
            for data_location in existing_locations
            if self.digests[data_location] == self.recorded_digest
        )
        return next(
            unchanged_locations,
            existing_locations[0]
            if existing_locations
            else self.given_source or self.recorded_source,
        )

    @property
    def description(self) -> str:
        """The location of the raw data, for messages. For a file of the commit, the location is the
        file's path in the project."""
        source_path = Path(self.source)
        if source_path.is_relative_to(self.folder):
            return f"{source_path.relative_to(self.folder)} of the commit"
        return self.source

    def findings(self) -> Iterator[Finding]:
        source_digest = self.digests.get(self.source, "")
        if not self.recorded_digest:
            yield Finding(
                "data",
                f"the release does not have a digest of {self.recorded_source}, so it cannot be"
                " verified",
            )
        elif source_digest != self.recorded_digest:
            if source_digest:
                digest_text = f"its digest is {source_digest}"
            else:
                digest_text = "it does not exist, or cannot be read"

            data_remedy = "restore it, or give the place of the same data with --data"
            yield Finding(
                "data",
                f"{self.description}: {digest_text}; the release has the digest"
                f" {self.recorded_digest}: {data_remedy}",
                True,
            )
        elif self._is_in_private_folder():
            finding_text = (
                f"{self.source}: each step has its own /tmp and cannot access it: copy it, and use"
                " --data"
            )
            yield Finding("data", finding_text, True)

    def _is_in_private_folder(self) -> bool:
        """Return True if the data is in a folder that the pods of steps cannot see."""
        source_path = Path(self.source)
        return source_path.is_relative_to(POD_PRIVATE) and not source_path.is_relative_to(
            self.folder
        )


def _compute_digest(data_uri: str) -> str:
    try:
        return data_digest_or_empty(data_uri)
    except RekindleError:
        # StorageError is raised if a bucket is missing, or the object store is unavailable
        return ""


def _split_versions(package_names: list[str]) -> dict[str, str]:
    """Split package names with versions, such as torch-2.8.0, into name and version."""
    name_parts = (package_name.rpartition("-") for package_name in package_names)
    return {base_name: version for base_name, _, version in name_parts}
