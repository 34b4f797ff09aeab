"""All formats and locations of a source give the same rows; a source that cannot be read leads to
one clear error message."""

from datetime import datetime
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from pydantic import ValidationError

from rekindle.errors import ConfigError, DataError
from rekindle.storage import Store
from steps.fraud.data.row_checks import check
from steps.fraud.data.simulate import simulate
from steps.fraud.data.simulation_uri import World
from steps.fraud.data.source import read
from steps.fraud.fraud_config import Columns, Data


@pytest.fixture(scope="module")
def published() -> pl.DataFrame:
    """A file of transactions with the column names of the published data and an extra column."""
    world = simulate(World(seed=3, cards=40, terminals=80, days=20))
    return world.rename({k: v for k, v in Columns().model_dump().items()}).with_columns(
        TX_TIME_DAYS=pl.lit(1)
    )


def rows(source: Any, tmp_path: Path, **settings: Any) -> pl.DataFrame:
    """Read and check the rows of a source."""
    data = Data(source=str(source), **settings)
    return check(read(data, tmp_path / "scratch"), data.columns, 0, data.text).rows.to_frame()


def test_parquet_csv_folders_and_s3_give_the_same_rows(
    published: pl.DataFrame, tmp_path: Path, s3: Store
) -> None:
    half = len(published) // 2
    folders = {name: tmp_path / name for name in ("parquets", "csvs")}
    for folder in folders.values():
        (folder / "deep").mkdir(parents=True)

    published.write_parquet(tmp_path / "all.parquet")
    published[:half].write_parquet(folders["parquets"] / "a.parquet")
    published[half:].write_parquet(folders["parquets"] / "deep" / "b.pq")
    published[:half].write_csv(folders["csvs"] / "a.csv")
    published[half:].write_csv(folders["csvs"] / "deep" / "b.csv")
    (folders["csvs"] / "README.md").write_text("not data")
    s3.upload(tmp_path / "all.parquet", "raw/all.parquet")
    s3.upload(folders["csvs"], "raw/folder#1")

    expected = rows(tmp_path / "all.parquet", tmp_path)
    assert len(expected) == len(published)

    sources = [*folders.values(), s3.uri("raw/all.parquet"), s3.uri("raw/folder#1")]
    for source in sources:
        assert rows(source, tmp_path).equals(expected), source


def test_column_names_can_be_configured(published: pl.DataFrame, tmp_path: Path) -> None:
    renamed_table = published.rename({"CUSTOMER_ID": "pan", "TX_AMOUNT": "euro"}).drop(
        "TX_FRAUD_SCENARIO"
    )
    renamed_table.write_parquet(tmp_path / "mine.parquet")
    read_rows = rows(tmp_path / "mine.parquet", tmp_path, columns={"card": "pan", "amount": "euro"})
    assert read_rows["card"].to_list() == published["CUSTOMER_ID"].to_list()
    assert read_rows["scenario"].sum() == 0


def test_a_missing_column_is_named_with_the_nearest_name_and_setting(
    published: pl.DataFrame, tmp_path: Path
) -> None:
    published.rename({"TX_AMOUNT": "TX_AMOUNTS"}).drop("TERMINAL_ID").write_parquet(
        tmp_path / "x.parquet"
    )
    with pytest.raises(DataError) as error:
        rows(tmp_path / "x.parquet", tmp_path)
    message = str(error.value)
    assert 'column "TX_AMOUNT" (data.columns.amount) Did you mean "TX_AMOUNTS"?' in message
    assert 'column "TERMINAL_ID" (data.columns.terminal)' in message
    assert "Found: TRANSACTION_ID, TX_DATETIME, CUSTOMER_ID" in message


def write_file(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


HEADER = b"TRANSACTION_ID,TX_DATETIME,CUSTOMER_ID,TERMINAL_ID,TX_AMOUNT,TX_FRAUD\n"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.csv", b"", "is empty"),
        ("header.csv", HEADER, "holds no transactions"),
        ("empty.parquet", b"", "cannot be read as parquet"),
        ("text.parquet", HEADER * 100, "cannot be read as parquet"),
        (
            "binary.csv",
            b"PAR1\x00\xff\xfe\x00" * 100,
            "is not utf-8: byte 5 is 0xff. Set data.text.encoding",
        ),
        ("data.xlsx", b"PK", "neither parquet nor CSV"),
        ("folder/notes.txt", b"hello", "neither parquet nor CSV"),
    ],
)
def test_a_file_without_data_is_one_clear_error(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    path = write_file(tmp_path / name, content)
    source = path.parent if "/" in name else path
    with pytest.raises(DataError, match=message) as error:
        rows(source, tmp_path)
    assert str(source) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_missing_path_and_mixed_formats_are_rejected(
    published: pl.DataFrame, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=r"nowhere\.parquet does not exist"):
        rows(tmp_path / "nowhere.parquet", tmp_path)
    published.write_parquet(tmp_path / "a.parquet")
    published.write_csv(tmp_path / "b.csv")
    with pytest.raises(DataError, match="both parquet and CSV"):
        rows(tmp_path, tmp_path)


def test_a_missing_s3_object_is_named(tmp_path: Path, s3: Store) -> None:
    with pytest.raises(DataError, match=r"no/such.* data\.source"):
        rows(s3.uri("no/such.parquet"), tmp_path)
    with pytest.raises(ConfigError, match='bucket "nowhere" does not exist'):
        rows("s3://nowhere/a.parquet", tmp_path)


@pytest.mark.parametrize("source", ["gs://bucket/key", "s3://bucket", "https://example.org/a.csv"])
def test_an_unknown_kind_of_source_is_rejected_with_the_config(source: str) -> None:
    with pytest.raises(ValidationError, match=source):
        Data(source=source)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "cp1252"])
@pytest.mark.parametrize(
    "time", ["%d.%m.%Y %H:%M:%S", "%d/%m/%Y %H:%M:%S", "%Y-%m-%dT%H:%M:%S", "epoch"]
)
def test_csv_files_in_regional_formats_give_the_same_rows(
    published: pl.DataFrame, tmp_path: Path, encoding: str, time: str
) -> None:
    if time == "epoch":
        unix_time = pl.col("TX_DATETIME").dt.epoch("s")
    else:
        unix_time = pl.col("TX_DATETIME").dt.strftime(time)

    amount = pl.col("TX_AMOUNT").map_elements(
        lambda v: f"{v:,.2f}".translate(str.maketrans(",.", ".,")), pl.String
    )
    text = published.with_columns(unix_time, amount, TX_NOTE=pl.lit("Käse; billig")).write_csv(
        separator=";"
    )
    (tmp_path / "a.csv").write_bytes(text.replace("\n", "\r\n").encode(encoding))
    settings = {"encoding": "cp1252"} if encoding == "cp1252" else {}
    published.write_parquet(tmp_path / "a.parquet")
    assert rows(tmp_path / "a.csv", tmp_path, text=settings).equals(
        rows(tmp_path / "a.parquet", tmp_path)
    )


def test_a_ragged_line_is_rejected_with_its_number(published: pl.DataFrame, tmp_path: Path) -> None:
    lines = published.select(Columns().model_dump().values()).write_csv().splitlines()
    lines[4] += ",1"
    lines[7] = "7,2024"
    lines[9] = lines[9].replace(",", ',"', 1)
    (tmp_path / "a.csv").write_text("\n".join(lines))
    data = Data(source=str(tmp_path / "a.csv"))
    checked = check(read(data, tmp_path), data.columns, 0.01, data.text)
    assert len(checked.rows) == len(published) - 3
    assert checked.rejects["line"].to_list() == [5, 8, 10]
    assert checked.rejects["ragged"].to_list() == [lines[4], lines[7], lines[9]]

    with pytest.raises(
        DataError, match=r"3 × line with too few or too many fields \(the first: line 5 of a\.csv\)"
    ):
        check(read(data, tmp_path), data.columns, 0, data.text)


@pytest.mark.parametrize(
    ("column", "values", "message", "settings"),
    [
        (
            "TX_DATETIME",
            "01/02/2024 10:00",
            r"or %m/%d/%Y %H:%M\): set data\.text\.time",
            {"time": "%m/%d/%Y %H:%M"},
        ),
        ("TX_AMOUNT", "1,234", r'"1,234" are ambiguous: set data\.text\.decimal', {"decimal": ","}),
    ],
)
def test_an_ambiguous_format_must_be_configured(
    published: pl.DataFrame,
    tmp_path: Path,
    column: str,
    values: str,
    message: str,
    settings: dict[str, str],
) -> None:
    published.with_columns(pl.lit(values).alias(column)).write_csv(
        tmp_path / "a.csv", separator=";"
    )
    with pytest.raises(DataError, match=message):
        rows(tmp_path / "a.csv", tmp_path)
    read_rows = rows(tmp_path / "a.csv", tmp_path, text=settings)
    assert read_rows.select("time" if "DATE" in column else "amount").row(0)[0] in (
        datetime(2024, 1, 2, 10),
        1.23,
    )


def test_an_unknown_encoding_is_rejected_with_the_config() -> None:
    with pytest.raises(ValidationError, match="this encoding does not exist"):
        Data.model_validate({"text": {"encoding": "utf-9"}})
