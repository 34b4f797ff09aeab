"""The tab with the artifacts of a run: their list, previews, and downloads.

Artifacts are untrusted: an HTML page or a picture can contain scripts. The browser displays only
raster images, and SVG inside an `img` element; all other files are downloads. The headers of the
response with an artifact's content forbid scripts and further requests.
"""

import csv
import io
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from tempfile import TemporaryFile
from typing import Any, BinaryIO
from urllib.parse import quote, urlencode

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from argolocal.common.checked_names import RunName
from argolocal.common.json_text import to_json
from argolocal.common.wording import escape_control_chars
from argolocal.errors import NotFound, StorageError
from argolocal.page.sources import Run, RunSource
from argolocal.page.tabs.artifact_source import (
    ArtifactFile,
    ArtifactRow,
    ArtifactSource,
    Stream,
)
from argolocal.page.templating import format_bytes

PREVIEW_BYTES = 1 << 20
# a longer text is cut, because a browser would need much time to display it
MAX_TEXT_CHARACTERS = 100_000
MAX_TABLE_ROWS = 50
MAX_TABLE_COLUMNS = 30
MAX_CELL_CHARACTERS = 200
# maximum size of a table in a binary format; such a table is read completely, because its index is
# at the end of the file
MAX_TABLE_BYTES = 64_000_000
ROWS_PER_PAGE = 100
CHUNK_BYTES = 65_536

# first bytes of a file → media type of a raster image
PICTURES = (
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF87a", "image/gif"),
    (b"GIF89a", "image/gif"),
)
SVG = "image/svg+xml"
CONTENT_HEADERS = {
    "Content-Security-Policy": (
        "sandbox; default-src 'none'; style-src 'unsafe-inline'; img-src data:;"
        " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
}


@dataclass(frozen=True)
class FileLink:
    """A file of an artifact. `link` is the URL of the file's preview; `download` is the URL of its
    content."""

    path: str
    size: int | None
    link: str
    download: str


@dataclass(frozen=True)
class Preview:
    """The start of a file. `kind`: text, json, table, picture, empty or binary. `text`: the text,
    or a sentence about a table or binary file. `source` is the URL of a picture. `is_cut` is True
    if the file has more content than the preview."""

    kind: str
    text: str = ""
    source: str = ""
    columns: list[str] = field(default_factory=list)
    rows: list[list[str]] = field(default_factory=list)
    is_cut: bool = False


@dataclass(frozen=True)
class Listed:
    """An artifact in the list, with the URLs of its preview (`link`) and its download."""

    step: str
    node: str
    artifact: str
    size: int | None
    note: str
    link: str
    download: str


@dataclass(frozen=True)
class Artifacts:
    """The content of the tab: the list of artifacts, or the artifact `name` with its files or the
    preview of a file."""

    artifacts: list[Listed]
    count: int
    page: int
    pages: int
    name: str = ""
    step: str = ""
    node: str = ""
    file: str = ""
    size: int | None = None
    download: str = ""
    stored_object: str = ""
    files: list[FileLink] = field(default_factory=list)
    is_cut: bool = False
    preview: Preview | None = None
    problem: str = ""


class UnreadableTable(Exception):
    """A table cannot be shown. The message of the exception is the reason."""


@dataclass(frozen=True)
class TableContent:
    """The first rows of a table. `row_count`, `column_count`: size of the complete table, of which
    this object contains the start."""

    columns: list[str]
    rows: list[list[str]]
    row_count: int
    column_count: int


# function that returns the first rows of a file; arguments: file, maximum number of rows, maximum
# number of columns. Raises UnreadableTable.
ReadTable = Callable[[BinaryIO, int, int], TableContent]


class ArtifactsTab:
    """The tab `artifacts`, and the HTTP route that returns the content of artifacts.

    `table_readers`: functions that read tables in binary formats, by the suffix of the file.
    """

    name = "artifacts"
    title = "Artifacts"
    content = Artifacts

    def __init__(
        self,
        source: RunSource,
        artifacts: ArtifactSource,
        table_readers: Mapping[str, ReadTable] | None = None,
    ) -> None:
        self.source = source
        self.artifacts = artifacts
        self.table_readers = table_readers or {}

    def is_shown(self, run: Run) -> bool:
        return any(
            (node.get("outputs") or {}).get("artifacts")
            for node in list((run.status.get("nodes") or {}).values())
        )

    def build(self, run: Run, query: Mapping[str, str]) -> Any:
        rows = self.artifacts.list(run)
        pages = max(1, -(-len(rows) // ROWS_PER_PAGE))
        number = query.get("page", "1")
        page = min(pages, max(1, int(number))) if number.isdecimal() and len(number) < 9 else 1
        shown_rows = rows[(page - 1) * ROWS_PER_PAGE : page * ROWS_PER_PAGE]
        if not query.get("artifact"):
            sizes = self.artifacts.sizes(run, shown_rows)
            shown_rows = [replace(row, size=sizes.get(row.name)) for row in shown_rows]
            return Artifacts(list_artifacts(run, shown_rows), len(rows), page, pages)

        row = find_row(rows, query["artifact"])
        try:
            return self._show(run, row, query.get("file"), Artifacts([], len(rows), page, pages))
        except StorageError as error:
            return Artifacts(
                [], len(rows), page, pages, row.artifact, row.step, row.node, problem=str(error)
            )

    def _show(self, run: Run, row: ArtifactRow, path: str | None, base: Artifacts) -> Artifacts:
        files = self.artifacts.files(run, row)
        if path is None and len(files.files) == 1:
            path = files.files[0].path

        values = {
            "artifacts": [],
            "count": base.count,
            "page": base.page,
            "pages": base.pages,
            "name": row.artifact,
            "step": row.step,
            "node": row.node,
            "is_cut": files.is_cut,
            "stored_object": content_url(run, row, "") if _is_object(row, files.files) else "",
        }
        if path is None:
            links = [
                FileLink(
                    file.path,
                    file.size,
                    f"?{urlencode({'artifact': row.name, 'file': file.path})}",
                    content_url(run, row, file.path),
                )
                for file in files.files
            ]
            return Artifacts(**values, files=links)

        file = next((file for file in files.files if file.path == path), None)
        if file is None:
            raise HTTPException(404, f"the file {path[:100]!r} does not exist in {row.name}.")
        return Artifacts(
            **values,
            file=path or row.artifact,
            size=file.size,
            download=content_url(run, row, path),
            preview=self._preview(run, row, path),
        )

    def _preview(self, run: Run, row: ArtifactRow, path: str) -> Preview:
        file = self.artifacts.open(run, row, path)
        read_table = self.table_readers.get(file.name.lower().rpartition(".")[2])
        with closing(file.stream):
            if read_table:
                return preview_table(file.stream, read_table)
            start = read_start(file.stream, PREVIEW_BYTES + 1)
        return make_preview(
            start[:PREVIEW_BYTES],
            file.name,
            len(start) > PREVIEW_BYTES,
            f"{content_url(run, row, path)}&show=1",
        )

    def routes(self) -> list[Route]:
        """Return the HTTP route that returns the content of artifacts."""
        return [Route("/runs/{run}/artifact", self.respond)]

    def respond(self, request: Request) -> Response:
        """Answer GET /runs/RUN/artifact?artifact=NAME&file=PATH with the content of a file."""
        run_name = RunName.parse_or_none(request.path_params["run"])
        if run_name is None or run_name not in self.source.names():
            raise HTTPException(404, "this run does not exist.")

        query = request.query_params
        run = self.source.read(run_name)
        row = find_row(self.artifacts.list(run), query.get("artifact", ""))
        try:
            file = self.artifacts.open(run, row, query.get("file", ""))
        except NotFound as error:
            raise HTTPException(404, str(error)) from None

        try:
            start = file.stream.read(CHUNK_BYTES)
        except BaseException:
            file.stream.close()
            raise

        media_type = type_of(start, file.name)
        is_picture = media_type.startswith("image/") and media_type != SVG
        is_inline = is_picture and query.get("show") == "1"
        headers = {
            **CONTENT_HEADERS,
            "Content-Disposition": content_disposition(file.name, is_inline),
        }
        if file.size is not None:
            headers["Content-Length"] = str(file.size)
        return StreamingResponse(
            _chunks(start, file.stream), media_type=media_type, headers=headers
        )


def list_artifacts(run: Run, rows: list[ArtifactRow]) -> list[Listed]:
    """Return the rows with the URLs of their previews and downloads."""
    return [
        Listed(
            step=row.step,
            node=row.node,
            artifact=row.artifact,
            size=row.size,
            note=row.note,
            link=""
            if row.note
            else f"/runs/{run.name}/artifacts?{urlencode({'artifact': row.name})}",
            download="" if row.note else content_url(run, row, ""),
        )
        for row in rows
    ]


def find_row(rows: list[ArtifactRow], name: str) -> ArtifactRow:
    """Return the row of the artifact with the name `name`. Raises HTTPException with status 404 if
    no artifact has this name."""
    row = next((row for row in rows if row.name == name and not row.note), None)
    if row is None:
        raise HTTPException(404, f"the artifact {name[:100]!r} does not exist in this run.")
    return row


def content_url(run: Run, row: ArtifactRow, path: str) -> str:
    """Return the URL of a file's content. The path "" means the whole stored object."""
    query = {"artifact": row.name} | ({"file": path} if path else {})
    return f"/runs/{run.name}/artifact?{urlencode(query)}"


def _is_object(row: ArtifactRow, files: list[ArtifactFile]) -> bool:
    """Return True if the artifact is a single object in the object store, not a folder of
    objects."""
    return row.key.endswith((".tgz", ".tar.gz")) or [file.path for file in files] == [""]


def read_start(stream: Stream, size: int) -> bytes:
    """Read `size` bytes from a stream, or fewer if the stream ends before."""
    chunks: list[bytes] = []
    remaining_bytes = size
    while remaining_bytes > 0:
        chunk = stream.read(min(remaining_bytes, CHUNK_BYTES))
        if not chunk:
            break
        chunks.append(chunk)
        remaining_bytes -= len(chunk)
    return b"".join(chunks)


def type_of(start: bytes, name: str) -> str:
    """Return the media type to send to a browser. Text is always text/plain, even if it is an HTML
    page or a script."""
    for magic, media_type in PICTURES:
        if start.startswith(magic):
            return media_type
    if start[:4] == b"RIFF" and start[8:12] == b"WEBP":
        return "image/webp"
    if name.lower().endswith(".svg") and b"<svg" in start[:4096]:
        return SVG
    return "text/plain; charset=utf-8" if is_text(start) else "application/octet-stream"


def is_text(start: bytes) -> bool:
    """Return True if the start of a file is text in UTF-8."""
    if b"\0" in start:
        return False
    try:
        start.decode()
    except UnicodeDecodeError as error:
        # `start` may end in the middle of a character
        return error.start > len(start) - 4 and len(start) > 3
    return True


def make_preview(start: bytes, name: str, is_cut: bool, source: str) -> Preview:
    """Return the preview of a file. `is_cut` is True if the file is longer than `start`; `source`
    is the URL of its content."""
    if not start:
        return Preview("empty")
    if type_of(start, name).startswith("image/"):
        return Preview("picture", source=source)
    if not is_text(start):
        return Preview("binary")

    text = start.decode(errors="replace")
    suffix = name.lower().rpartition(".")[2]
    if suffix in ("csv", "tsv"):
        table = _make_table(text, "\t" if suffix == "tsv" else ",", is_cut)
        if table:
            return table

    kind = "text"
    if text.lstrip()[:1] in ("{", "[") and not is_cut:
        try:
            text = to_json(json.loads(text), indent=2, ensure_ascii=False)
            kind = "json"
        except (ValueError, RecursionError):
            pass
    is_cut = is_cut or len(text) > MAX_TEXT_CHARACTERS
    return Preview(kind, text=text[:MAX_TEXT_CHARACTERS], is_cut=is_cut)


def preview_table(stream: Stream, read_table: ReadTable) -> Preview:
    """Return the first rows of a table in a binary format."""
    with TemporaryFile() as file:
        for chunk in iter(lambda: stream.read(CHUNK_BYTES), b""):
            file.write(chunk)
            if file.tell() > MAX_TABLE_BYTES:
                limit = format_bytes(MAX_TABLE_BYTES)
                return Preview("binary", text=f"This table is larger than {limit}: download it.")
        if not file.tell():
            return Preview("empty")

        file.seek(0)
        try:
            table = read_table(file, MAX_TABLE_ROWS, MAX_TABLE_COLUMNS)
        except UnreadableTable as error:
            return Preview("binary", text=f"This table has no preview: {error}.")

    counts = f"{table.row_count:,} rows, {table.column_count:,} columns"
    is_cut = table.row_count > len(table.rows) or table.column_count > len(table.columns)
    return Preview("table", text=counts, columns=table.columns, rows=table.rows, is_cut=is_cut)


def _make_table(text: str, delimiter: str, is_cut: bool) -> Preview | None:
    """Return the first rows of a CSV file, or None if it is malformed."""
    rows: list[list[str]] = []
    try:
        for row in csv.reader(io.StringIO(text), delimiter=delimiter):
            if len(rows) > MAX_TABLE_ROWS:
                is_cut = True
                break
            rows.append([cell[:MAX_CELL_CHARACTERS] for cell in row[:MAX_TABLE_COLUMNS]])
    except csv.Error:
        return None
    if not rows:
        return None
    return Preview("table", columns=rows[0], rows=rows[1:], is_cut=is_cut)


def content_disposition(name: str, is_inline: bool) -> str:
    """Return the Content-Disposition header for a file name. Characters other than letters, digits
    and `._-` appear only in the header's encoded name."""
    simple_name = "".join(
        character if character.isascii() and (character.isalnum() or character in "._-") else "_"
        for character in name
    )
    kind = "inline" if is_inline else "attachment"
    encoded_name = quote(escape_control_chars(name).encode(errors="replace"), safe="")
    return f"{kind}; filename=\"{simple_name or 'artifact'}\"; filename*=UTF-8''{encoded_name}"


def _chunks(start: bytes, stream: Stream) -> Iterator[bytes]:
    with closing(stream):
        chunk = start
        while chunk:
            yield chunk
            chunk = stream.read(CHUNK_BYTES)
