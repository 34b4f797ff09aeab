"""Artifacts: a model or a dataset must arrive as it was, under the key that Argo would use."""

import tarfile
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from pipelines.local import artifacts
from pipelines.local.artifacts import ArtifactError
from pipelines.local.cluster import LocalCluster
from steps.errors import ConfigError
from steps.storage import Store


def sent(store: Store, path: Path, **artifact: Any) -> dict[str, Any]:
    saved = artifacts.save({"name": "a", "path": f"/tmp/{path.name}", **artifact}, path, "pod", "w", lambda _: store)
    assert saved
    return saved


def test_a_file_and_a_directory_come_back_as_they_were(s3: Store, tmp_path: Path) -> None:
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
        for source in (tree, tree / "y"):
            saved = sent(s3, source, **archive, s3={"key": f"keys/{len(str(archive))}/{source.name}"})
            target = tmp_path / f"in-{len(str(archive))}-{source.name}"
            artifacts.load(saved, target, lambda _: s3)
            if source.is_file():
                assert target.read_text() == "y"
            else:
                assert sorted(str(file.relative_to(target)) for file in target.rglob("*")) == ["deep", "deep/x", "y"]


def test_keys_are_those_of_the_default_repository(s3: Store, tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_text("m")
    assert sent(s3, tmp_path / "model.bin")["s3"]["key"] == "w/pod/a.tgz"
    assert sent(s3, tmp_path / "model.bin", archive={"none": {}})["s3"]["key"] == "w/pod/model.bin"
    assert sent(s3, tmp_path / "model.bin", archive={"zip": {}})["s3"]["key"] == "w/pod/a.zip"


def test_a_tarball_is_unpacked_unless_the_artifact_says_none(s3: Store, tmp_path: Path) -> None:
    (tmp_path / "weights").write_text("w")
    with tarfile.open(tmp_path / "model.tar.gz", "w:gz") as tar:
        tar.add(tmp_path / "weights", "weights")
    s3.upload(tmp_path / "model.tar.gz", "model.tar.gz")
    artifacts.load({"name": "a", "s3": {"key": "model.tar.gz"}}, tmp_path / "one", lambda _: s3)
    assert (tmp_path / "one").read_text() == "w"  # one entry only: it takes the artifact's name
    kept = {"name": "a", "s3": {"key": "model.tar.gz"}, "archive": {"none": {}}}
    artifacts.load(kept, tmp_path / "two", lambda _: s3)
    assert (tmp_path / "two").read_bytes() == (tmp_path / "model.tar.gz").read_bytes()


def test_what_is_missing_is_an_error_unless_it_is_optional(s3: Store, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="failed to load"):
        artifacts.load({"name": "a", "s3": {"key": "nope"}}, tmp_path / "in", lambda _: s3)
    artifacts.load({"name": "a", "s3": {"key": "nope"}, "optional": True}, tmp_path / "in", lambda _: s3)
    with pytest.raises(ArtifactError, match="no such file"):
        artifacts.save({"name": "a", "path": "/tmp/a"}, tmp_path / "a", "pod", "w", lambda _: s3)
    assert (
        artifacts.save({"name": "a", "path": "/tmp/a", "optional": True}, tmp_path / "a", "pod", "w", lambda _: s3)
        is None
    )


def test_a_tarball_cannot_write_outside_its_place(s3: Store, tmp_path: Path) -> None:
    (tmp_path / "evil").write_text("e")
    with tarfile.open(tmp_path / "evil.tgz", "w:gz") as tar:
        tar.add(tmp_path / "evil", "../escaped")
    s3.upload(tmp_path / "evil.tgz", "evil.tgz")
    with pytest.raises(ArtifactError):
        artifacts.load({"name": "a", "s3": {"key": "evil.tgz"}}, tmp_path / "deep/in", lambda _: s3)
    assert not (tmp_path / "escaped").exists()


def test_raw_data_needs_no_store(tmp_path: Path) -> None:
    artifacts.load({"name": "a", "raw": {"data": "hello"}, "mode": 0o400}, tmp_path / "in", lambda: None)
    assert ((tmp_path / "in").read_text(), (tmp_path / "in").stat().st_mode & 0o777) == ("hello", 0o400)


def test_an_artifact_of_a_web_address_arrives_and_a_missing_one_is_said(tmp_path: Path) -> None:
    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = self.path == "/x" and self.headers["Token"] == "t"
            self.send_response(200 if found else 404)
            self.end_headers()
            self.wfile.write(b"hello" if found else b"")

    server = HTTPServer(("127.0.0.1", 0), Page)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    http = {"url": f"http://127.0.0.1:{server.server_port}/x", "headers": [{"name": "Token", "value": "t"}]}
    artifacts.load({"name": "a", "http": http}, tmp_path / "in", lambda _: None)
    assert (tmp_path / "in").read_text() == "hello"
    with pytest.raises(ArtifactError, match="404"):
        artifacts.load({"name": "a", "http": {"url": http["url"]}}, tmp_path / "no", lambda _: None)
    server.shutdown()


def test_an_artifact_may_name_its_own_bucket_and_the_secrets_to_it(tmp_path: Path) -> None:
    cluster = LocalCluster(tmp_path)
    key = {"name": "mine", "key": "access"}
    s3 = {"bucket": "other", "endpoint": "s3.example:9000", "insecure": True, "accessKeySecret": key, "key": "k"}
    with pytest.raises(ConfigError, match="no Secret 'mine'"):
        cluster.store(s3)
    cluster.keep([{"kind": "Secret", "metadata": {"name": "mine"}, "stringData": {"access": "me"}}])
    store = cluster.store(s3)
    assert (store.bucket, store.endpoint) == ("other", "http://s3.example:9000")
