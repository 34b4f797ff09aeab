"""Names of files and folders below the checkpoint folder."""

import os
import re
from pathlib import Path

MAX_PATH_CHARS = 1024
MAX_NAME_BYTES = 255
# matches temporary names, such as `.tmpAb12`, `tmp-checkpoint-500`, `latest.tmp.pt`,
# `latest.pt.tmp.17`, `latest.pt.part`
TEMPORARY_NAME_PATTERN = re.compile(
    r"\.?_?(tmp|temp)([._-].*)?|\.tmp.*|.*[._-]tmp([._-].*)?|.*\.(incomplete|part|partial|temp)|.*~",
    re.IGNORECASE,
)
STEP_WORD_PATTERN = r"(?:checkpoint|ckpt|chkpt|epoch|global_?step|iter|iteration|save|step)"
STEP_NAME_PATTERN = re.compile(
    rf"(?:.*[^a-z])?{STEP_WORD_PATTERN}[-_=.]?\d+(?:[^/]*)|\d+", re.IGNORECASE
)
# patterns of step numbers in order of priority: a number after the word "step" comes first
STEP_NUMBER_PATTERNS = (
    re.compile(r"(?:global_?)?step[-_=.]?(\d+)", re.IGNORECASE),
    re.compile(r"(?:iter|iteration)[-_=.]?(\d+)", re.IGNORECASE),
    re.compile(r"(?:checkpoint|ckpt|chkpt|save)[-_=.]?(\d+)", re.IGNORECASE),
    re.compile(r"epoch[-_=.]?(\d+)", re.IGNORECASE),
    re.compile(r"^(\d+)(?:\.[a-z]+)?$", re.IGNORECASE),
)

# matches numbers of three kinds. A `save` counts saves (`epoch_3_of_40.pt`), a `part` distinguishes
# files of one save (`rank_1.pt`, `shard_0_of_3.pt`, `model-00001-of-00003.safetensors`), and other
# numbers
NUMBER_PATTERN = re.compile(
    r"(?P<save>(?:epoch|step|iter|iteration|save)[-_=.]?\d+(?:[-_]?of[-_]?\d+)?)"
    r"|(?P<part>(?<![a-z])(?:rank|shard|part|worker|process|proc|device|gpu|node|host|replica|[dmpt]p)"
    r"s?[-_=.]?\d+(?:[-_]?of[-_]?\d+)?|\d+[-_]?of[-_]?\d+)"
    r"|\d+",
    re.IGNORECASE,
)


def resolve(path: Path) -> Path:
    """Return a path without symbolic links. A link that leads to itself is left unchanged, instead
    of raising an error as older versions of `Path.resolve` do."""
    return Path(os.path.realpath(path))


def is_safe_path(path: str) -> bool:
    """Return True if a relative path stays below its folder and is valid on every file system."""
    path_parts = path.split("/")
    return (
        0 < len(path) <= MAX_PATH_CHARS
        and "\0" not in path
        and all(path_part not in ("", ".", "..") for path_part in path_parts)
        and all(
            len(path_part.encode(errors="surrogatepass")) <= MAX_NAME_BYTES
            for path_part in path_parts
        )
        and _is_valid_unicode(path)
    )


def _is_valid_unicode(path_text: str) -> bool:
    try:
        path_text.encode()
    except UnicodeEncodeError:
        return False
    return True


def is_temporary_name(file_name: str) -> bool:
    """Return True if a name has a form that programs use for unfinished files or folders, which
    they rename afterwards."""
    return TEMPORARY_NAME_PATTERN.fullmatch(file_name) is not None


def has_step_number(file_name: str) -> bool:
    """Return True for a name such as `checkpoint-500`, `step_500` or `0000500`."""
    return STEP_NAME_PATTERN.fullmatch(file_name) is not None


def parse_step(file_name: str) -> int | None:
    """Return the step that a name of a file or folder contains, or None."""
    file_name = _remove_part_numbers(file_name)
    for step_pattern in STEP_NUMBER_PATTERNS:
        step_match = step_pattern.search(file_name)
        if step_match and len(step_match[1]) <= 15:
            return int(step_match[1])
    return None


def replace_numbers(path: str) -> str:
    """Replace each number in a path by N."""
    return re.sub(r"\d+", "N", path)


def parse_save_numbers(path: str) -> list[int]:
    """Return the numbers in a path, except the numbers of ranks and shards."""
    return [int(number) for number in re.findall(r"\d{1,15}", _remove_part_numbers(path))]


def _remove_part_numbers(path: str) -> str:
    """Remove the numbers of ranks and shards from a path, including the word before each number."""
    return NUMBER_PATTERN.sub(
        lambda number_match: "" if number_match["part"] else number_match[0], path
    )


def make_family_path(path: str) -> str:
    """Replace the numbers in a path by N, except the numbers of ranks and shards. Paths with the
    same result are versions of the same checkpoint."""
    return NUMBER_PATTERN.sub(
        lambda number_match: number_match["part"] or replace_numbers(number_match[0]), path
    )
