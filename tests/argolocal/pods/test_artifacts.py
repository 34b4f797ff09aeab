"""Tests of artifacts: a model or dataset must arrive unchanged, under the key that Argo would
use."""

import os
import tarfile
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from argolocal.errors import ConfigError
from argolocal.pods import artifacts, filesystem
from argolocal.pods.artifacts import ArtifactError
from argolocal.state.journal import RunFiles
from rekindle.local.cluster import LocalCluster
from rekindle.storage import Store
from tests.argolocal.running import execute_manifest
from tests.builders import make_shell_container, make_workflow
from tests.http_server import Answer, HttpServer, Request

needs_namespaces = pytest.mark.skipif(
    not filesystem.supports_namespaces(), reason="needs mount namespaces"
)


def save(store: Store, path: Path, **artifact: Any) -> dict[str, Any]:
    saved = artifacts.save_artifact(
        {"name": "a", "path": f"/tmp/{path.name}", **artifact},
        path,
        path,
        path.parent,
        "pod",
        "w",
        lambda _: store,
    )
    assert saved
    return saved


def test_files_and_directories_are_restored(s3: Store, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    (tree / "deep").mkdir(parents=True)
    (tree / "deep/x").write_text("x")
    (tree / "y").write_text("y")

    for archive in (
        {},
        {"archive": {"none": {}}},
        {"archive": {"tar": {"compressionLevel": 0}}},
        {"archive": {"zip": {}}},
    ):
        for source in (tree, tree / "y")[: 1 if "zip" in str(archive) else 2]:
            saved = save(
                s3, source, **archive, s3={"key": f"keys/{len(str(archive))}/{source.name}"}
            )
            target = tmp_path / f"in-{len(str(archive))}-{source.name}"
            artifacts.load(saved, target, lambda _: s3)

            if source.is_file():
                assert target.read_text() == "y"
            else:
                assert sorted(str(file.relative_to(target)) for file in target.rglob("*")) == [
                    "deep",
                    "deep/x",
                    "y",
                ]


def test_keys_of_artifacts_have_the_format_of_the_default_repository(
    s3: Store, tmp_path: Path
) -> None:
    (tmp_path / "model.bin").write_text("m")
    assert save(s3, tmp_path / "model.bin")["s3"]["key"] == "w/pod/a.tgz"
    assert save(s3, tmp_path / "model.bin", archive={"none": {}})["s3"]["key"] == "w/pod/model.bin"
    (tmp_path / "a").write_text("x")
    assert save(s3, tmp_path / "a", archive={"zip": {}})["s3"]["key"] == "w/pod/a.zip"
    # the error is the same as on Argo
    with pytest.raises(artifacts.ArtifactError, match="stat /tmp/argo/outputs/artifacts/a"):
        save(s3, tmp_path / "model.bin", archive={"zip": {}})


def test_a_tarball_is_unpacked_unless_archive_is_none(s3: Store, tmp_path: Path) -> None:
    (tmp_path / "weights").write_text("w")
    with tarfile.open(tmp_path / "model.tar.gz", "w:gz") as tar:
        tar.add(tmp_path / "weights", "weights")
    s3.upload(tmp_path / "model.tar.gz", "model.tar.gz")
    artifacts.load({"name": "a", "s3": {"key": "model.tar.gz"}}, tmp_path / "one", lambda _: s3)
    # a single entry gets the path of the artifact
    assert (tmp_path / "one").read_text() == "w"
    packed_artifact = {"name": "a", "s3": {"key": "model.tar.gz"}, "archive": {"none": {}}}
    artifacts.load(packed_artifact, tmp_path / "two", lambda _: s3)
    assert (tmp_path / "two").read_bytes() == (tmp_path / "model.tar.gz").read_bytes()


def test_a_tree_is_restored_with_modes_and_hard_links(s3: Store, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "run").write_text("x")
    (tree / "run").chmod(0o777)
    (tree / "again").hardlink_to(tree / "run")
    (tree / "link").symlink_to("run")
    artifacts.load(save(s3, tree), tmp_path / "in", lambda _: s3)
    files = {
        file.name: (file.read_text(), file.stat().st_mode & 0o777)
        for file in (tmp_path / "in").iterdir()
    }
    assert files == dict.fromkeys(("run", "again", "link"), ("x", 0o777))
    assert (tmp_path / "in/link").is_symlink()
    assert (tmp_path / "in/again").stat().st_nlink == 1
    artifacts.load(save(s3, tree, archive={"none": {}}), tmp_path / "plain", lambda _: s3)
    # the files are the same as on Argo
    assert sorted(file.name for file in (tmp_path / "plain").iterdir()) == ["again", "run"]


@pytest.mark.parametrize("target", ["/etc/hosts", "../../out"])
def test_a_link_out_of_an_artifact_is_rejected(s3: Store, tmp_path: Path, target: str) -> None:
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree/link").symlink_to(target)
    with pytest.raises(ArtifactError, match=f"illegal symlink target: tree/link -> {target}"):
        artifacts.load(save(s3, tmp_path / "tree"), tmp_path / "in", lambda _: s3)


def test_a_link_to_a_directory_is_saved_as_argo_saves_it(s3: Store, tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "tree")
    artifact = {"name": "a", "path": "/tmp/link"}

    with pytest.raises(ArtifactError, match="open /tmp/argo/outputs/artifacts/link: no such file"):
        unpacked_artifact = {**artifact, "archive": {"none": {}}}
        artifacts.save_artifact(
            unpacked_artifact,
            tmp_path / "link",
            tmp_path / "tree",
            tmp_path,
            "pod",
            "w",
            lambda _: s3,
        )

    saved = artifacts.save_artifact(
        artifact, tmp_path / "link", tmp_path / "tree", tmp_path, "pod", "w", lambda _: s3
    )
    # the saved artifact contains only the link, not the target of the link
    with pytest.raises(ArtifactError, match="illegal symlink target: link -> /"):
        artifacts.load(saved or {}, tmp_path / "in", lambda _: s3)


def test_a_missing_artifact_is_an_error_unless_it_is_optional(s3: Store, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="failed to load"):
        artifacts.load({"name": "a", "s3": {"key": "nope"}}, tmp_path / "in", lambda _: s3)

    artifacts.load(
        {"name": "a", "s3": {"key": "nope"}, "optional": True}, tmp_path / "in", lambda _: s3
    )
    arguments = (
        {"name": "a", "path": "/tmp/a"},
        tmp_path / "a",
        tmp_path / "a",
        tmp_path,
        "pod",
        "w",
        lambda _: s3,
    )
    with pytest.raises(ArtifactError, match="no such file"):
        artifacts.save_artifact(*arguments)

    assert artifacts.save_artifact({**arguments[0], "optional": True}, *arguments[1:]) is None


def test_archives_are_not_built_next_to_the_output(s3: Store, tmp_path: Path) -> None:
    # the artifact is on a read-only file system
    path = Path("/proc/version")
    artifact = {"name": "a", "path": str(path)}
    assert artifacts.save_artifact(artifact, path, path, tmp_path, "pod", "w", lambda _: s3)
    assert list(tmp_path.iterdir()) == []


def test_directories_that_a_pod_made_read_only_can_be_removed() -> None:
    root = Path(tempfile.mkdtemp(dir="/tmp"))
    (root / "go/mod").mkdir(parents=True)
    (root / "go/mod/x").write_text("")
    (root / "go/outside").symlink_to("/usr")

    for path in (root / "go/mod", root / "go"):
        path.chmod(0o555)

    if not os.getuid():  # permissions do not restrict root
        for path in (root, *root.rglob("*")):
            os.chown(path, 65534, 65534, follow_symlinks=False)

    child = os.fork()
    if not child:
        try:
            if not os.getuid():
                os.setuid(65534)

            artifacts.remove_directory(root)
        finally:
            os._exit(0)

    os.waitpid(child, 0)
    assert list(root.rglob("*")) == []
    if root.exists():  # the folder of the pod's root is in a directory of another user
        root.rmdir()


def test_a_tarball_cannot_write_outside_its_directory(s3: Store, tmp_path: Path) -> None:
    (tmp_path / "evil").write_text("e")
    with tarfile.open(tmp_path / "evil.tgz", "w:gz") as tar:
        tar.add(tmp_path / "evil", "../escaped")
    s3.upload(tmp_path / "evil.tgz", "evil.tgz")
    with pytest.raises(ArtifactError):
        artifacts.load({"name": "a", "s3": {"key": "evil.tgz"}}, tmp_path / "deep/in", lambda _: s3)
    assert not (tmp_path / "escaped").exists()


def test_raw_data_is_loaded_without_an_object_store(tmp_path: Path) -> None:
    artifacts.load(
        {"name": "a", "raw": {"data": "hello"}, "mode": 0o400}, tmp_path / "in", lambda: None
    )
    assert (tmp_path / "in").read_text() == "hello"
    assert (tmp_path / "in").stat().st_mode & 0o777 == 0o400


@pytest.mark.parametrize("name", ["x.tmp", "x.tmpdir", "x.unpacked", "downloaded"])
def test_an_artifact_does_not_replace_another_one_with_a_similar_name(
    name: str, s3: Store, tmp_path: Path
) -> None:
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree/first").write_text("1")
    (tmp_path / "tree/second").write_text("2")
    packed = save(s3, tmp_path / "tree", s3={"key": f"keys/{name}/tree"})

    folder = tmp_path / "in"
    artifacts.load({"name": "b", "raw": {"data": "other"}}, folder / name, lambda _: None)
    artifacts.load(packed, folder / "x", lambda _: s3)

    assert (folder / name).read_text() == "other"
    assert sorted(path.name for path in folder.iterdir()) == sorted(["x", name])
    assert (folder / "x/second").read_text() == "2"


def test_an_http_artifact_is_loaded_and_a_missing_http_artifact_is_reported(tmp_path: Path) -> None:
    def page(request: Request) -> Answer:
        if request.path == "/x" and request.headers["Token"] == "t":
            return Answer(200, "hello")
        return Answer(404)

    with HttpServer(page) as server:
        url = f"{server.url}/x"
        http = {"url": url, "headers": [{"name": "Token", "value": "t"}]}
        artifacts.load({"name": "a", "http": http}, tmp_path / "in", lambda _: None)
        assert (tmp_path / "in").read_text() == "hello"

        with pytest.raises(ArtifactError, match="404"):
            artifacts.load({"name": "a", "http": {"url": url}}, tmp_path / "no", lambda _: None)


def test_an_address_of_a_local_file_is_rejected(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("precious")

    with HttpServer(lambda _: Answer(302, headers={"Location": secret.as_uri()})) as server:
        for url in (secret.as_uri(), f"file:{secret}", "data:,x", server.url):
            with pytest.raises(ArtifactError, match="failed to load"):
                artifacts.load({"name": "a", "http": {"url": url}}, tmp_path / "in", lambda _: None)

            assert not (tmp_path / "in").exists()


def test_an_artifact_may_have_its_own_bucket_and_secrets(tmp_path: Path) -> None:
    cluster = LocalCluster(tmp_path)
    key = {"name": "mine", "key": "access"}

    s3 = {
        "bucket": "other",
        "endpoint": "s3.example:9000",
        "insecure": True,
        "accessKeySecret": key,
        "key": "k",
    }

    with pytest.raises(ConfigError, match="Secret 'mine' with the key 'access' does not exist"):
        cluster.store(s3)

    cluster.store_objects(
        [{"kind": "Secret", "metadata": {"name": "mine"}, "stringData": {"access": "me"}}]
    )
    store = cluster.store(s3)
    assert store.bucket == "other"
    assert store.endpoint == "http://s3.example:9000"


def outputs_after_gc(
    home: Path, *artifacts_: dict[str, Any], script: str = "echo hi; echo 1 > /tmp/a", **spec: Any
) -> dict[str, Any]:
    container = make_shell_container(script)
    more = spec.pop("template", {})

    template = {
        "name": "main",
        "container": container,
        "outputs": {"artifacts": [*artifacts_]},
        **more,
    }

    return execute_manifest(make_workflow(template, name=home.name, **spec), {}, LocalCluster(home))


def artifact_states(status: dict[str, Any], home: Path) -> list[dict[str, Any]]:
    return status["nodes"][home.name]["outputs"]["artifacts"]


@needs_namespaces
def test_only_artifacts_with_garbage_collection_on_completion_are_deleted(
    s3: Store, tmp_path: Path
) -> None:
    """OnWorkflowDeletion keeps artifacts, because this machine does not delete workflows."""
    home = tmp_path / "gc-w"
    when = "OnWorkflowCompletion"

    strategies = {
        "gone": {},
        "never": {"strategy": "Never"},
        "later": {"strategy": "OnWorkflowDeletion"},
    }

    outputs = [
        {"name": name, "path": "/tmp/a", "artifactGC": gc} for name, gc in strategies.items()
    ]
    status = outputs_after_gc(home, *outputs, artifactGC={"strategy": when})

    assert [
        (artifact["name"], artifact.get("deleted")) for artifact in artifact_states(status, home)
    ] == [
        ("gone", True),
        ("never", None),
        ("later", None),
    ]

    assert [
        s3.head(artifact["s3"]["key"]) is None for artifact in artifact_states(status, home)
    ] == [
        True,
        False,
        False,
    ]

    assert (
        RunFiles(home, home.name).load()[0]["nodes"][home.name]["outputs"]
        == status["nodes"][home.name]["outputs"]
    )


@needs_namespaces
def test_a_failed_run_deletes_artifacts_only_with_a_gc_strategy(s3: Store, tmp_path: Path) -> None:
    output = {"name": "a", "path": "/tmp/a"}
    failing = "echo 1 > /tmp/a; exit 1"
    status = outputs_after_gc(
        tmp_path / "gc-f", output, script=failing, artifactGC={"strategy": "OnWorkflowCompletion"}
    )
    assert status["phase"] == "Failed"
    assert s3.head(artifact_states(status, tmp_path / "gc-f")[0]["s3"]["key"]) is None
    status = outputs_after_gc(tmp_path / "gc-n", output)
    assert s3.head(artifact_states(status, tmp_path / "gc-n")[0]["s3"]["key"])


def test_a_failed_deletion_of_artifacts_becomes_a_condition_of_the_workflow(tmp_path: Path) -> None:
    artifact = {"name": "a", "s3": {"key": "k"}, "artifactGC": {"strategy": "OnWorkflowCompletion"}}
    status: dict[str, Any] = {"nodes": {"w": {"type": "Pod", "outputs": {"artifacts": [artifact]}}}}
    secret = {"name": "none", "key": "k"}
    artifact["s3"]["bucket"] = "b"
    artifact["s3"]["endpoint"] = "127.0.0.1:1"
    artifact["s3"]["accessKeySecret"] = secret
    assert artifacts.collect_garbage(status, {}, LocalCluster(tmp_path).store) == []
    assert [condition["type"] for condition in status["conditions"]] == ["ArtifactGCError"]
    assert "deleted" not in artifact


def test_an_unknown_gc_strategy_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"spec\.artifactGC\.strategy is 'Always'.*OnWorkflowCompletion"
    ):
        outputs_after_gc(tmp_path, artifactGC={"strategy": "Always"})


def test_a_directory_removed_by_two_threads_no_longer_exists(tmp_path: Path) -> None:
    for number in range(2000):
        (tmp_path / "root" / f"{number}").mkdir(parents=True)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(artifacts.remove_directory, [tmp_path / "root"] * 4))
    assert not (tmp_path / "root").exists()


@pytest.mark.parametrize(
    ("spec", "location", "saved"),
    [
        ({"archiveLogs": True}, {}, True),
        ({"archiveLogs": True}, {"archiveLogs": False}, False),
        ({}, {"archiveLogs": True}, True),
        ({}, {}, False),
    ],
)
def test_logs_are_saved_as_artifacts_on_request(
    s3: Store, tmp_path: Path, spec: dict[str, Any], location: dict[str, Any], saved: bool
) -> None:
    home = tmp_path / f"logs-{saved}{len(spec)}".lower()
    template = {"archiveLocation": location} if location else {}
    status = outputs_after_gc(
        home, script="echo hi; echo oops >&2; exit 3", template=template, **spec
    )
    assert status["message"] == "main: Error (exit code 3)"
    key = f"{home.name}/{home.name}/main.log"
    logs = status["nodes"][home.name]["outputs"].get("artifacts", [])
    assert logs == ([{"name": "main-logs", "s3": {"key": key}}] if saved else [])
    if saved:
        assert s3.get(key) == b"hi\noops\n"


def test_an_artifact_is_stored_at_the_archive_location(s3: Store, tmp_path: Path) -> None:
    (tmp_path / "a").write_text("1")
    asked: list[dict[str, Any]] = []

    location = {"endpoint": "x:1", "bucket": "b", "key": "base"}
    for artifact, expected in (
        ({"archive": {"none": {}}}, {**location, "key": "base/a"}),
        ({"s3": {"key": "own"}}, {**location, "key": "own"}),
        (
            {"s3": {"key": "own", "bucket": "c", "endpoint": "y"}},
            {"key": "own", "bucket": "c", "endpoint": "y"},
        ),
    ):
        store = lambda where: asked.append(where) or s3  # noqa: E731
        output = {"name": "a", "path": "/tmp/a", **artifact}
        saved = artifacts.save_artifact(
            output, tmp_path / "a", tmp_path / "a", tmp_path, "pod", "w", store, location
        )
        assert saved
        assert saved["s3"] == expected
        assert asked.pop() == expected


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (
            {"container": {}, "outputs": {"artifacts": [{"name": "a"}]}},
            r"t\.outputs\.artifacts\[0\]\.path is missing",
        ),
        (
            {"data": {}, "inputs": {"artifacts": [{"name": "a"}]}},
            r"t\.inputs\.artifacts\[0\]\.path is missing",
        ),
        (
            {"dag": {}, "inputs": {"artifacts": [{"name": "a", "path": "/x"}]}},
            "only pods have files",
        ),
        (
            {
                "container": {"volumeMounts": [{"name": "v", "mountPath": "/v"}]},
                "outputs": {
                    "artifacts": [
                        {"name": "a", "path": "/v/a", "archive": {"tar": {"compressionLevel": 77}}}
                    ]
                },
            },
            r"compressionLevel is 77: it must be from -2 to 9",
        ),
    ],
)
def test_an_artifact_that_cannot_be_saved_is_rejected_before_the_run(
    template: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        artifacts.check_artifacts(template, "t")


def test_a_compression_level_that_argo_ignores_is_ignored(s3: Store, tmp_path: Path) -> None:
    (tmp_path / "x").write_text("x")
    archive = {"tar": {"compressionLevel": 77}}
    artifacts.check_artifacts(
        {
            "container": {},
            "outputs": {"artifacts": [{"name": "a", "path": "/x", "archive": archive}]},
        },
        "t",
    )
    artifacts.load(save(s3, tmp_path / "x", archive=archive), tmp_path / "y", lambda _: s3)
    assert (tmp_path / "y").read_text() == "x"
