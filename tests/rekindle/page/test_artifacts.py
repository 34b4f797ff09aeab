"""The artifacts of a run are listed with their size, and parquet tables have a preview."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import polars as pl
import pytest

from argolocal.page.tabs.artifacts import UnreadableTable
from rekindle.local.cluster import LocalCluster
from rekindle.page import parquet
from rekindle.page.parquet import read_parquet
from tests.browser import PageServer, start_page
from tests.rekindle.page.tabs.recorded_runs import MARKUP, make_pod_node, record_run

RUN = "tables-aaaaa"


def write_table(folder: Path, frame: pl.DataFrame) -> Path:
    file = folder / "table.parquet"
    frame.write_parquet(file)
    return file


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PageServer]:
    """The page of a home (directory of runs) whose services are stopped."""
    folder = tmp_path_factory.mktemp("tables")
    home = folder / "home"
    frame = pl.DataFrame({"name": [MARKUP] * 60, "value": list(range(60))})
    contents = {
        "prepare/data/part.parquet": write_table(folder, frame).read_bytes(),
        "prepare/data/notes.txt": b"hello",
        "prepare/database/other.txt": b"x" * 1000,
        "prepare/broken.parquet": b"PAR1 no table PAR1",
    }
    cluster = LocalCluster(home)
    store = cluster.store()
    cluster.services.start("s3")
    for key, content in contents.items():
        store.put(f"{RUN}/{key}", content)

    names = ("data", "database", "broken.parquet", "missing")
    artifacts = {name: f"{RUN}/prepare/{name}" for name in names}
    record_run(home, RUN, {"name": "tables"}, [make_pod_node(RUN, "prepare", artifacts=artifacts)])
    cluster.services.down()
    with start_page(home, "rekindle") as server:
        yield server
    LocalCluster(home).services.down()


def get_artifact(page: PageServer, **query: str) -> dict[str, Any]:
    answer = page.get(f"/runs/{RUN}/artifacts?{urlencode(query)}")
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_the_list_shows_sizes_without_the_start_of_a_service(page: PageServer) -> None:
    sizes = {row["artifact"]: row["size"] for row in get_artifact(page)["artifacts"]}
    assert sizes.pop("data") > 500
    assert sizes == {"database": 1000, "broken.parquet": 18, "missing": None}
    assert "1.0 kB" in page.get(f"/runs/{RUN}/artifacts", "text/html").text


def test_a_table_has_its_first_rows_as_preview(page: PageServer) -> None:
    query = {"artifact": "prepare/data", "file": "part.parquet"}
    preview = get_artifact(page, **query)["preview"]
    assert preview["kind"] == "table"
    assert preview["columns"] == ["name", "value"]
    assert preview["rows"][0] == [MARKUP, "0"]
    assert len(preview["rows"]) == 50
    assert preview["is_cut"]
    text = page.get(f"/runs/{RUN}/artifacts?{urlencode(query)}", "text/html").text
    assert "60 rows, 2 columns" in text
    assert MARKUP not in text


def test_a_malformed_table_is_explained(page: PageServer) -> None:
    preview = get_artifact(page, artifact="prepare/broken.parquet")["preview"]
    assert preview["kind"] == "binary"
    assert preview["text"].startswith("This table has no preview: the file is not a valid parquet")


def test_a_table_with_many_columns_and_nested_values_is_cut(tmp_path: Path) -> None:
    columns = {f"c{index}": [index] for index in range(40)}
    nested = {"nested": [{"a": [1, None]}], "long": ["x" * 1000]}
    with write_table(tmp_path, pl.DataFrame(nested | columns)).open("rb") as file:
        table = read_parquet(file, 50, 30)
    assert (table.row_count, table.column_count, len(table.columns)) == (1, 42, 30)
    assert table.rows[0][:2] == ["{'a': [1, None]}", "x" * 200]


def test_the_reader_of_a_table_has_a_limit_of_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet, "MAX_MEMORY_BYTES", 200_000_000)
    zeros = pl.DataFrame({"zeros": pl.zeros(2_000_000, pl.Int64, eager=True)})
    with write_table(tmp_path, zeros).open("rb") as file, pytest.raises(UnreadableTable) as error:
        read_parquet(file, 50, 30)
    assert str(error.value)
