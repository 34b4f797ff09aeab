"""A malformed record leads to an error message of one line, without a traceback."""

import json
import subprocess
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from argolocal.common.json_text import loads, to_json
from rekindle.cluster.errors import make_api_error
from rekindle.content.recorded_manifest import parse_manifest, unpack_manifest
from rekindle.errors import RekindleError
from rekindle.local.jobs import kubexec
from rekindle.local.services.s3.object_files import ObjectFiles
from rekindle.local.services.services import CREDENTIALS_FILE, Services
from rekindle.operations.plan.history import parse_former_run
from rekindle.operations.plan.releases import find_local_champion
from rekindle.operations.plan.tasks import TaskTree
from rekindle.step import encode_parameter
from rekindle.storage import Store
from rekindle.training.cost.prices import PRICES_ANNOTATION
from rekindle.training.cost.run_cost import TRAINING_COSTS_OUTPUT, compute_step_costs
from rekindle.training.cost.tariff import read_prices
from rekindle.training.membership.lease import CoordinatorLease
from rekindle.training.spec import TrainingSpec
from steps.fraud.facts import read_facts
from steps.monitoring.moving_window import identity_tags
from steps.report import Inputs, record_cached
from tests.effort import count_calls

SERVICE = "objects/Service/model.json"


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def node_costs(text: str) -> Any:
    parameters = [{"name": TRAINING_COSTS_OUTPUT, "value": text}]
    node = {
        "id": "a",
        "name": "run.report",
        "type": "Pod",
        "templateName": "report",
        "startedAt": "2026-01-01T00:00:00Z",
        "finishedAt": "2026-01-01T00:00:01Z",
        "outputs": {"parameters": parameters},
    }
    manifest = {"spec": {"templates": [{"name": "report", "suspend": {}}]}}
    return compute_step_costs({"nodes": {"a": node}}, manifest, None)  # type: ignore[arg-type]


READERS: dict[str, tuple[Callable[[Path, str], Any], tuple[str, ...]]] = {
    "a packed manifest": (
        lambda folder, text: unpack_manifest(encode_parameter(text)),
        ("[]", "{}", "{", '{"spec": []}', '{"spec": {"templates": [{}]}}'),
    ),
    "a parameter that is not packed": (
        lambda folder, text: unpack_manifest(text),
        ("x", "not base64\n", "aGVsbG8="),
    ),
    "a manifest of a run": (
        lambda folder, text: parse_manifest(text),
        ("1", '{"spec": {"arguments": {"parameters": [{"value": 1}]}}}'),
    ),
    "the identity of a run": (
        lambda folder, text: identity_tags(unpack_manifest(encode_parameter(text)), "code"),
        ("[]", "{}", '{"spec": {"arguments": {"parameters": {}}}}'),
    ),
    "the manifest of an earlier run": (
        lambda folder, text: parse_former_run("a", {"spec": json.loads(text)}, {}),
        (
            "[]",
            '{"templates": [{"name": "a", "dag": {"tasks": [{}]}}]}',
            '{"templates": [{"name": "a", "resource": "x"}]}',
        ),
    ),
    "the tasks that an earlier run reused": (
        lambda folder, text: TaskTree(
            {
                "spec": {
                    "entrypoint": "a",
                    "templates": [{"name": "a"}],
                    "arguments": {"parameters": [{"name": "cached", "value": text}]},
                }
            }
        ),
        ("[]", '{"train": {}}', '{"train": {"task": "train", "at": 1}}'),
    ),
    "prices": (
        lambda folder, text: read_prices({"metadata": {"annotations": {PRICES_ANNOTATION: text}}}),
        ("{", "[]", "1"),
    ),
    "costs of trainings": (
        lambda folder, text: node_costs(text),
        ("{", "[]", '{"train": "much"}', '{"train": NaN}'),
    ),
    "a Service": (
        lambda folder, text: find_local_champion(write(folder / SERVICE, text).parents[2], "model"),
        ("{", "{}", '{"spec": {"ports": []}}', '{"spec": {"ports": [{"port": "80"}]}}'),
    ),
    "the record of a service": (
        lambda folder, text: Services(write(folder / "services/s3.json", text).parents[1]).find(
            "s3"
        ),
        ("{", "[]", '{"name": "s3"}', '{"name": "s3", "port": "x", "pid": 1, "since": 1}'),
    ),
    "credentials": (
        lambda folder, text: Services(
            write(folder / "services" / CREDENTIALS_FILE, text).parents[1]
        )._keep_secret_file(CREDENTIALS_FILE, {}),
        ("{", "[]", '{"AWS_ACCESS_KEY_ID": 1}'),
    ),
    "the facts of a dataset": (
        lambda folder, text: read_facts(write(folder / "dataset.json", text).parent),
        ('{"facts": {}}', '{"facts": {"features": "amount"}}', "[]"),
    ),
    "the cached tasks of a report": (
        lambda folder, text: record_cached(
            "", Inputs(workflow="w", status="Succeeded", cached={"a": json.loads(text)})
        ),
        ("{}", '{"task": "a"}', '{"task": 1, "at": ""}'),
    ),
}


@pytest.mark.parametrize(
    ("reader", "text"), [(name, text) for name, (_, texts) in READERS.items() for text in texts]
)
def test_a_malformed_record_is_an_error_of_one_line(tmp_path: Path, reader: str, text: str) -> None:
    read, _ = READERS[reader]

    with pytest.raises(RekindleError) as caught:
        read(tmp_path, text)

    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["{", "[]", '{"worker": 1}', '{"worker": {"pid": "1"}}'])
def test_a_malformed_list_of_workers_ends_the_command_with_one_line(
    tmp_path: Path, text: str
) -> None:
    write(tmp_path / kubexec.WORKERS_FILE, text)

    result = subprocess.run(
        [sys.executable, kubexec.__file__, tmp_path, "worker", "true"],
        capture_output=True,
        text=True,
    )

    (line,) = result.stderr.splitlines()
    assert result.returncode == 1
    assert line.startswith(f"error: {tmp_path / kubexec.WORKERS_FILE} is malformed: ")


@pytest.mark.parametrize(
    "changes",
    [{"bucket": 1}, {"key": None}, {"headers": []}, {"headers": {"a": 1}}, {"started": "now"}],
)
def test_an_upload_with_a_malformed_record_does_not_exist(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    uploads = ObjectFiles(tmp_path).uploads
    uploads.start("b", "k", {})
    (path,) = (tmp_path / "uploads").glob("*/upload.json")
    record = json.loads(path.read_text())

    path.write_text(to_json({**record, **changes}))

    assert uploads._read(path.parent) is None


def test_a_recorded_manifest_is_parsed_once() -> None:
    templates = [{"name": f"t{number}"} for number in range(1000)]
    text = to_json({"spec": {"templates": templates}})
    assert count_calls(lambda: parse_manifest(text)) < 1.5 * count_calls(lambda: loads(text))


DEEP_JSON = "[" * 100_000


def test_deeply_nested_json_of_others_is_malformed_and_no_bug(
    s3: Store,
) -> None:
    prefix = f"deep-{uuid.uuid4().hex[:8]}"
    spec = TrainingSpec.for_local_training("w", {}, {}).model_copy(update={"checkpoints": prefix})
    s3.put(f"{spec.checkpoints}/coordinator", DEEP_JSON.encode())
    lease = CoordinatorLease(lambda: s3, spec, "me")
    lease.renew()
    assert lease.is_held

    error = make_api_error(
        500, DEEP_JSON.encode(), "/api/v1/pods", "server", "context", "namespace"
    )
    assert len(error.lines) == 1

    arguments = {"parameters": [{"name": "config", "value": DEEP_JSON}]}
    workflow = {"metadata": {"name": "a"}, "spec": {"arguments": arguments, "templates": []}}
    assert parse_former_run("a", workflow, {}).name == "a"
