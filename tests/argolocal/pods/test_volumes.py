"""Tests of volumes: files of ConfigMaps and Secrets, and files that the pods of a run share."""

import base64
from pathlib import Path
from typing import Any

import pytest

from argolocal.errors import ConfigError
from argolocal.pods import filesystem
from argolocal.runner.cluster import LocalCluster
from tests.argolocal.running import execute_manifest
from tests.builders import make_workflow

pytestmark = pytest.mark.skipif(
    not filesystem.supports_namespaces(), reason="needs mount namespaces"
)
OUT_OUTPUTS = {"parameters": [{"name": "out", "valueFrom": {"path": "/tmp/out"}}]}
CONFIG = {"kind": "ConfigMap", "metadata": {"name": "c"}, "data": {"a": "one", "b": "two"}}
SECRET = {
    "kind": "Secret",
    "metadata": {"name": "s"},
    "data": {"key": base64.b64encode(b"\xff\x00").decode()},
    "stringData": {"password": "hunter2"},
}


def make_shell_template(source: str, *mounts: dict[str, Any], **more: Any) -> dict[str, Any]:
    container = {
        "image": "busybox",
        "command": ["sh", "-ec"],
        "args": [source],
        "volumeMounts": [*mounts],
    }
    return {"name": "main", "container": container, "outputs": OUT_OUTPUTS, **more}


def make_mount_template(path: str, name: str = "v", **more: Any) -> dict[str, Any]:
    return {"name": name, "mountPath": path, **more}


def run_pods(
    home: Path,
    *templates: dict[str, Any],
    other_objects: tuple[dict[str, Any], ...] = (),
    **spec: Any,
) -> dict[str, Any]:
    cluster = LocalCluster(home)
    cluster.store_objects(other_objects)
    return execute_manifest(make_workflow(*templates, **spec), {}, cluster)


def pod_output(
    home: Path, template: dict[str, Any], volume: dict[str, Any], *other_objects: dict[str, Any]
) -> str:
    """Run a pod with a volume `volume` named v, and return the content of its /tmp/out."""
    status = run_pods(
        home, template, other_objects=other_objects, volumes=[{"name": "v", **volume}]
    )
    assert status["phase"] == "Succeeded", status
    return status["nodes"]["w"]["outputs"]["parameters"][0]["value"]


@pytest.mark.parametrize(
    ("volume", "script", "expected"),
    [
        (
            {"configMap": {"name": "c"}},
            "cat /v/a /v/b > /tmp/out; stat -c %a /v/a >> /tmp/out",
            "onetwo644",
        ),
        (
            {"configMap": {"name": "c", "items": [{"key": "b", "path": "deep/x", "mode": 0o400}]}},
            "ls /v > /tmp/out; cat /v/deep/x >> /tmp/out; stat -c %a /v/deep/x >> /tmp/out",
            "deep\ntwo400",
        ),
        ({"configMap": {"name": "none", "optional": True}}, "ls /v | wc -l > /tmp/out", "0"),
        (
            {"secret": {"secretName": "s", "defaultMode": 0o440}},
            "wc -c < /v/key > /tmp/out; cat /v/password >> /tmp/out; stat -c %a /v/key >> /tmp/out",
            "2\nhunter2440",
        ),
        (
            {
                "projected": {
                    "defaultMode": 0o600,
                    "sources": [
                        {"configMap": {"name": "c", "items": [{"key": "a", "path": "conf/a"}]}},
                        {"secret": {"name": "s", "items": [{"key": "password", "path": "pass"}]}},
                        {
                            "downwardAPI": {
                                "items": [
                                    {"path": "name", "fieldRef": {"fieldPath": "metadata.name"}}
                                ]
                            }
                        },
                    ],
                }
            },
            "cat /v/conf/a /v/pass /v/name > /tmp/out; stat -c %a /v/pass >> /tmp/out",
            "onehunter2w600",
        ),
    ],
)
def test_a_pod_reads_its_configuration_from_files(
    tmp_path: Path, volume: dict[str, Any], script: str, expected: str
) -> None:
    assert (
        pod_output(
            tmp_path, make_shell_template(script, make_mount_template("/v")), volume, CONFIG, SECRET
        )
        == expected
    )


def test_one_key_of_a_configmap_can_be_mounted_below_a_system_directory(tmp_path: Path) -> None:
    script = "test -e /etc/passwd; cat /etc/app/b.conf > /tmp/out; "
    script += "(echo x > /etc/app/b.conf) 2>/dev/null || echo ro >> /tmp/out"
    template = make_shell_template(script, make_mount_template("/etc/app/b.conf", subPath="b"))
    assert pod_output(tmp_path, template, {"configMap": {"name": "c"}}, CONFIG) == "tworo"
    assert not Path("/etc/app").exists()


def test_a_read_only_mount_cannot_be_written(tmp_path: Path) -> None:
    script = "(touch /v/x && echo written || echo refused) 2>/dev/null > /tmp/out"
    assert (
        pod_output(
            tmp_path / "a",
            make_shell_template(script, make_mount_template("/v", readOnly=True)),
            {"emptyDir": {}},
        )
        == "refused"
    )
    assert (
        pod_output(
            tmp_path / "b", make_shell_template(script, make_mount_template("/v")), {"emptyDir": {}}
        )
        == "written"
    )


def test_two_mounts_of_a_volume_show_the_same_files(tmp_path: Path) -> None:
    mounts = [
        make_mount_template("/v"),
        make_mount_template("/w", subPath="sub"),
        make_mount_template("/v/in/deep", name="other"),
        make_mount_template("/x", name="other"),
    ]

    mounts.append(make_mount_template("/y", subPathExpr="$(PART)"))
    script = (
        "echo 1 > /w/x; echo 2 > /v/in/deep/y; echo 3 > /y/z; cat /v/sub/x /x/y /v/part/z >"
        " /tmp/out"
    )
    template = make_shell_template(script, *mounts, volumes=[{"name": "other", "emptyDir": {}}])
    template["container"]["env"] = [{"name": "PART", "value": "part"}]
    assert pod_output(tmp_path, template, {"emptyDir": {}}) == "1\n2\n3"


def test_artifacts_and_parameters_in_a_volume_are_found(tmp_path: Path) -> None:
    inputs = {"artifacts": [{"name": "a", "path": "/v/sub/in", "raw": {"data": "given"}}]}
    outputs = {"parameters": [{"name": "out", "valueFrom": {"path": "/v/sub/out"}}]}
    template = make_shell_template(
        "cp /v/sub/in /v/sub/out", make_mount_template("/v"), inputs=inputs, outputs=outputs
    )
    assert pod_output(tmp_path, template, {"emptyDir": {}}) == "given"


def make_steps_template(*names: str) -> dict[str, Any]:
    return {"name": "main", "steps": [[{"name": name, "template": name}] for name in names]}


CLAIM = {"metadata": {"name": "v"}, "spec": {"resources": {"requests": {"storage": "1Gi"}}}}


@pytest.mark.parametrize(
    ("exit_code", "gc", "is_kept"),
    [(0, None, False), (1, None, True), (1, {"strategy": "OnWorkflowCompletion"}, False)],
)
def test_a_volume_claim_is_shared_by_pods_and_deleted_as_on_argo(
    tmp_path: Path, exit_code: int, gc: dict[str, str] | None, is_kept: bool
) -> None:
    write = {
        **make_shell_template("echo hello > /v/x", make_mount_template("/v")),
        "name": "write",
        "outputs": {},
    }
    read = {
        **make_shell_template(f"cp /v/x /tmp/out; exit {exit_code}", make_mount_template("/v")),
        "name": "read",
    }
    more: dict[str, Any] = {"volumeClaimGC": gc} if gc else {}
    status = run_pods(
        tmp_path,
        make_steps_template("write", "read"),
        write,
        read,
        volumeClaimTemplates=[CLAIM],
        **more,
    )
    (node,) = [node for node in status["nodes"].values() if node["displayName"] == "read"]
    assert node["outputs"]["parameters"][0]["value"] == "hello"
    claim = {"name": "v", "persistentVolumeClaim": {"claimName": "w-v"}}
    assert status.get("persistentVolumeClaims", []) == ([claim] if is_kept else [])
    assert (tmp_path / "claims/w-v/x").exists() == is_kept


def test_a_claim_in_the_workflow_file_outlives_the_workflow(tmp_path: Path) -> None:
    claim = {"kind": "PersistentVolumeClaim", "metadata": {"name": "data"}, "spec": {}}
    volume = {"persistentVolumeClaim": {"claimName": "data"}}
    pod_output(
        tmp_path,
        make_shell_template("echo 1 > /v/x; touch /tmp/out", make_mount_template("/v")),
        volume,
        claim,
    )
    assert (tmp_path / "claims/data/x").read_text() == "1\n"
    with pytest.raises(ConfigError, match="PersistentVolumeClaim 'data' does not exist here"):
        run_pods(
            tmp_path / "other",
            make_shell_template("true", make_mount_template("/v")),
            volumes=[{"name": "v", **volume}],
        )


@pytest.mark.parametrize(
    ("volume", "message"),
    [
        (
            {"secret": {"secretName": "s", "items": [{"key": "no", "path": "x"}]}},
            "not contain the key 'no'",
        ),
        (
            {"secret": {"secretName": "s", "items": [{"key": "key", "path": "../../x"}]}},
            "leads out",
        ),
    ],
)
def test_an_invalid_volume_is_reported_with_its_name(
    tmp_path: Path, volume: dict[str, Any], message: str
) -> None:
    status = run_pods(
        tmp_path,
        make_shell_template("true", make_mount_template("/v")),
        other_objects=(SECRET,),
        volumes=[{"name": "v", **volume}],
    )
    assert status["phase"] == "Error"
    assert message in status["message"]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            {"volumes": [{"name": "v", "hostPath": {"path": "/"}}]},
            r"spec\.volumes\[0\]\.hostPath.*Use a persistentVolumeClaim",
        ),
        ({"volumes": [{"name": "v"}]}, r"spec\.volumes\[0\] has the kinds \[\]"),
        ({"volumes": [{"name": "w", "emptyDir": {}}]}, r"templates\[0\] mounts 'v'.*must be w"),
        (
            {"volumeClaimTemplates": [{"spec": {}}]},
            r"volumeClaimTemplates\[0\]\.metadata is missing",
        ),
        (
            {"volumes": [{"name": "v", "configMap": {"name": "none"}}]},
            r"volumes\[0\]\.configMap: the ConfigMap .* does not exist",
        ),
        (
            {
                "volumes": [
                    {
                        "name": "v",
                        "downwardAPI": {"items": [{"path": "x", "fieldRef": {"fieldPath": "no"}}]},
                    }
                ]
            },
            "fieldPath is 'no': it must be one of metadata.name",
        ),
        ({"volumes": [{"name": "../v", "emptyDir": {}}]}, "RFC 1123 label"),
        (
            {"volumes": [{"name": "v", "secret": {"secretName": 5}}]},
            r"secretName is 5: it must be a text",
        ),
        (
            {"volumes": [{"name": "v", "configMap": {"name": "c", "defaultMode": "rw"}}]},
            "defaultMode.*whole number",
        ),
        (
            {"volumeClaimTemplates": [CLAIM], "volumeClaimGC": {"strategy": "Never"}},
            "OnWorkflowSuccess",
        ),
    ],
)
def test_invalid_volumes_are_rejected_before_the_run(
    tmp_path: Path, spec: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        run_pods(tmp_path, make_shell_template("true", make_mount_template("/v")), **spec)
    assert not (tmp_path / "runs").exists()


def test_a_secret_is_only_in_its_own_file(tmp_path: Path) -> None:
    """The state of a run, its logs and its pods' directories do not contain the value of the
    Secret, even after a failure."""
    env = [{"name": "P", "valueFrom": {"secretKeyRef": {"name": "s", "key": "password"}}}]
    template = make_shell_template(
        'test "$P" = hunter"2"; echo ran; test -s /v/password; exit 1',
        make_mount_template("/v"),
        outputs={},
    )
    template["container"]["env"] = env
    volume = {"name": "v", "secret": {"secretName": "s"}}
    status = run_pods(tmp_path, template, other_objects=(SECRET,), volumes=[volume])
    assert status["phase"] == "Failed"
    assert "hunter2" not in str(status)
    assert (tmp_path / "runs/w/logs/w.log").read_text() == "ran\n"
    files = [
        path for path in tmp_path.rglob("*") if path.is_file() and b"hunter2" in path.read_bytes()
    ]
    assert files == [tmp_path / "objects/Secret/s.json"]
    assert files[0].stat().st_mode & 0o077 == 0
