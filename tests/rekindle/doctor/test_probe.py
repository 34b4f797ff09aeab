"""What a pod says about the object store and MLflow, before a pipeline relies on them."""

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


def probed(environment: Mapping[str, str], *flags: str) -> Any:
    command = [sys.executable, "-m", "rekindle.doctor.probe", *flags]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=60)
    return done.returncode, json.loads(done.stdout) if done.stdout else done.stderr


def test_what_works_and_what_does_not_is_told_apart(s3: Store, mlflow_server: str) -> None:
    code, findings = probed({})
    assert code == 0
    assert findings["object store"] == [True, f"{s3.endpoint}: 1 of 8 racing creators won, a stale write was refused"]
    assert findings["MLflow"] == [True, "it answers"]
    code, findings = probed({"S3_BUCKET": "nosuch", "MLFLOW_TRACKING_URI": ""})
    assert code == 0
    assert findings["object store"][0] is False and '"nosuch"' in findings["object store"][1]
    assert findings["MLflow"][0] is False and "MLFLOW_TRACKING_URI is not set" in findings["MLflow"][1]


def test_a_store_that_ignores_conditions_is_found_out(s3: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3.client, "put_object", unconditional(s3.client.put_object))
    assert probe.store(s3) == (False, f"{s3.endpoint}: 8 of 8 racing creators won, a stale write was accepted")


def unconditional(put: Any) -> Any:
    return lambda IfNoneMatch="", IfMatch="", **request: put(**request)


def test_the_bucket_is_made_once(s3: Store) -> None:
    other = Store("made-by-probe", s3.endpoint)
    with pytest.raises(ConfigError):
        list(other.list(""))
    for _ in range(2):
        assert probed({"S3_BUCKET": other.bucket}, "--make-bucket") == (0, "")
        assert list(other.list("")) == []


def test_a_store_that_is_not_there_yet_fails_the_job_that_makes_the_bucket(s3: Store) -> None:
    code, said = probed({"S3_ENDPOINT_URL": "http://127.0.0.1:1"}, "--make-bucket")
    assert code == 1 and said.startswith("error: ") and "Traceback" not in said
