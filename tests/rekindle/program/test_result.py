"""The result of a program is evaluated, released and served like any other model, and a changed
result is refused."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from rekindle import tracking, workload
from rekindle.content.weights import verify_weights
from rekindle.documents import encode_model_description
from rekindle.errors import CodeError, DataError
from rekindle.program.result import publish_result
from rekindle.program.spec import ProgramSpec
from rekindle.release import pyfunc
from rekindle.release.release_files import download, download_champion
from rekindle.storage import Store
from steps import evaluate, release
from tests.rekindle.program import slopes
from tests.rekindle.serving.running import RunningServer

WORKLOAD = slopes.__name__


def write_result(folder: Path, kind: str, slope: float = 2.0) -> Path:
    """Write the result of a program, and return the path of the result."""
    if kind == "file":
        files = {"model.json": {"slope": slope}}
        path = folder / "model.json"
    else:
        files = {
            "final/config.json": {"unit": "m"},
            "final/deep/weights.json": {"slope": slope},
        }
        path = folder / "final"

    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps(content))

    return path


def store_and_download(store: Store, result: Path, out: Path) -> Path:
    """Store a result as the model of a run, and download it, and return the folder of the
    downloaded model."""
    key = f"run-{uuid4().hex[:8]}/train/model"
    spec = ProgramSpec.model_validate(
        {
            "program": {"command": ["train.py"], "environment": {"MODE": "private"}},
            "workload": WORKLOAD,
            "dataset": "unused",
            "digest": "",
            "out": key,
            "checkpoints": "unused",
        }
    )
    sha256 = publish_result(spec, result, 7)
    store.download(f"{key}/", out)
    assert verify_weights(out).sha256 == sha256
    return out


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    workload.prepare(slopes, slopes.Data(source="none://1"), tmp_path / "dataset")
    return tmp_path / "dataset"


@pytest.fixture(params=["file", "folder"])
def model(request: pytest.FixtureRequest, s3: Store, tmp_path: Path) -> Path:
    return store_and_download(
        s3, write_result(tmp_path / "work", request.param), tmp_path / "model"
    )


def run_release(model: Path, dataset: Path, name: str) -> release.Outputs:
    judged = evaluate.run(
        evaluate.Inputs(
            workload=WORKLOAD, dataset=dataset, model=model, name=name, maximum={"error": 0.5}
        )
    )
    assert judged.verdict == "release", judged.reason
    assert judged.metrics == {"error": 0.0}

    run_id = tracking.start_run("programs", f"{name}-1")
    return release.run(
        release.Inputs(
            name=name,
            verdict=judged.verdict,
            run_id=run_id,
            dataset=dataset,
            model=model,
            report=judged.report,
        )
    )


def test_a_result_is_released_served_and_loaded_by_mlflow(
    s3: Store, mlflow_server: str, model: Path, dataset: Path, tmp_path: Path
) -> None:
    name = f"m-{uuid4().hex[:8]}"
    released = run_release(model, dataset, name)

    record = download(s3, released.model_uri, tmp_path / "release")
    assert "private" not in (tmp_path / "release/model.json").read_text()
    results = {file for file in record.files if file.startswith("result/")}
    assert results == {
        path.relative_to(model).as_posix() for path in (model / "result").rglob("*.json")
    }
    assert download_champion(s3, released.model_uri, tmp_path / "champion")

    with RunningServer(f"--model={released.model_uri}") as server:
        server.until_ready()
        body = {"instances": [{"x": 3}, {"x": 0, "about": True}]}
        answer = server.client.post(f"/v1/models/{name}:predict", json=body)
    assert answer.json() == {"predictions": [6.0, False]}, "torch was imported"

    import pandas

    loaded = pyfunc._load_pyfunc(str(tmp_path / "release"))
    assert loaded.predict(pandas.DataFrame({"x": [3.0, 4.0]})) == [6.0, 8.0]


def change_file(model: Path) -> None:
    file = next(path for path in (model / "result").rglob("*.json"))
    file.write_text(file.read_text() + " ")


def add_file(model: Path) -> None:
    (model / "result/more.json").write_text("{}")


def remove_file(model: Path) -> None:
    next(path for path in (model / "result").rglob("*.json")).unlink()


def rename_in_list(model: Path, name: str) -> None:
    """Give the first file in model.json another path, and adapt the checksum."""
    fields = json.loads((model / "model.json").read_text())
    first_file = next(iter(fields["files"]))
    fields["files"][name] = fields["files"].pop(first_file)
    (model / "model.json").write_bytes(encode_model_description(fields))


CHANGES: dict[str, Callable[[Path], object]] = {
    "the file was changed after the training": change_file,
    r"more\.json is not in model\.json: it was added": add_file,
    "is missing": remove_file,
    "the list was changed after the training": lambda model: rename_in_list(model, "other.json"),
    r'"\.\./model\.json" is not the key of an object': lambda model: rename_in_list(
        model, "../model.json"
    ),
    '"/etc/passwd" is not the key of an object': lambda model: rename_in_list(model, "/etc/passwd"),
    r"\\u0000b.* is not the key of an object": lambda model: rename_in_list(model, "a\0b"),
}


@pytest.mark.parametrize("message", CHANGES)
def test_a_changed_result_is_not_evaluated(message: str, model: Path, dataset: Path) -> None:
    CHANGES[message](model)
    with pytest.raises(DataError, match=message):
        evaluate.run(evaluate.Inputs(workload=WORKLOAD, dataset=dataset, model=model))


@pytest.mark.parametrize(
    ("key", "content", "message"),
    [
        ("result/deep/weights.json", b"{}", r"deep/weights\.json changed since the release"),
        ("result/deep/weights.json", None, r"result/deep/weights\.json does not exist|is missing"),
        ("result/more.json", b"{}", r"result/more\.json was added since the release"),
    ],
)
def test_a_release_with_a_changed_result_is_not_served(
    s3: Store,
    mlflow_server: str,
    dataset: Path,
    tmp_path: Path,
    key: str,
    content: bytes | None,
    message: str,
) -> None:
    model = store_and_download(s3, write_result(tmp_path / "work", "folder"), tmp_path / "model")
    prefix = run_release(model, dataset, f"m-{uuid4().hex[:8]}").model_uri
    if content is None:
        s3.delete([prefix + key])
    else:
        s3.put(prefix + key, content)

    with pytest.raises(DataError, match=message):
        download(s3, prefix, tmp_path / "release")


def test_results_with_the_same_files_are_the_same_model(s3: Store, tmp_path: Path) -> None:
    models = [
        store_and_download(
            s3, write_result(tmp_path / f"work-{name}", "folder", slope), tmp_path / name
        )
        for name, slope in (("a", 2.0), ("b", 2.0), ("c", 2.5))
    ]
    hashes = [verify_weights(model).sha256 for model in models]
    assert hashes[0] == hashes[1] != hashes[2]


def test_an_evaluation_without_torch_does_not_import_it(
    s3: Store, dataset: Path, tmp_path: Path
) -> None:
    model = store_and_download(s3, write_result(tmp_path / "work", "file"), tmp_path / "model")
    code = (
        "import sys; from steps import evaluate; evaluate.run(evaluate.Inputs("
        f"workload={WORKLOAD!r}, dataset={str(dataset)!r}, model={str(model)!r}));"
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_model_of_torch_is_loaded_in_eval_mode(
    s3: Store, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    model = store_and_download(s3, write_result(tmp_path / "work", "file"), tmp_path / "model")
    modes: list[Any] = []

    def predict(network: Any, instances: list[Any], facts: dict[str, Any]) -> list[float]:
        modes.append((network.training, torch.is_inference_mode_enabled()))
        return [0.0 for _ in instances]

    monkeypatch.setattr(slopes, "load", lambda path, facts: torch.nn.Linear(1, 1))
    monkeypatch.setattr(slopes, "predict", predict)
    evaluate.run(evaluate.Inputs(workload=WORKLOAD, dataset=dataset, model=model))
    assert set(modes) == {(False, True)}


@pytest.mark.parametrize(
    ("name", "message"),
    [("a\u200bb", "cannot be stored"), ("link", "link is not a file: a result has only files")],
)
def test_a_result_that_cannot_be_stored_is_refused(
    s3: Store, tmp_path: Path, name: str, message: str
) -> None:
    result = write_result(tmp_path / "work", "folder")
    if name == "link":
        (result / name).symlink_to(tmp_path)
    else:
        (result / name).touch()

    with pytest.raises(CodeError, match=message):
        store_and_download(s3, result, tmp_path / "model")
