"""Types for untrusted names: of runs, models, versions, tasks, objects and digests.

    ModelName(tags["model"], "the tag model of MLflow")
    TaskReference("fraud-x7k2p/prepare").run

An instance of these types is always valid: the constructor raises InvalidName for an invalid value,
and `or_none` returns None (argolocal/common/checked_names.py).
"""

import re
from typing import NamedTuple
from urllib.parse import SplitResult, urlsplit

from argolocal.common.checked_names import (
    INVISIBLE_CHARACTERS,
    CheckedName,
    InvalidName,
    ObjectName,
    PathName,
    RunName,
    format_untrusted,
)

__all__ = [
    "ArtifactKey",
    "CommitId",
    "Digest",
    "InvalidName",
    "ModelName",
    "ObjectId",
    "ObjectName",
    "PathName",
    "RunName",
    "S3Address",
    "TaskName",
    "TaskReference",
    "Version",
    "format_untrusted",
    "parse_s3_address",
    "split_address",
]


def split_address(address_text: str) -> SplitResult:
    """Return the parts of a URL; if the URL is invalid, all parts are empty."""
    try:
        return urlsplit(address_text)
    # `urlsplit` raises ValueError if the host starts with [, but is not an IPv6 address
    except ValueError:
        return urlsplit("")


class S3Address(NamedTuple):
    """A bucket, and the key of an object or the common prefix of several keys."""

    bucket: str
    key: str


def parse_s3_address(address_text: str) -> S3Address | None:
    """Return bucket and key of an address s3://BUCKET/KEY; None for other addresses.

    A key may contain # and ?, which `urlsplit` would cut off.
    """
    scheme, separator, path = address_text.partition("://")
    if not separator or scheme.lower() != "s3":
        return None
    bucket, _, key = path.partition("/")
    return S3Address(bucket, key.lstrip("/"))


SEGMENT_PATTERN = (
    # matches a part of an object key, except "." and ".."
    rf"(?!\.{{1,2}}(?:/|\Z))[^/{INVISIBLE_CHARACTERS}]+"
)
TASK_PATTERN = "[a-zA-Z0-9][-a-zA-Z0-9_]*"
# maximum length of an object key in S3
MAX_KEY_BYTES = 1024


class ModelName(CheckedName):
    """The name of a registered model in MLflow."""

    KIND = "the name of a model"
    RULE = 'it must have 1 to 256 characters, without "/", ":" and control characters'
    PATTERN = re.compile(rf"(?!\.{{1,2}}\Z)[^/:{INVISIBLE_CHARACTERS}]+")
    MAX_BYTES = 256


class Version(CheckedName):
    """The version of a registered model: a positive number."""

    KIND = "the version of a model"
    RULE = "it must be a whole number from 1, as in MLflow"
    PATTERN = re.compile("[1-9][0-9]*")
    MAX_BYTES = 18

    @property
    def number(self) -> int:
        return int(self)


class TaskName(CheckedName):
    """The name of a task of a pipeline."""

    KIND = "the name of a task"
    RULE = 'it must consist of 1 to 128 letters, digits, "-" and "_"'
    PATTERN = re.compile(TASK_PATTERN)
    MAX_BYTES = 128


class ArtifactKey(CheckedName):
    """The key of an object in the object store, or the common prefix of several keys."""

    KIND = "the key of an object"
    RULE = (
        "it must be a relative path of at most 1,024 bytes, without empty parts, without the parts"
        " . and .., and without control characters"
    )
    PATTERN = re.compile(rf"{SEGMENT_PATTERN}(/{SEGMENT_PATTERN})*")
    MAX_BYTES = MAX_KEY_BYTES

    @property
    def prefix(self) -> str:
        """The common prefix of the keys of all objects in this folder."""
        return f"{self}/"


class TaskReference(ArtifactKey):
    """RUN/TASK: a task of a run. The text RUN/TASK is also the common key prefix of the task's
    artifacts."""

    KIND = "a reference to a task"
    RULE = "it must be RUN/TASK"
    PATTERN = re.compile(rf"{RunName.PATTERN.pattern}/{TASK_PATTERN}")
    MAX_BYTES = RunName.MAX_BYTES + 1 + TaskName.MAX_BYTES

    @classmethod
    def matches(cls, value: object) -> bool:
        """Return True if the value has the form RUN/TASK."""
        if not isinstance(value, str):
            return False
        run_name, slash, task_name = value.partition("/")
        return bool(slash) and RunName.matches(run_name) and TaskName.matches(task_name)

    @property
    def run(self) -> RunName:
        return RunName(self.partition("/")[0])

    @property
    def task(self) -> TaskName:
        return TaskName(self.partition("/")[2])


class ObjectId(CheckedName):
    """An id that a server assigns, such as of a run or an experiment of MLflow."""

    KIND = "an id"
    RULE = 'it must consist of 1 to 64 letters, digits, "-" and "_"'
    PATTERN = re.compile("[a-zA-Z0-9][-a-zA-Z0-9_]*")
    MAX_BYTES = 64


class CommitId(CheckedName):
    """The id of a commit, with -dirty if tracked files differ from the commit. Other git revisions,
    such as branches, are invalid."""

    KIND = "the id of a commit"
    RULE = (
        "it must consist of 40 or 64 digits and letters from a to f, with or without -dirty at"
        " the end"
    )
    PATTERN = re.compile("([0-9a-f]{40}|[0-9a-f]{64})(-dirty)?")
    MAX_BYTES = 70


class Digest(CheckedName):
    """A sha256, in hex."""

    KIND = "a sha256"
    RULE = "it must consist of 64 digits and letters from a to f"
    PATTERN = re.compile("[0-9a-f]{64}")
    MAX_BYTES = 64
