"""A version becomes the champion only if it serves the predictions that it was evaluated on."""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import torch
from safetensors.torch import save_file

from rekindle import tracking
from rekindle.errors import DataError, RekindleError
from rekindle.gate import Gate
from rekindle.release import promotion
from rekindle.release.compare import PredictionComparison, read_numerics, read_predictions
from rekindle.release.evaluation import evaluate
from rekindle.release.model_client import resolve_endpoint
from rekindle.release.release_files import PREDICTIONS_FILE, record_predictions
from rekindle.release.watch.scrape import scrape_counts
from rekindle.storage import Store, file_sha256
from rekindle.workload import prepare
from steps import fraud, release, verify
from tests.http_server import Answer, HttpServer, Request
from tests.rekindle.serving import shaky
from tests.rekindle.serving.running import RunningServer

pytestmark = pytest.mark.usefixtures("mlflow_server")


@pytest.fixture(scope="module")
def report(small_dataset: Path, expert: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report")
    evaluate(fraud, expert, None, small_dataset, path, Gate())
    (path / "verdict.json").write_text("{}")
    return path


@pytest.fixture
def released(
    s3: Store, small_dataset: Path, expert: Path, report: Path
) -> tuple[str, release.Outputs, dict[str, Any]]:
    """The name of a model, the outputs of the step `release` and the inputs of the step
    `verify`."""
    name = f"fraud-{uuid4().hex[:6]}"
    run_id = tracking.start_run("verify", name)

    outputs = release.run(
        release.Inputs(
            name=name,
            verdict="release",
            run_id=run_id,
            model=expert,
            dataset=small_dataset,
            report=report,
        )
    )

    sha256 = json.loads((expert / "model.json").read_text())["sha256"]

    inputs = {
        "name": name,
        "model_sha256": sha256,
        "version": outputs.version,
        "run_id": run_id,
        "deployment": "cards-1",
        "sample": 60,
        "report": report,
    }

    return name, outputs, inputs


Released = tuple[str, release.Outputs, dict[str, Any]]


@pytest.mark.slow
def test_a_served_release_is_replayed_and_promoted(
    released: Released, report: Path, tmp_path: Path
) -> None:
    name, outputs, inputs = released
    with RunningServer(f"--model={outputs.model_uri}") as server:
        result = verify.run(verify.Inputs(endpoint=server.url, **inputs))
        assert result.replayed == 60
        assert result.max_difference <= 1e-5
        assert result.endpoint == server.url
        champion = tracking.champion(name)
        assert champion == tracking.Release(
            outputs.version, outputs.model_uri, inputs["model_sha256"], "cards-1"
        )
        assert result.former == ""
        assert result.expired == []
        # no client has sent an instance
        assert scrape_counts(server.url, outputs.version, {}).popitem()[1]["rows"] == 0

        # the same server is compared with other scores, one of which is wrong
        requests = read_predictions(report, 60)
        record_predictions(
            tmp_path,
            ((request, [value + 0.25 for value in expected]) for request, expected in requests),
        )
        changed = inputs | {"report": tmp_path, "version": "99", "endpoint": server.url}

        with pytest.raises(
            DataError,
            match=(
                r'60 of 60 replayed test rows .* {"transaction_id": \d+.*: served 0\.\d+, offline'
            ),
        ):
            verify.run(verify.Inputs(**changed))

        assert tracking.champion(name) == champion

    refused = pytest.raises(DataError, match=r"Raise serve\.max_bytes or serve\.max_instances")
    with RunningServer(f"--model={outputs.model_uri}", "--max-instances=1") as server, refused:
        verify.run(verify.Inputs(endpoint=server.url, **inputs))


@pytest.mark.slow
def test_a_notebook_mlflow_and_the_server_predict_the_same(
    released: Released, report: Path, s3: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, outputs, _ = released
    tracking.record_champion(name, outputs.version, "cards-1")
    monkeypatch.setenv("MLFLOW_S3_ENDPOINT_URL", str(s3.endpoint))
    import mlflow
    import pandas as pd
    from mlflow.pyfunc.scoring_server import init
    from mlflow.types import DataType
    from mlflow.types.schema import AnyType
    from starlette.testclient import TestClient

    model = mlflow.pyfunc.load_model(f"models:/{name}@champion")
    schema = model.metadata.get_input_schema()

    assert schema
    assert [(column.name, column.type, column.required) for column in schema][-1] == (
        "amount",
        AnyType(),
        True,
    )

    outputs_schema = model.metadata.get_output_schema()
    assert outputs_schema
    assert [column.type for column in outputs_schema] == [DataType.double]
    # load the model as `mlflow models serve` does
    app = TestClient(init(model))
    assert len(model.predict(model.input_example)) == 1

    with RunningServer(f"--model={outputs.model_uri}") as server:
        server.until_ready()
        for request, _ in list(read_predictions(report, 60))[:3]:
            path = f"/v1/models/{name}:predict"
            served_predictions = server.client.post(path, json=request).json()["predictions"]
            frame = pd.DataFrame(request["instances"])
            params = {"history": json.dumps(request["history"])}
            assert model.predict(frame, params=params) == served_predictions
            body = {"dataframe_records": request["instances"], "params": params}
            assert app.post("/invocations", json=body).json() == {"predictions": served_predictions}
            single_prediction = server.client.post(
                path, json={"instances": request["instances"]}
            ).json()["predictions"]
            assert (
                model.predict(frame.assign(time=pd.to_datetime(frame["time"])))
                == single_prediction
                != served_predictions
            )


def release_shaky(
    store: Store, fault: str, folder: Path, max_batch: int
) -> tuple[str, dict[str, Any]]:
    """Release a model of `shaky`, and return the URI of the release and the inputs of the step
    `verify`."""
    dataset, model, report = (folder / name for name in ("dataset", "model", "report"))
    prepare(shaky, shaky.Data(source=f"fault://{fault}"), dataset)
    torch.manual_seed(0)
    model.mkdir()
    save_file(shaky.model(shaky.Model(), {}).state_dict(), model / "model.safetensors")
    sha256 = file_sha256(model / "model.safetensors")
    card = {"sha256": sha256, "workload": shaky.__name__, "model": {}}
    (model / "model.json").write_text(json.dumps(card))
    evaluate(shaky, model, None, dataset, report, Gate(), max_batch)
    (report / "verdict.json").write_text("{}")
    name = f"shaky-{uuid4().hex[:6]}"

    inputs: dict[str, Any] = {
        "name": name,
        "verdict": "release",
        "run_id": tracking.start_run("verify", name),
    }

    outputs = release.run(release.Inputs(**inputs, model=model, dataset=dataset, report=report))

    return outputs.model_uri, {
        "name": name,
        "model_sha256": sha256,
        "version": outputs.version,
        "report": report,
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (
            "neighbours",
            (
                "40 of 40 .* another prediction with other rows in the batch than alone .*a"
                " BatchNorm normalizes"
            ),
        ),
        pytest.param(
            "train mode",
            r"40 of 40 .* another prediction at each request .*The model is in train mode"
            r" \(dropout\)",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_prediction_that_depends_on_its_batch_is_not_promoted(
    fault: str, reason: str, s3: Store, tmp_path: Path
) -> None:
    uri, inputs = release_shaky(s3, fault, tmp_path, max_batch=16)
    with (
        RunningServer(f"--model={uri}") as server,
        pytest.raises(DataError, match=f"{reason}.* is not promoted"),
    ):
        verify.run(verify.Inputs(endpoint=server.url, **inputs))
    assert tracking.champion(inputs["name"]) is None


@pytest.mark.slow
def test_batches_agree_within_the_tolerance_and_single_predictions_to_the_bit(
    s3: Store, tmp_path: Path
) -> None:
    uri, inputs = release_shaky(s3, "none", tmp_path, max_batch=1)
    with RunningServer(f"--model={uri}", "--max-batch=7") as server:
        result = verify.run(verify.Inputs(endpoint=server.url, **inputs))
        assert result.replayed == 40
        assert result.compared == "within 1e-05, in batches of up to 7"

    with RunningServer(f"--model={uri}", "--max-batch=1") as server:
        result = verify.run(verify.Inputs(endpoint=server.url, **inputs))
        assert result.max_difference == 0
        assert result.compared == "to the bit, in batches of up to 1"
        rows = list(read_predictions(inputs["report"], 40))
        numerics = read_numerics(inputs["report"])
        changed = [
            (request, [[y + 1e-9 for y in row] for row in expected]) for request, expected in rows
        ]
        record_predictions(inputs["report"], changed, numerics)

        with pytest.raises(DataError, match=r"40 of 40 .* than offline \(by more than 0\)"):
            verify.run(verify.Inputs(endpoint=server.url, **inputs))

        record_predictions(inputs["report"], changed, "another processor")
        assert verify.run(verify.Inputs(endpoint=server.url, **inputs)).compared.startswith(
            "within 1e-05"
        )


SHA256 = "0" * 64


class Liar(HttpServer):
    """A server that answers 0.5 for each instance. The first `old` predictions of this server come
    from other weights."""

    def __init__(self) -> None:
        super().__init__(self.predict)
        self.sha256 = SHA256
        self.old = 0
        self.asked = 0

    def predict(self, request: Request) -> Answer:
        sha256 = self.sha256
        answer: dict[str, Any] = {"ready": True, "instances": []}

        if request.method == "POST":
            self.asked += 1
            if self.asked <= self.old:
                sha256 = "old"
            answer = {"predictions": [0.5 for _ in json.loads(request.body)["instances"]]}

        return Answer(200, json.dumps(answer), {"model-sha256": sha256})


@pytest.fixture
def liar() -> Iterator[Liar]:
    with Liar() as server:
        yield server


def verify_inputs(server: Liar, report: Path, seconds: float) -> verify.Inputs:
    name: dict[str, Any] = {
        "name": "nobody",
        "model_sha256": SHA256,
        "version": "1",
        "endpoint": server.url,
    }
    return verify.Inputs(**name, report=report, sample=20, wait_seconds=seconds)


def test_differing_scores_prevent_the_promotion(liar: Liar, report: Path) -> None:
    with pytest.raises(
        DataError, match=r"20 of 20 replayed .* Version 1 is not promoted; the current version"
    ):
        verify.run(verify_inputs(liar, report, 5))
    assert tracking.champion("nobody") is None


def test_a_differing_prediction_is_shown_and_the_sample_size_is_respected(
    liar: Liar, tmp_path: Path
) -> None:
    rows = [({"x": number}, 0.5 + 0.1 * (number == 7)) for number in range(60)]
    batches = [rows[start : start + 6] for start in range(0, 60, 6)]
    record_predictions(
        tmp_path,
        (({"instances": [x for x, _ in batch]}, [y for _, y in batch]) for batch in batches),
    )
    with pytest.raises(DataError, match=r'1 of 24 replayed .* \{"x": 7\}: served 0.5, offline 0.6'):
        verify.run(verify_inputs(liar, tmp_path, 5))
    with gzip.open(tmp_path / PREDICTIONS_FILE, "wb") as file:
        file.write(b"{}\n")
    with pytest.raises(DataError, match="does not contain predictions"):
        verify.run(verify_inputs(liar, tmp_path, 5))


def test_answers_of_a_server_that_is_being_replaced_do_not_count(liar: Liar, report: Path) -> None:
    liar.old = 2
    with pytest.raises(DataError, match="20 of 20 replayed"):
        verify.run(verify_inputs(liar, report, 5))
    assert liar.asked > 3


def test_a_service_that_never_serves_the_weights_is_an_error(
    liar: Liar, report: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    liar.sha256 = "another"
    with pytest.raises(
        RekindleError, match=f"does not serve the model {SHA256[:12]} in time .*another"
    ):
        verify.run(verify_inputs(liar, report, 0.3))
    monkeypatch.setenv("MY_MODEL_SERVICE_HOST", "10.1.2.3")
    monkeypatch.setenv("MY_MODEL_SERVICE_PORT", "81")
    assert resolve_endpoint("http://my-model:8080") == "http://10.1.2.3:81"
    assert resolve_endpoint("http://other:8080/") == "http://other:8080"
    monkeypatch.setenv("REKINDLE_ENDPOINT", "http://127.0.0.1:9/")
    with pytest.raises(RekindleError, match=r"http://127\.0\.0\.1:9 does not serve .*refused"):
        verify.run(verify_inputs(liar, report, 0.3))


@pytest.fixture
def changed(s3: Store, tmp_path: Path) -> verify.Inputs:
    """The inputs of the step `verify` for version 3, which was compared with version 1; in the
    meantime, version 2 has become the champion."""
    name = f"cards-{uuid4().hex[:6]}"
    run_id = tracking.start_run(name, name)
    versions = [
        tracking.register_version(name, f"r/{n}/", f"s3://b/{n}", n * 32, run_id, {}).version
        for n in ("aa", "bb", "cc")
    ]
    promotion.promote(s3, name, versions[0], "", f"{name}-1")
    promotion.promote(s3, name, versions[1], versions[0], f"{name}-2")
    (tmp_path / "verdict.json").write_text('{"verdict": "release"}')

    target: dict[str, Any] = {
        "name": name,
        "version": versions[2],
        "champion": versions[0],
        "deployment": f"{name}-3",
    }

    return verify.Inputs(
        **target,
        report=tmp_path,
        model_sha256="cc" * 32,
        run_id=run_id,
        model_uri=f"releases/{name}/c/",
    )


@pytest.mark.slow
def test_a_deployment_that_another_client_of_mlflow_has_named_is_neither_stopped_nor_deleted(
    changed: verify.Inputs, capsys: pytest.CaptureFixture[str]
) -> None:
    name = changed.name
    own_deployment = f"{changed.name}-0123456789ab-abcdef"
    new_deployment = changed.deployment

    foreign_names = [
        "payments-db",
        name,
        f"{own_deployment}-canary",
        f"other-{own_deployment}",
        "payments-0123456789ab-abcdef",
    ]

    inputs = changed.model_copy(update={"champion": "2", "keep_releases": 1})

    for foreign_name in foreign_names:
        tracking.record_deployment(name, "1", foreign_name)
        tracking.record_champion(name, "2", own_deployment)
        outputs = verify.conclude(inputs, PredictionComparison(1e-5))
        assert outputs["running"] == [own_deployment, new_deployment]
        assert outputs["expired"] == []
        assert f'"{foreign_name}" is kept' in capsys.readouterr().err

        tracking.record_deployment(name, "1", own_deployment)
        tracking.record_champion(name, "2", foreign_name)
        outputs = verify.conclude(inputs, PredictionComparison(1e-5))
        assert outputs["running"] == [new_deployment]
        assert outputs["expired"] == [own_deployment]
        assert f'"{foreign_name}" is kept' in capsys.readouterr().err


def test_a_changed_champion_ends_the_attempt_and_after_the_last_attempt_the_run(
    changed: verify.Inputs, s3: Store
) -> None:
    name = changed.name
    compared = PredictionComparison(1e-5)

    repeated_inputs = changed.model_copy(update={"repetitions": 1})
    for inputs in (
        repeated_inputs,
        repeated_inputs.model_copy(update={"champion": "2", "canary": "champion changed"}),
    ):
        outputs = verify.conclude(inputs, compared)
        assert outputs == {
            "promoted": False,
            "former": f"{name}-2",
            "running": [f"{name}-3"],
            "expired": [],
        }

    with pytest.raises(
        promotion.ChampionChangedError,
        match=r"was compared with version 1, but by now .* version 2",
    ):
        verify.conclude(changed, compared)

    assert "rekindle.promoted" not in tracking.read_tags(changed.run_id)
    outputs = verify.conclude(changed.model_copy(update={"champion": "2"}), compared)
    assert outputs["promoted"] is True
    assert outputs["former"] == f"{name}-2"
    champion = tracking.champion(name)

    assert champion
    assert champion.version == "3"
    assert tracking.read_tags(changed.run_id)["rekindle.promoted"] == f"{name} 3"

    assert json.loads(s3.get(f"releases/{name}/c/verdict.json")) == {"verdict": "release"}
