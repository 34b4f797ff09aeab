"""The probe that a pod runs tests the object store and MLflow before a pipeline needs these
services."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import pytest

from rekindle.doctor import probe
from rekindle.errors import ConfigError
from rekindle.storage import Store


def run_probe(environment: Mapping[str, str], *flags: str) -> Any:
    command = [sys.executable, "-m", "rekindle.doctor.probe", *flags]
    result = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=60
    )
    return result.returncode, json.loads(result.stdout) if result.stdout else result.stderr


def test_the_probe_reports_working_and_failing_services(s3: Store, mlflow_server: str) -> None:
    code, findings = run_probe({})
    assert code == 0
    works = f"{s3.endpoint}: 1 of 8 concurrent creates succeeded, a stale write was refused"
    assert findings["object store"] == [True, works]
    assert findings["MLflow"] == [True, "MLflow answers"]
    code, findings = run_probe({"S3_BUCKET": "nosuch", "MLFLOW_TRACKING_URI": ""})
    assert code == 0
    assert findings["object store"][0] is False
    assert '"nosuch"' in findings["object store"][1]
    assert findings["MLflow"][0] is False
    assert "MLFLOW_TRACKING_URI is not set" in findings["MLflow"][1]


def test_a_store_that_ignores_write_conditions_fails(
    s3: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3.client, "put_object", drop_conditions(s3.client.put_object))
    fails = f"{s3.endpoint}: 8 of 8 concurrent creates succeeded, a stale write was accepted"
    assert probe.check_store(s3) == (False, fails)


def drop_conditions(put: Any) -> Any:
    return lambda IfNoneMatch="", IfMatch="", **request: put(**request)


@pytest.mark.slow
def test_the_bucket_is_created_once(s3: Store) -> None:
    other = Store("made-by-probe", s3.endpoint)
    with pytest.raises(ConfigError):
        list(other.list(""))
    for _ in range(2):
        assert run_probe({"S3_BUCKET": other.bucket}, "--make-bucket") == (0, "")
        assert list(other.list("")) == []


def test_creating_the_bucket_fails_while_the_store_is_unavailable(s3: Store) -> None:
    code, output = run_probe({"S3_ENDPOINT_URL": "http://127.0.0.1:1"}, "--make-bucket")
    assert code == 1
    assert output.startswith("error: ")
    assert "Traceback" not in output
