"""Artifacts of a run are shown and downloaded, but scripts in an artifact never run."""

import io
import tarfile
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import httpx
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, expect

from argolocal.page.sources import LocalRuns
from argolocal.page.tabs.artifact_source import MAX_UNPACKED_BYTES, StoredArtifacts
from argolocal.page.tabs.artifacts import content_disposition, make_preview, type_of
from tests.argolocal.page.tabs.conftest import PAGE, SVG
from tests.browser import PageServer


def get_tab(page: PageServer, artifact: str = "", file: str | None = None) -> dict[str, Any]:
    query = {"artifact": f"artifacts/{artifact}"} if artifact else {}
    if file is not None:
        query["file"] = file
    answer = page.get(f"/runs/artifacts/artifacts?{urlencode(query)}")
    assert answer.status_code == 200, answer.text
    return answer.json()


def get_content(page: PageServer, artifact: str, file: str = "", **more: str) -> httpx.Response:
    query = {"artifact": f"artifacts/{artifact}", "file": file, **more}
    return page.get(f"/runs/artifacts/artifact?{urlencode(query)}")


def test_all_artifacts_of_a_run_are_listed(zoo_page: PageServer) -> None:
    names = [row["artifact"] for row in get_tab(zoo_page)["artifacts"]]
    assert names == [
        "data-json",
        "table-csv",
        "picture-svg",
        "page-html",
        "folder",
        "large-txt",
        "plain",
    ]


def test_json_and_tables_have_a_preview(zoo_page: PageServer, browser: Browser) -> None:
    preview = get_tab(zoo_page, "data-json")["preview"]
    assert preview["kind"] == "json"
    assert preview["text"] == '{\n  "a": [\n    1,\n    2\n  ]\n}'

    table = get_tab(zoo_page, "table-csv")["preview"]
    assert (table["columns"], table["rows"]) == (["name", "value"], [["<b>x</b>", "1"]])
    tab = zoo_page.open(browser, "/runs/artifacts/artifacts?artifact=artifacts/table-csv")
    expect(tab.get_by_role("cell", name="<b>x</b>")).to_be_visible()


def test_a_large_text_is_cut(zoo_page: PageServer) -> None:
    preview = get_tab(zoo_page, "large-txt")["preview"]
    assert preview["is_cut"]
    assert len(preview["text"]) == 100_000
    assert len(get_content(zoo_page, "large-txt", "large.txt").content) == 2_000_000


def test_the_files_of_a_folder_are_listed_and_downloaded(zoo_page: PageServer) -> None:
    for artifact, folder in (("folder", "folder/"), ("plain", "")):
        shown = get_tab(zoo_page, artifact)
        paths = [file["path"] for file in shown["files"]]
        assert f"{folder}inner/dot.png" in paths
        assert len(paths) == 2
        answer = get_content(zoo_page, artifact, f"{folder}inner/dot.png")
        assert answer.content == b"\x89PNG\r\n\x1a\n"

    archive = get_content(zoo_page, "folder").content
    with tarfile.open(fileobj=io.BytesIO(archive)) as opened:
        assert any("dot.png" in name for name in opened.getnames())
    assert get_content(zoo_page, "plain").status_code == 404


@pytest.mark.parametrize(
    "file", ["../../etc/passwd", "/etc/passwd", "..", "inner", "folder/../..", "%2e%2e", "\0"]
)
def test_a_path_leads_to_no_other_file(zoo_page: PageServer, file: str) -> None:
    for artifact in ("folder", "plain", "data-json"):
        assert get_content(zoo_page, artifact, file).status_code == 404
    query = urlencode({"artifact": "artifacts/plain", "file": file})
    assert zoo_page.get(f"/runs/artifacts/artifacts?{query}").status_code == 404


def test_an_unknown_artifact_or_run_is_not_found(zoo_page: PageServer) -> None:
    for artifact in ("nothing", "../zoo", "", "artifacts/data-json"):
        assert get_content(zoo_page, artifact).status_code == 404
    for run in ("nothing", "..", "%2e%2e"):
        assert zoo_page.get(f"/runs/{run}/artifact?artifact=x").status_code == 404


@pytest.mark.parametrize(
    ("artifact", "file"),
    [("picture-svg", "picture.svg"), ("page-html", "page.html"), ("data-json", "data.json")],
)
def test_content_is_served_so_that_it_cannot_run(
    zoo_page: PageServer, artifact: str, file: str
) -> None:
    for more in ({}, {"show": "1"}):
        answer = get_content(zoo_page, artifact, file, **more)
        policy = answer.headers["content-security-policy"]
        assert policy.startswith("sandbox; default-src 'none'")
        assert "script" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["content-disposition"].startswith("attachment")
        assert "html" not in answer.headers["content-type"]
    picture = get_content(zoo_page, "folder", "folder/inner/dot.png", show="1")
    assert picture.headers["content-disposition"].startswith("inline")
    assert picture.headers["content-type"] == "image/png"


def test_a_script_in_an_artifact_does_not_run(zoo_page: PageServer, browser: Browser) -> None:
    tab = zoo_page.open(browser, "/runs/artifacts/artifacts?artifact=artifacts/page-html")
    expect(tab.get_by_role("region", name="Content of the file")).to_have_text(PAGE)
    tab.goto(f"{zoo_page.root}/runs/artifacts/artifacts?artifact=artifacts/picture-svg")
    picture = tab.get_by_role("img", name="Preview of picture.svg")
    expect(picture).to_be_visible()
    assert picture.evaluate("image => image.decode().then(() => image.naturalWidth)") == 9
    assert "hacked" not in tab.title()

    with tab.expect_download() as download:
        tab.get_by_role("link", name="Download this file").click()
    assert Path(download.value.path()).read_text() == SVG
    assert download.value.suggested_filename == "picture.svg"


def test_a_name_with_markup_is_text(zoo_page: PageServer, browser: Browser) -> None:
    tab = zoo_page.open(browser, "/runs/artifacts/artifacts?artifact=artifacts/folder")
    tab.get_by_role("link", name="onerror", exact=False).first.click()
    expect(tab.get_by_role("region", name="Content of the file")).to_have_text(PAGE)
    assert "hacked" not in tab.title()


def test_an_artifact_of_a_step_is_linked_from_its_details(
    zoo_page: PageServer, browser: Browser
) -> None:
    tab = zoo_page.open(browser, "/runs/artifacts?node=artifacts")
    tab.get_by_role("link", name="data-json").click()
    expect(tab.get_by_role("region", name="Content of the file")).to_contain_text('"a"')


def test_the_artifacts_are_accessible(zoo_page: PageServer, browser: Browser) -> None:
    for query in ("", "?artifact=artifacts/folder", "?artifact=artifacts/table-csv"):
        tab = zoo_page.open(browser, f"/runs/artifacts/artifacts{query}")
        result = Axe().run(tab)
        assert result.violations_count == 0, result.generate_report()


def test_a_run_without_artifacts_has_no_tab(zoo_page: PageServer) -> None:
    assert ">Artifacts<" not in zoo_page.get("/runs/zoo", "text/html").text
    assert ">Artifacts<" in zoo_page.get("/runs/artifacts", "text/html").text


@pytest.fixture
def archive_path(zoo_home: Path) -> Path:
    return next((zoo_home / "store").rglob("folder.tgz"))


def test_a_bomb_or_a_broken_archive_is_read_only_to_a_limit(
    zoo_home: Path, archive_path: Path
) -> None:
    run = LocalRuns(zoo_home).read("artifacts")
    source = StoredArtifacts.in_home(zoo_home, "argolocal")
    row = next(row for row in source.list(run) if row.artifact == "folder")
    content_of_archive = archive_path.read_bytes()
    try:
        with tarfile.open(archive_path, "w:gz", compresslevel=1) as archive:
            entry = tarfile.TarInfo("zeros")
            entry.size = MAX_UNPACKED_BYTES + 5_000_000
            archive.addfile(entry, io.BytesIO(bytes(entry.size)))
            archive.addfile(tarfile.TarInfo("last"))
        files = source.files(run, row)
        assert files.is_cut
        assert [file.path for file in files.files] == ["zeros"]

        for broken_archive in (b"", b"no archive", content_of_archive[:100]):
            archive_path.write_bytes(broken_archive)
            assert [file.path for file in source.files(run, row).files] == [""]
    finally:
        archive_path.write_bytes(content_of_archive)


@pytest.mark.parametrize(
    ("start", "name", "media_type"),
    [
        (b"\x89PNG\r\n\x1a\n", "x.html", "image/png"),
        (b"<svg onload=x>", "x.svg", "image/svg+xml"),
        (b"<svg onload=x>", "x.html", "text/plain; charset=utf-8"),
        (b"GIF89a<script>", "x.js", "image/gif"),
        (b"\0\1", "x.txt", "application/octet-stream"),
        ("ä".encode()[:1], "x", "application/octet-stream"),
    ],
)
def test_the_type_depends_on_the_content(start: bytes, name: str, media_type: str) -> None:
    assert type_of(start, name) == media_type


def test_a_file_name_cannot_add_a_header() -> None:
    header = content_disposition('a"\r\nSet-Cookie: x=1; ü\u202e.html', False)
    assert header.isascii()
    assert not set("\r\n") & set(header)
    assert header.startswith('attachment; filename="a___Set-Cookie')


def test_malformed_json_and_csv_are_shown_as_text() -> None:
    assert make_preview(b"{broken", "x.json", False, "").kind == "text"
    assert make_preview(b"[" * 100_000, "x.json", False, "").kind == "text"
    assert make_preview(b"", "x", False, "").kind == "empty"
    assert make_preview("ä".encode()[:1] * 9, "x", False, "").kind == "binary"
    assert make_preview(("x" * 99 + "ä").encode()[:100], "x", True, "").kind == "text"
