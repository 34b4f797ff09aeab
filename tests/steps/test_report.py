"""The MLflow run shows how a workflow ended, and how its workers spent their time."""

import json
import os
import re
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import requests

from rekindle import project, tracking
from rekindle.blocks.manifest.config import load_config
from rekindle.blocks.manifest.render import render_manifest
from rekindle.keys import LEDGER_KEY, key
from rekindle.storage import Store
from rekindle.training.cost.prices import PRICES_FILE
from steps import report
from tests.steps.finished_training import COMPLETE, EVENTS, VERDICT

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run


def make_client(uri: str | None = None) -> "MlflowClient":
    from mlflow import MlflowClient

    return MlflowClient(uri)


FAILURE = [{"displayName": "train", "message": "Error (exit code 65): no data", "phase": "Failed"}]
STOPPED_NODES = [
    {"displayName": "train", "message": "workflow shutdown with strategy:  Stop", "phase": "Failed"}
]


@pytest.mark.parametrize(
    ("status", "failures", "expected", "tag"),
    [
        ("Succeeded", "null", "FINISHED", None),
        ("Failed", json.dumps(FAILURE), "FAILED", "train: Error (exit code 65): no data"),
        # quoted as Argo quotes values
        (
            "Failed",
            json.dumps(json.dumps(FAILURE)),
            "FAILED",
            "train: Error (exit code 65): no data",
        ),
        (
            "Failed",
            json.dumps(FAILURE).replace("no data", "http://ann:hunter2@h/a?token=hunter2 is away"),
            "FAILED",
            "train: Error (exit code 65): http://h/a?… is away",
        ),
        ("Failed", "[" * 5000, "FAILED", f"workflow: {'[' * 890}"),
        ("Error", "{{workflow.failures}}", "FAILED", "workflow: {{workflow.failures}}"),
        (
            "Failed",
            json.dumps(STOPPED_NODES),
            "KILLED",
            "train: workflow shutdown with strategy:  Stop",
        ),
        ("Failed", "", "FAILED", None),
    ],
)
def test_the_mlflow_run_gets_the_status_of_the_workflow(
    mlflow_server: str, status: str, failures: str, expected: str, tag: str | None
) -> None:
    name = f"w-{uuid.uuid4().hex[:8]}"
    run_id = tracking.start_run("reports", name)
    for _ in range(2):
        inputs = report.Inputs(
            workflow=name, status=status, failures=failures, experiment="reports"
        )
        assert report.run(inputs).run_id == run_id
    run = make_client(mlflow_server).get_run(run_id)
    assert run.info.status == expected
    assert run.data.tags.get("rekindle.failures") == tag


def test_the_end_of_a_run_trims_the_cache(
    s3: Store, mlflow_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rekindle.cache import entries

    entries.remove_entries(s3, entries.read_entries(s3))

    for entry_number in range(3):
        source_task = f"w-trim/t{entry_number}"
        s3.put(f"{source_task}/dataset/part", b"123")
        artifacts = {"dataset": {"sha256": "a" * 64, "files": 1, "bytes": 3}}
        entries.record_entry(
            s3,
            entries.Entry(
                f"trim-{entry_number}", source_task, {}, artifacts, {"step": "steps.x"}, 1.0
            ),
        )

    # a list of code files that no cache entry refers to
    s3.put(f"cache-code/{0:064}", b"{}")
    limits = {"keep_days": 90, "keep_entries": 2, "keep_size": "1Gi"}
    inputs = report.Inputs(
        workflow="w-trim", status="Failed", experiment="reports", config={"cache": limits}
    )
    report.run(inputs)
    assert [entry.key for entry in entries.read_entries(s3)] == ["trim-1", "trim-2"]
    assert f"cache-code/{0:064}" not in {item.key for item in s3.list("cache-code/")}
    monkeypatch.setenv("S3_BUCKET", "missing")
    # a run ends even if its object store does not work
    warning, *_ = report.run(inputs).warnings
    assert warning.startswith("the cache is not trimmed: ")
    monkeypatch.setenv("S3_BUCKET", s3.bucket)
    entries.remove_entries(s3, entries.read_entries(s3))


@pytest.mark.parametrize("recorded", [b"\xff\xfe", b"../../other", b"w-1/train\nx", b"[" * 9999])
def test_a_malformed_record_of_reused_outputs_is_passed_over(
    s3: Store, mlflow_server: str, recorded: bytes
) -> None:
    name = f"w-{uuid.uuid4().hex[:6]}"
    run_id = tracking.start_run("reports", name)
    s3.put(f"{name}/train/cached", recorded)
    row = {"task": "train", "at": ""}
    inputs = report.Inputs(
        workflow=name, status="Succeeded", experiment="reports", cached={"train": row}
    )

    report.record_cached(run_id, inputs)

    assert not any("cached" in tag for tag in tracking.read_tags(run_id))


def test_a_workflow_without_a_run_has_nothing_to_close(mlflow_server: str) -> None:
    inputs = report.Inputs(workflow="never-started", status="Failed", experiment="reports")
    assert report.run(inputs).run_id == ""


def report_run(
    store: Store, *last: dict[str, Any], failures: str = "", manifest: str = ""
) -> "Run":
    """Run `report` with a ledger that ends with the events `last`; return the MLflow run."""
    name = f"w-{uuid.uuid4().hex[:8]}"
    ledger = key("train", LEDGER_KEY, name)
    store.put(
        f"{ledger}/1-a-0.jsonl", "\n".join(json.dumps(event) for event in [*EVENTS, *last]).encode()
    )
    run_id = tracking.start_run("reports", name)

    for _ in range(2):  # the step `report` runs twice, as if it was retried
        status = "Failed" if failures else "Succeeded"
        report.run(
            report.Inputs(
                workflow=name,
                status=status,
                failures=failures,
                experiment="reports",
                ledgers=[ledger],
                manifest=manifest,
            )
        )

    return make_client().get_run(run_id)


@pytest.mark.slow
def test_the_run_shows_how_workers_spent_their_time(
    mlflow_server: str, s3: Store, tmp_path: Path
) -> None:
    run = report_run(s3, COMPLETE)
    metrics = run.data.metrics
    tags = run.data.tags
    seconds = [
        round(metrics[f"workers/worker_seconds_{kind}"], 3)
        for kind in ("trained", "waited", "lost")
    ]
    assert seconds == [1.5 * 2 + 2.5, 2.1, 0]

    assert metrics["workers/preemptions"] == 1
    assert tags["rekindle.preemptions"] == "1"
    assert tags["rekindle.device"] == "cpu"

    folder = Path(make_client().download_artifacts(run.info.run_id, "ledger", str(tmp_path)))
    assert "worker-1 was lost (connection closed) at step 10" in (folder / "story.txt").read_text()
    assert not [name for name in {**metrics, **tags} if "cost" in name or "currency" in name], (
        "without prices"
    )
    assert json.loads((folder / "summary.json").read_text())["steps"] == 40
    assert (folder / "timeline.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_one_run_distinguishes_its_two_trainings(mlflow_server: str, s3: Store) -> None:
    name = f"w-{uuid.uuid4().hex[:8]}"
    run_id = tracking.start_run("reports", name)

    ledgers = [key(task, LEDGER_KEY, name) for task in ("train-small", "train-wide")]
    for ledger in ledgers:
        s3.put(
            f"{ledger}/1-a-0.jsonl",
            "\n".join(json.dumps(event) for event in [*EVENTS, COMPLETE]).encode(),
        )

    for task, verdict in (("small", "keep"), ("wide", "release")):
        prefix = f"evaluate-{task}"
        tracking.log_to_run(
            run_id, run_tags={f"{prefix}/verdict": verdict, f"{prefix}/reason": f"It is {task}."}
        )

    report.run(
        report.Inputs(workflow=name, status="Succeeded", experiment="reports", ledgers=ledgers)
    )
    run_data = make_client().get_run(run_id).data
    assert {
        "train-small/workers/preemptions",
        "train-wide/workers/preemptions",
    } <= run_data.metrics.keys()
    assert "rekindle.device" not in run_data.tags
    assert run_data.tags["train-wide/rekindle.device"] == "cpu"
    note_paragraphs = run_data.tags["mlflow.note.content"].split("\n\n")
    assert note_paragraphs[:2] == [
        "**evaluate-small/keep**: It is small.",
        "**evaluate-wide/release**: It is wide.",
    ]
    assert [line.partition("]")[0] for line in note_paragraphs[2:]] == [
        f"![train-{size}/ledger/timeline.png" for size in ("small", "wide")
    ]


@pytest.mark.slow
def test_the_run_has_the_costs_of_its_training_if_the_manifest_has_prices(
    mlflow_server: str, s3: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / PRICES_FILE).write_text((project.REFERENCE / "template" / PRICES_FILE).read_text())
    monkeypatch.chdir(tmp_path)
    sets = ["families=[transformer]", "cluster.pods.train.preset=[gke-spot,gpu]"]
    manifest = render_manifest(load_config(project.REFERENCE / "configs/cluster.yaml", sets).config)
    (packed,) = [
        parameter["value"]
        for parameter in manifest["spec"]["arguments"]["parameters"]
        if parameter["name"] == "manifest"
    ]
    run = report_run(s3, COMPLETE, manifest=packed)
    metrics = run.data.metrics
    tags = run.data.tags
    usd_per_second = (4 * 0.01 + 16 * 0.0012 + 0.224) / 3600
    assert metrics["cost/trained"] == pytest.approx(5.5 * usd_per_second, abs=1e-9)
    uses = ("trained", "waited", "lost", "queued", "coordinator")
    assert metrics["cost/total"] == pytest.approx(
        sum(metrics[f"cost/{use}"] for use in uses), abs=5e-9
    )
    assert metrics["cost/spot"] + metrics["cost/on_demand"] == pytest.approx(
        metrics["cost/total"], abs=2e-9
    )
    assert metrics["cost/without_spot"] - metrics["cost/total"] == pytest.approx(
        metrics["cost/saved"], abs=2e-9
    )
    assert tags["rekindle.currency"] == "USD"
    folder = Path(make_client().download_artifacts(run.info.run_id, "ledger", str(tmp_path)))
    assert (
        "The training cost 0.00060 USD: 0.00043 trained, 0.00017 waited."
        in (folder / "story.txt").read_text()
    )
    assert json.loads((folder / "summary.json").read_text())["cost"]["currency"] == "USD"


@pytest.mark.slow
def test_the_run_shows_why_a_training_was_aborted(mlflow_server: str, s3: Store) -> None:
    run = report_run(s3, VERDICT, failures=json.dumps(FAILURE))
    assert run.data.tags["rekindle.failures"].startswith(
        "training: worker-0: the gradient is not finite\ntrain: Error"
    )


def test_the_page_of_a_run_shows_its_verdict_and_plots(mlflow_server: str, tmp_path: Path) -> None:
    name = f"w-{uuid.uuid4().hex[:8]}"
    run_id = tracking.start_run("reports", name)
    (tmp_path / "a curve.png").write_bytes(b"\x89PNG")
    tracking.log_folder(run_id, tmp_path, "evaluation")
    tracking.log_to_run(run_id, run_tags={"verdict": "keep", "reason": "The candidate is worse."})

    report.run(
        report.Inputs(
            workflow=name, status="Failed", failures=json.dumps(FAILURE), experiment="reports"
        )
    )

    note_text = make_client(mlflow_server).get_run(run_id).data.tags["mlflow.note.content"]
    verdict, failure, picture = note_text.split("\n\n")
    assert verdict == "**keep**: The candidate is worse."
    assert failure.startswith("**failed**: train: ")
    address = re.findall(r"!\[.*\]\((.*)\)", picture)[0]
    bearer = {"Authorization": f"Bearer {os.environ['MLFLOW_TRACKING_TOKEN']}"}
    assert (
        requests.get(f"{mlflow_server}/{address}", headers=bearer, timeout=10).content == b"\x89PNG"
    )


def test_a_missing_or_unreachable_ledger_does_not_fail_the_workflow(
    mlflow_server: str, s3: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"w-{uuid.uuid4().hex[:8]}"
    run_id = tracking.start_run("reports", name)

    inputs = report.Inputs(
        workflow=name,
        status="Succeeded",
        experiment="reports",
        ledgers=[key("train", LEDGER_KEY, name)],
    )

    assert report.run(inputs).run_id == run_id
    monkeypatch.delenv("S3_BUCKET")
    outputs = report.run(inputs)
    assert outputs.run_id == run_id
    assert outputs.warnings[0].startswith("the summary of the training is not recorded: ")
    run = make_client(mlflow_server).get_run(run_id)
    assert run.info.status == "FINISHED"
    assert run.data.metrics == {}


def test_an_unexpected_error_in_a_summary_does_not_leave_the_run_open(
    mlflow_server: str, s3: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise TypeError("unsupported operand")

    monkeypatch.setattr(report, "log_training", fail)
    name = f"w-{uuid.uuid4().hex[:8]}"
    ledger = key("train", LEDGER_KEY, name)
    s3.put(f"{ledger}/1-a-0.jsonl", "\n".join(map(json.dumps, EVENTS)).encode())
    run_id = tracking.start_run("reports", name)

    outputs = report.run(
        report.Inputs(
            workflow=name,
            status="Succeeded",
            experiment="reports",
            ledgers=[ledger],
            manifest="damaged",
        )
    )

    assert make_client(mlflow_server).get_run(run_id).info.status == "FINISHED"
    costs, summary, *_ = outputs.warnings
    assert costs.startswith("the costs of the training are not recorded: ")
    assert summary == (
        "the summary of the training is not recorded: TypeError('unsupported operand')"
    )
