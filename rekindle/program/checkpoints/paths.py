"""Names of files and folders below the checkpoint folder."""

import os
import re
from pathlib import Path

MAX_PATH_CHARS = 1024
MAX_NAME_BYTES = 255
# `.tmpAb12`, `tmp-checkpoint-500`, `latest.tmp.pt`, `latest.pt.tmp.17`, `latest.pt.part`
TEMPORARY_NAME = re.compile(
    r"\.?_?(tmp|temp)([._-].*)?|\.tmp.*|.*[._-]tmp([._-].*)?|.*\.(incomplete|part|partial|temp)|.*~",
    re.IGNORECASE,
)
STEP_WORD = r"(?:checkpoint|ckpt|chkpt|epoch|global_?step|iter|iteration|save|step)"
STEP_NAME = re.compile(rf"(?:.*[^a-z])?{STEP_WORD}[-_=.]?\d+(?:[^/]*)|\d+", re.IGNORECASE)
# in order of priority: a number after the word "step" comes first
STEP_NUMBERS = (
    re.compile(r"(?:global_?)?step[-_=.]?(\d+)", re.IGNORECASE),
    re.compile(r"(?:iter|iteration)[-_=.]?(\d+)", re.IGNORECASE),
    re.compile(r"(?:checkpoint|ckpt|chkpt|save)[-_=.]?(\d+)", re.IGNORECASE),
    re.compile(r"epoch[-_=.]?(\d+)", re.IGNORECASE),
    re.compile(r"^(\d+)(?:\.[a-z]+)?$", re.IGNORECASE),
)

# three kinds of numbers: `save` counts saves (`epoch_3_of_40.pt`), `part` distinguishes files of
# one save (`rank_1.pt`, `shard_0_of_3.pt`, `model-00001-of-00003.safetensors`), and other numbers
NUMBERS = re.compile(
    r"(?P<save>(?:epoch|step|iter|iteration|save)[-_=.]?\d+(?:[-_]?of[-_]?\d+)?)"
    r"|(?P<part>(?<![a-z])(?:rank|shard|part|worker|process|proc|device|gpu|node|host|replica|[dmpt]p)"
    r"s?[-_=.]?\d+(?:[-_]?of[-_]?\d+)?|\d+[-_]?of[-_]?\d+)"
    r"|\d+",
    re.IGNORECASE,
)


def resolve(path: Path) -> Path:
    """Return a path without symbolic links. A link that leads to itself is left unchanged, while
    older versions of `Path.resolve` raise an error."""
    return Path(os.path.realpath(path))


def is_safe_path(path: str) -> bool:
    """Return True if a relative path stays below its folder and is valid on every file system."""
    names = path.split("/")
    return (
        0 < len(path) <= MAX_PATH_CHARS
        and "\0" not in path
        and all(name not in ("", ".", "..") for name in names)
        and all(len(name.encode(errors="surrogatepass")) <= MAX_NAME_BYTES for name in names)
        and _is_unicode(path)
    )


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def is_temporary(name: str) -> bool:
    """Return True if programs use such a name for unfinished files or folders, which they rename
    afterwards."""
    return TEMPORARY_NAME.fullmatch(name) is not None


def has_step(name: str) -> bool:
    """Return True for a name such as `checkpoint-500`, `step_500` or `0000500`."""
    return STEP_NAME.fullmatch(name) is not None


def parse_step(name: str) -> int | None:
    """Return the step in a name, or None."""
    name = _without_parts(name)
    for pattern in STEP_NUMBERS:
        match = pattern.search(name)
        if match and len(match[1]) <= 15:
            return int(match[1])
    return None


def without_numbers(path: str) -> str:
    """Replace each number in a path by N."""
    return re.sub(r"\d+", "N", path)


def save_numbers(path: str) -> list[int]:
    """Return the numbers in a path, except the numbers of ranks and shards."""
    return [int(number) for number in re.findall(r"\d{1,15}", _without_parts(path))]


def _without_parts(path: str) -> str:
    """Remove the numbers of ranks and shards from a path, including the word before each number."""
    return NUMBERS.sub(lambda match: "" if match["part"] else match[0], path)


def family_of(path: str) -> str:
    """Replace the numbers in a path by N, except the numbers of ranks and shards. Paths with the
    same result are versions of the same checkpoint."""
    return NUMBERS.sub(lambda match: match["part"] or without_numbers(match[0]), path)
