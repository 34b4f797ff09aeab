"""MLflow predicts the same as the model server, for each type of field, for missing values, and for
each kind of data frame."""

import json
from collections.abc import Callable, Iterator
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import save_file
from starlette.testclient import TestClient

from rekindle.content.verified_release import RELEASE_RECORD, compute_content_hash
from rekindle.errors import DataError
from rekindle.release.pyfunc import write_mlmodel
from rekindle.release.release_files import EXAMPLE_FILE
from rekindle.storage import Store, file_sha256
from rekindle.workload import prepare
from tests.rekindle.release import every_type
from tests.rekindle.serving.running import RunningServer

PLACE = {"zone": 3, "name": "here"}
FULL_INSTANCE: dict[str, Any] = {
    "id": 7,
    "number": 1.5,
    "flag": True,
    "text": "NaN",
    "moment": "2024-03-01T12:30:00.250000",
    "day": "2024-03-01",
    "at": "12:30:00",
    "wait": "PT90S",
    "kind": "a",
    "step": 2,
    "colour": "blue",
    "level": 2,
    "key": "12345678-1234-5678-1234-567812345678",
    "price": "1.10",
    "counts": [1, 2],
    "rates": [0.5, None, 2],
    "pair": [1, "x"],
    "shares": {"a": 0.5},
    "place": PLACE,
    "places": [PLACE, {"zone": None}],
    "mixed": "3",
    "anything": {"a": [1, None]},
    "described": 3,
}
FULL_INSTANCE.update(
    {
        f"maybe_{name}": FULL_INSTANCE[name]
        for name in [
            "id",
            "number",
            "flag",
            "text",
            "moment",
            "day",
            "kind",
            "step",
            "level",
            "price",
        ]
    }
)
FULL_INSTANCE["maybe_counts"] = [3]
FULL_INSTANCE["maybe_place"] = PLACE
FULL_INSTANCE["maybe_mixed"] = 4
FULL_INSTANCE.update(
    {
        f"none_{name}": FULL_INSTANCE[name]
        for name in ["id", "number", "flag", "text", "day", "counts"]
    }
)
FULL_INSTANCE["five"] = 6
FULL_INSTANCE["half"] = 2
FULL_INSTANCE["yes"] = False
FULL_INSTANCE["word"] = "other"
REQUIRED = {name for name in FULL_INSTANCE if "_" not in name} - {"five", "half", "yes", "word"}
EMPTY_INSTANCE = {
    name: None if name.startswith("maybe_") else value
    for name, value in FULL_INSTANCE.items()
    if name in REQUIRED or name.startswith("maybe_")
}
OTHER_INSTANCE = FULL_INSTANCE | {
    "id": -1,
    "number": 3,
    "rates": [],
    "places": [],
    "mixed": 8,
    "maybe_id": 0,
    "maybe_number": 2,
}
ROWS = {
    "complete": [FULL_INSTANCE, OTHER_INSTANCE],
    "missing": [FULL_INSTANCE, EMPTY_INSTANCE],
    "missing everywhere": [EMPTY_INSTANCE, EMPTY_INSTANCE],
    "single": [EMPTY_INSTANCE],
}
PYTHON: dict[str, Callable[[Any], Any]] = {
    "moment": datetime.fromisoformat,
    "day": date.fromisoformat,
    "at": time.fromisoformat,
    "wait": lambda value: timedelta(seconds=90),
    "key": UUID,
    "price": Decimal,
}
Answer = Callable[[list[dict[str, Any]]], Any]


class ServedRelease:
    """A release in an MLflow model and a server."""

    def __init__(self, folder: Path, server: RunningServer) -> None:
        # imported here, because the import takes seconds, and each process of xdist imports this
        # file
        import mlflow
        from mlflow.pyfunc.scoring_server import init

        self.model = mlflow.pyfunc.load_model(str(folder))
        # create the server's application as `mlflow models serve` does
        self.invocations = TestClient(init(self.model))
        self.server = server

    def answer(self, instances: list[dict[str, Any]]) -> Any:
        """Return the predictions of the server, or None for an invalid request."""
        answer = self.server.predict(*instances)
        if answer.status_code == 200:
            return answer.json()["predictions"]
        return None


@pytest.fixture(scope="module")
def served(
    tmp_path_factory: pytest.TempPathFactory, s3_environment: dict[str, str]
) -> Iterator[ServedRelease]:
    folder = tmp_path_factory.mktemp("release") / "release"
    prepare(every_type, every_type.Data(source="none"), folder)
    save_file({"slope": torch.zeros(1)}, folder / "model.safetensors")
    sha256 = file_sha256(folder / "model.safetensors")
    (folder / "model.json").write_text(
        json.dumps({"workload": every_type.__name__, "model": {}, "sha256": sha256})
    )
    (folder / EXAMPLE_FILE).write_text(json.dumps({"instances": [EMPTY_INSTANCE]}))
    write_mlmodel(folder)

    files = {path.name: file_sha256(path) for path in folder.iterdir()}

    record = {
        "name": "echo",
        "version": "1",
        "workload": every_type.__name__,
        "model_sha256": sha256,
        "files": files,
    }

    (folder / RELEASE_RECORD).write_text(json.dumps(record))

    with pytest.MonkeyPatch.context() as environment:
        for name, value in s3_environment.items():
            environment.setenv(name, value)

        store = Store.from_env()

    prefix = f"releases/echo/{compute_content_hash(files)}/"
    store.upload(folder, prefix)
    variables: Any = s3_environment

    with RunningServer(f"--model={prefix}", **variables) as server:
        server.until_ready()
        yield ServedRelease(folder, server)


def objects(rows: list[dict[str, Any]]) -> pd.DataFrame:
    return pd.DataFrame(rows, dtype=object)


def pandas_missing(rows: list[dict[str, Any]]) -> pd.DataFrame:
    """Return a frame with columns of Python objects whose missing values are pandas.NA."""
    frame = objects(rows)
    return frame.where(frame.notna(), pd.NA)


def nullable(rows: list[dict[str, Any]]) -> pd.DataFrame:
    """Return a frame with columns of the types Int64, Float64, boolean and string."""
    return pd.DataFrame(rows).convert_dtypes()


def python_objects(rows: list[dict[str, Any]]) -> pd.DataFrame:
    """Return a frame with dates, UUIDs and similar values as Python objects."""
    converted = [
        {
            name: PYTHON[kind](value)
            if (kind := name.rpartition("_")[2]) in PYTHON and value is not None
            else value
            for name, value in row.items()
        }
        for row in rows
    ]
    return pd.DataFrame(converted)


def timestamps(rows: list[dict[str, Any]]) -> pd.DataFrame:
    frame = pd.DataFrame(rows)
    names = [name for name in frame if str(name).endswith(("moment", "day"))]
    return frame.assign(**{str(name): pd.to_datetime(frame[name]) for name in names})


def categories(rows: list[dict[str, Any]]) -> pd.DataFrame:
    frame = pd.DataFrame(rows)
    return frame.astype(
        dict.fromkeys(["text", "kind", "colour", "maybe_kind", "maybe_text"], "category")
    )


def small_numbers(rows: list[dict[str, Any]]) -> pd.DataFrame:
    frame = pd.DataFrame(rows).astype(
        {"id": "int8", "step": "uint8", "level": "uint64", "number": "float32"}
    )
    return frame.assign(counts=[np.array(counts) for counts in frame["counts"]])


def columns(rows: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """Return the columns of all fields; a field that a row lacks has the value None."""
    return {name: [row.get(name) for row in rows] for name in FULL_INSTANCE}


def unsorted(rows: list[dict[str, Any]]) -> pd.DataFrame:
    """Return a frame with the index and another column of the user's own table."""
    return pd.DataFrame(rows, index=[9, 4][: len(rows)]).assign(extra="x")


FRAMES = (
    *(
        pd.DataFrame,
        objects,
        pandas_missing,
        nullable,
        python_objects,
        timestamps,
        categories,
        small_numbers,
    ),
    *(columns, unsorted, list),
)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("frame", FRAMES, ids=lambda frame: frame.__name__)
def test_mlflow_predicts_what_the_server_predicts(
    served: ServedRelease, frame: Any, rows: str
) -> None:
    expected = served.answer(ROWS[rows])
    assert expected
    assert all(EMPTY_INSTANCE.keys() < prediction.keys() for prediction in expected)
    predictions = served.model.predict(frame(ROWS[rows]))
    for prediction, other in zip(predictions, expected, strict=True):
        assert {n: (v, other[n]) for n, v in prediction.items() if v != other[n]} == {}


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("form", ["dataframe_records", "dataframe_split", "inputs"])
def test_mlflows_server_predicts_what_the_server_predicts(
    served: ServedRelease, form: str, rows: str
) -> None:
    instances = ROWS[rows]
    table = columns(instances)
    split = {"columns": list(table), "data": list(zip(*table.values(), strict=True))}
    request_rows = {"dataframe_split": split, "inputs": table}.get(form, instances)
    answer = served.invocations.post("/invocations", json={form: request_rows})
    assert answer.json() == {"predictions": served.answer(instances)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"id": None}, "instances[0].id is missing"),
        ({"flag": None}, "instances[0].flag is missing"),
        ({"text": None}, "instances[0].text is missing"),
        ({"id": 1.5}, "instances[0].id is 1.5: "),
        ({"maybe_id": 1.5}, "instances[0].maybe_id is 1.5: "),
        ({"id": True}, "instances[0].id is True: "),
        ({"maybe_flag": 1}, "instances[0].maybe_flag is 1: "),
        ({"number": "1"}, "instances[0].number is '1': "),
        ({"number": float("inf")}, "instances[0].number is inf: it must be a finite number"),
        (
            {"rates": [0.5, float("nan")]},
            "instances[0].rates[1] is nan: it must be a finite number",
        ),
        ({"kind": "c"}, "instances[0].kind is 'c': "),
        ({"day": "today"}, "instances[0].day is 'today': "),
        ({"place": {"zone": "x"}}, "instances[0].place.zone is 'x': "),
        ({"text": 3}, "instances[0].text is 3: "),
    ],
)
def test_what_the_server_refuses_mlflow_refuses_by_its_name(
    served: ServedRelease, change: dict[str, Any], message: str
) -> None:
    if not any(isinstance(value, (float, list)) and value != 1.5 for value in change.values()):
        assert served.answer([FULL_INSTANCE | change]) is None
    for frame in (pd.DataFrame, objects, list):
        with pytest.raises(DataError) as caught:
            served.model.predict(frame([FULL_INSTANCE | change]))
        assert message in str(caught.value)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        # as in the server, the default does not replace null
        ([{"three": None}], None),
        ([{}], 3),
        ([{}, {"three": 4}], 3),  # NaN
        (objects([FULL_INSTANCE | {"three": pd.NA}]), 3),
        (objects([FULL_INSTANCE | {"three": None}]), None),
        (objects([FULL_INSTANCE | {"three": np.nan}]), 3),
        (pd.DataFrame([FULL_INSTANCE | {"three": 5.0}]), 5),
    ],
)
def test_a_missing_value_is_left_out_and_none_is_null(
    served: ServedRelease, values: Any, expected: int | None
) -> None:
    if isinstance(values, list):
        frame = pd.DataFrame([FULL_INSTANCE | row for row in values])
    else:
        frame = values
    assert served.model.predict(frame)[0]["three"] == expected


def test_large_integers_keep_their_digits_or_are_refused(served: ServedRelease) -> None:
    rows = [FULL_INSTANCE | {"maybe_id": 2**60 + 1}, EMPTY_INSTANCE]
    exact = pd.DataFrame(rows, dtype=object).astype({"maybe_id": "Int64"})
    assert served.model.predict(exact) == served.answer(rows)
    with pytest.raises(
        DataError, match=r"instances\[0\]\.maybe_id is 1152921504606846976, which has lost digits"
    ):
        served.model.predict(pd.DataFrame(rows))


def test_a_dictionary_of_texts_has_a_row_for_each_of_its_values() -> None:
    """MLflow itself makes a single row of a dictionary of texts."""
    from pydantic import BaseModel

    from rekindle.release.pyfunc.frames import FrameConverter

    class Words(BaseModel):
        first: str
        second: str = ""

    class Request(BaseModel):
        instances: list[Words]

    frame = pd.DataFrame([{"first": ["a", "b"], "second": ["c", "d"]}])
    assert FrameConverter(Request).to_instances(frame) == [
        {"first": "a", "second": "c"},
        {"first": "b", "second": "d"},
    ]
    with pytest.raises(DataError, match="the columns first, second must have the same length"):
        FrameConverter(Request).to_instances(pd.DataFrame([{"first": ["a"], "second": ["c", "d"]}]))
