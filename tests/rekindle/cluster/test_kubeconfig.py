"""Errors of a broken kubeconfig name the file and a remedy, and never show a password."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from rekindle.cluster.errors import ApiError
from rekindle.cluster.kubernetes_api import PODS, Cluster
from rekindle.errors import ConfigError
from tests.rekindle.cluster.server import ApiServer

EXEC = {
    "apiVersion": "client.authentication.k8s.io/v1",
    "interactiveMode": "Never",
    "command": "no-such-plugin",
}
FAILING_EXEC = EXEC | {"command": "sh", "args": ["-c", "echo log in first >&2; exit 1"]}


def make_kubeconfig(user: Any, server: Any = "https://127.0.0.1:9") -> str:
    return json.dumps(
        {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "here",
            "clusters": [{"name": "c", "cluster": {"server": server}}],
            "users": [{"name": "ann", "user": user}],
            "contexts": [{"name": "here", "context": {"cluster": "c", "user": "ann"}}],
        }
    )


@pytest.mark.parametrize(
    "text, words",
    [
        ("users: [{token: hunter2", "is not YAML: .* expected .*line"),
        ("just text", "must have clusters, users and contexts"),
        ("", "is empty"),
        (b"\xff\xfe\x00", "must be text"),
        ("users: {a: b}", "users must be a list of entries with a name"),
        (make_kubeconfig("hunter2"), "the user of ann must have fields"),
        (
            make_kubeconfig({"client-certificate-data": "hunter2!!"}),
            "client-certificate-data of ann must be base64",
        ),
        (make_kubeconfig({"client-certificate": "/nowhere/a.crt"}), "/nowhere/a.crt"),
        (make_kubeconfig({"tokenFile": "/nowhere/token"}), "/nowhere/token: No such file"),
        (make_kubeconfig({"token": "hunter2\nx"}), "the token of context here must be one line"),
        (make_kubeconfig({"token": "hunter2\u0142"}), "the token of context here must be one line"),
        (make_kubeconfig({"exec": EXEC}), "plugin of context here failed .*no-such-plugin"),
        (make_kubeconfig({"exec": FAILING_EXEC}), "plugin of context here failed .*log in first"),
        (make_kubeconfig({}, ""), "the server of context here must be https://"),
    ],
)
def test_an_invalid_kubeconfig_is_one_error_that_names_the_file(
    text: str | bytes,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    file = tmp_path / "mine"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    monkeypatch.setenv("KUBECONFIG", str(file))
    handlers = list(logging.getLogger().handlers)
    with pytest.raises(ConfigError, match=words) as error:
        Cluster.connect()
    assert f"the kubeconfig {file} cannot be used" in str(error.value)
    assert "get-credentials" in str(error.value)
    assert "hunter2" not in str(error.value)
    assert logging.getLogger().handlers == handlers, "no handler is left behind"


def test_the_broken_file_of_several_kubeconfigs_is_named(
    server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "broken").write_text("a: [b")
    monkeypatch.setenv(
        "KUBECONFIG", f"{server.kubeconfig}:{tmp_path / 'broken'}:{tmp_path / 'none'}"
    )
    with pytest.raises(ConfigError, match=f"kubeconfig {tmp_path / 'broken'} cannot be used"):
        Cluster.connect()


def test_a_token_file_may_end_with_a_line_break(server: ApiServer, tmp_path: Path):
    (tmp_path / "token").write_text("sesame\n")
    url = f"http://127.0.0.1:{server.port}"
    server.kubeconfig.write_text(make_kubeconfig({"tokenFile": str(tmp_path / "token")}, url))
    server.put("/api/v1/namespaces/models/pods", {"metadata": {"name": "a"}})
    Cluster.connect(namespace="models").get(PODS, "a")
    assert server.tokens == {"Bearer sesame"}


def test_a_password_in_the_server_address_is_never_printed(server: ApiServer):
    server.kubeconfig.write_text(make_kubeconfig({}, "http://ann:hunter2@127.0.0.1:9"))
    cluster = Cluster.connect()
    cluster.client.configuration.retries = 0
    with pytest.raises(ApiError, match=r"http://127.0.0.1:9 does not answer") as error:
        cluster.get(PODS, "a")
    assert "hunter2" not in str(error.value)
