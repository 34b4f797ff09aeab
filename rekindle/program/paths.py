"""Names of files and folders below the checkpoint folder."""

import re

MAX_PATH_CHARS = 1024
MAX_NAME_BYTES = 255
# `.tmpAb12`, `tmp-checkpoint-500`, `latest.tmp.pt`, `latest.pt.tmp.17`, `latest.pt.part`
TEMPORARY_NAME = re.compile(
    r"\.?_?(tmp|temp)([._-].*)?|\.tmp.*|.*[._-]tmp([._-].*)?|.*\.(incomplete|part|partial|temp)|.*~",
    re.IGNORECASE,
)
STEP_WORD = r"(?:checkpoint|ckpt|chkpt|epoch|global_?step|iter|iteration|save|step)"
STEP_NAME = re.compile(rf"(?:.*[^a-z])?{STEP_WORD}[-_=.]?\d+(?:[^/]*)|\d+", re.IGNORECASE)
# the number after the word "step" counts before the number after another word
STEP_NUMBERS = (
    re.compile(r"(?:global_?)?step[-_=.]?(\d+)", re.IGNORECASE),
    re.compile(r"(?:iter|iteration)[-_=.]?(\d+)", re.IGNORECASE),
    re.compile(r"(?:checkpoint|ckpt|chkpt|save)[-_=.]?(\d+)", re.IGNORECASE),
    re.compile(r"epoch[-_=.]?(\d+)", re.IGNORECASE),
    re.compile(r"^(\d+)(?:\.[a-z]+)?$", re.IGNORECASE),
)


def is_safe_path(path: str) -> bool:
    """Return True for a relative path that stays below its folder and that every file system
    accepts."""
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
    """Return True for the name of a file or folder that a program writes before it renames it."""
    return TEMPORARY_NAME.fullmatch(name) is not None


def has_step(name: str) -> bool:
    """Return True for a name such as `checkpoint-500`, `step_500` or `0000500`."""
    return STEP_NAME.fullmatch(name) is not None


def parse_step(name: str) -> int | None:
    """Return the step in a name, or None."""
    for pattern in STEP_NUMBERS:
        match = pattern.search(name)
        if match and len(match[1]) <= 15:
            return int(match[1])
    return None


def without_numbers(path: str) -> str:
    """Replace the numbers of a path: paths with the same result are versions of one thing."""
    return re.sub(r"\d+", "N", path)
