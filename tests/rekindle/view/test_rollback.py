"""`rekindle rollback` tells people, as the config says with which the release was trained."""

import json
import uuid
from pathlib import Path
from typing import Any

import pytest

from rekindle import tracking
from rekindle.local.controllers import controllers
from rekindle.local.emulator import LocalCluster
from rekindle.serving import promotion
from rekindle.storage import Store
from tests.commands import shell
from tests.rekindle.local.controllers.test_deployment import address, release, rolled_out, wait
from tests.rekindle.monitoring.hook import hook


def called(name: str, obj: dict[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(obj).replace("fraud", name))


@pytest.mark.timeout(600)
def test_going_back_by_hand_is_told_with_both_versions(
    tmp_path: Path, s3: Store, s3_environment: dict[str, str], mlflow_server: str
) -> None:
    name, cluster = f"cards-{uuid.uuid4().hex[:6]}", LocalCluster(tmp_path / ".rekindle")
    kinds = controllers(cluster, cluster.home / "run")
    champion = ""
    with shell(tmp_path, **s3_environment, MLFLOW_TRACKING_URI=mlflow_server) as typed, hook() as server:
        for number in range(2):
            run_id = tracking.start_run(name, f"{name}-{number}")
            tracking.log(run_id, params={"notify": {"format": "json", "events": ["rollback"], "mlflow_url": ""}})
            prefix = f"releases/{uuid.uuid4().hex}/"
            version = tracking.register(name, prefix, f"s3://b/{prefix}", "ab" * 32, run_id, {}).version
            promotion.promote(s3, name, version, champion, f"{name}-{version}")
            kinds["Deployment"].apply(called(name, release(version)))
            kinds["Service"].apply(called(name, address(version, int(typed.environ["REKINDLE_SERVE__PORT"]))))
            wait(kinds, rolled_out, name=f"{name}-{version}")
            champion = version
        done = typed(f"NOTIFY_URL={server.url} rekindle rollback {name} -o json")
        assert (done.returncode, json.loads(done.stdout)["version"]) == (0, "1"), done.stderr
        (message,) = server.taken
        assert (message["event"], message["name"]) == ("rollback", name)
        assert message["text"] == "version 1 answers again (before: version 2), by `rekindle rollback`."
        assert "/#/experiments/" in message["link"] and (tracking.find_run(name, f"{name}-0") or "-") in message["link"]
        done = typed(f"rekindle rollback {name} 2")
        assert done.returncode == 0 and "version 2 of" in done.stdout and "NOTIFY_URL is not set" in done.stderr
