"""Read parts of a log, and search it, with bounded memory.

A position in a log is a byte offset, because finding a line by its number would need a count of the
lines before it.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from argolocal.common.wording import COLOR_CODE, escape_control_chars
from argolocal.page.log_files import LogFile

PAGE_BYTES = 64_000
# number of bytes that a page shows before its marked line
CONTEXT_BYTES = 8_000
BLOCK_BYTES = 1 << 20
MAX_LINE_LENGTH = 2000
MAX_MATCHES = 200
MAX_MATCH_LENGTH = 300
# maximum number of bytes before a page in which lines are counted to show line numbers: for a local
# log, and for the log of a cluster
MAX_COUNTED_BYTES = (64_000_000, 1_000_000)
COLOR_BYTES = re.compile(COLOR_CODE.pattern.encode())
# texts that indicate an error in a line, in lower case
ERRORS = (
    "error:",
    "traceback (most recent call last)",
    "error (exit code",
    "exception:",
    "panic:",
    "fatal:",
)
ERROR_BYTES = tuple(text.encode() for text in ERRORS)


@dataclass(frozen=True)
class LogLine:
    """A line of a log. `offset`: position of the line's first byte. `cut`: number of bytes at the
    end of the line that are not shown. `is_complete` is False if the line break at the end has not
    been written yet."""

    offset: int
    number: int | None
    text: str
    cut: int = 0
    is_error: bool = False
    is_marked: bool = False
    is_complete: bool = True


@dataclass(frozen=True)
class LogPage:
    """The part of a log from the byte `start` to the byte `end`. `data`: the bytes of the page.
    `size`: number of bytes of the whole log."""

    start: int
    end: int
    size: int
    data: bytes


@dataclass(frozen=True)
class Match:
    """A line that contains the searched text, split into the text before the match, the match, and
    the text after the match."""

    offset: int
    number: int
    text_before: str
    text: str
    text_after: str


@dataclass(frozen=True)
class Matches:
    """The first matching lines of a log. `more`: number of matching lines after these lines."""

    lines: list[Match]
    more: int


def read_end(log: LogFile) -> LogPage:
    """Return the last complete lines of a log, and the line that is being written."""
    size = log.size()
    start = max(0, size - PAGE_BYTES)
    data = log.read(start, size - start)
    if start:
        # skip the first line, which may be incomplete, unless it is the only line
        skipped_bytes = data.find(b"\n") + 1
        if skipped_bytes < len(data):
            start += skipped_bytes
            data = data[skipped_bytes:]
    return LogPage(start, start + len(data), size, data)


def read_page(log: LogFile, offset: int) -> LogPage:
    """Return the page that starts at the byte `offset`, which may be in the middle of a line."""
    size = log.size()
    if offset >= size:
        return read_end(log)

    data = log.read(offset, PAGE_BYTES)
    if offset + len(data) < size:
        # if the data contain no line break, the page is a part of a long line
        data = data[: data.rfind(b"\n") + 1] or data
    return LogPage(offset, offset + len(data), size, data)


def find_previous_page(log: LogFile, start: int, size: int = PAGE_BYTES) -> int:
    """Return the offset of the page before `start`; this page may end a little after `start`."""
    offset = max(0, start - size)
    if offset == 0:
        return 0
    line_break = log.read(offset - 1, start - offset).find(b"\n")
    if line_break < 0:
        return offset
    return offset + line_break


def split_lines(page: LogPage, first_number: int | None, mark: int | None = None) -> list[LogLine]:
    """Return the lines of a page. `first_number`: number of the page's first line, or None if lines
    are not numbered. `mark`: offset of a byte in the line to mark."""
    lines: list[LogLine] = []
    offset = page.start
    number = first_number
    for line in page.data.split(b"\n"):
        end = offset + len(line) + 1
        has_line_break = end <= page.end
        if line or has_line_break:
            shown_line = make_line(line, offset, number)
            is_marked = mark is not None and offset <= mark < end
            lines.append(replace(shown_line, is_marked=is_marked, is_complete=has_line_break))
        offset = end
        if number is not None:
            number += 1
    return lines


def make_line(line: bytes, offset: int, number: int | None = None) -> LogLine:
    """Return a line in the form that users see: shortened, without colours, with visible control
    characters. If a progress bar has overwritten the line, the returned line only contains the last
    state of the bar."""
    text = line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace")
    cut = len(text[MAX_LINE_LENGTH:].encode(errors="replace"))
    return LogLine(
        offset,
        number,
        escape_control_chars(text[:MAX_LINE_LENGTH]),
        cut,
        is_error=contains_error(text[:MAX_LINE_LENGTH]),
    )


def contains_error(text: str) -> bool:
    """Return True if a line contains one of the texts in ERRORS."""
    lower_text = text.lower()
    return any(error in lower_text for error in ERRORS)


def count_lines(log: LogFile, offset: int) -> int | None:
    """Return the number of line breaks before the byte `offset`, or None if counting would take
    long."""
    if offset > MAX_COUNTED_BYTES[0 if log.is_local else 1]:
        return None
    return sum(block.count(b"\n") for _, block in _blocks(log, offset))


def _blocks(log: LogFile, end: int) -> Iterator[tuple[int, bytes]]:
    """Yield the blocks of a log, with their offsets, that end before the byte `end`."""
    offset = 0
    while offset < end:
        block = log.read(offset, min(BLOCK_BYTES, end - offset))
        if not block:
            return
        yield offset, block
        offset += len(block)


def _line_blocks(log: LogFile) -> Iterator[tuple[int, bytes]]:
    """Yield blocks of complete lines with their offsets. A very long line is split into several
    blocks."""
    incomplete_line = b""
    end = 0
    for offset, block in _blocks(log, log.size()):
        end = offset + len(block)
        start = offset - len(incomplete_line)
        data = incomplete_line + block
        length = data.rfind(b"\n") + 1
        if not length and len(data) > BLOCK_BYTES:
            length = len(data)
        incomplete_line = data[length:]
        if length:
            yield start, data[:length]

    if incomplete_line:
        yield end - len(incomplete_line), incomplete_line


def find_error(log: LogFile) -> int | None:
    """Return the offset of the first line with an error, or None."""
    for offset, block in _line_blocks(log):
        lower_block = block.lower()
        indexes = [lower_block.find(error) for error in ERROR_BYTES]
        first_index = min((index for index in indexes if index >= 0), default=None)
        if first_index is not None:
            return offset + block.rfind(b"\n", 0, first_index) + 1
    return None


def search(log: LogFile, text: str, limit: int = MAX_MATCHES) -> Matches:
    """Return the lines of a log that contain a text, at most `limit` lines. The search ignores
    upper and lower case, and colour codes."""
    matches: list[Match] = []
    more = 0
    number = 1

    for offset, block in _line_blocks(log):
        folded_text, folded_block = _fold(text, block)
        lines: list[bytes] = []

        position = folded_block.find(folded_text)
        while position >= 0 and len(matches) < limit:
            lines = lines or block.split(b"\n")
            index = folded_block.count(b"\n", 0, position)
            line_offset = offset + sum(map(len, lines[:index])) + index
            matches.append(_make_match(line_offset, number + index, lines[index], text))

            line_break = folded_block.find(b"\n", position)
            position = folded_block.find(folded_text, line_break) if line_break >= 0 else -1

        if position >= 0:
            more += folded_block.count(folded_text, position)
        number += block.count(b"\n")

    return Matches(matches, more)


def _fold(text: str, block: bytes) -> tuple[bytes, bytes]:
    """Return a text and a block of a log in lower case and without colour codes. The lines of the
    returned block correspond to the lines of `block`."""
    if b"\x1b" in block:
        block = COLOR_BYTES.sub(b"", block)
    if text.isascii():
        return text.lower().encode(), block.lower()
    return text.lower().encode(errors="replace"), block.decode(errors="replace").lower().encode()


def _make_match(offset: int, number: int, line: bytes, text: str) -> Match:
    shown = escape_control_chars(line.decode(errors="replace"))
    start = max(0, shown.lower().find(text.lower()))
    end = start + len(text)
    context = MAX_MATCH_LENGTH // 2
    text_before = shown[max(0, start - context) : start]
    return Match(offset, number, text_before, shown[start:end], shown[end : end + context])
