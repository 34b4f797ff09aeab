"""Tests of the HTTPRoute or Ingress of `serve.host`, and the token of the servers, in rendered
pipelines."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from argolocal.validate import lint
from rekindle.blocks.manifest.config import load_config
from rekindle.blocks.manifest.render import render_manifest
from rekindle.errors import ConfigError
from tests.schema import find_errors, schema_of

GOLDEN = Path(__file__).parents[3] / "golden/config.yaml"
HOST = "serve.host=models.example.com"


def render_templates(*sets: str) -> dict[str, dict[str, Any]]:
    manifest = render_manifest(load_config(GOLDEN, sets=sets, environment={}).config)
    assert lint(manifest) == []
    return {template["name"]: template for template in manifest["spec"]["templates"]}


def read_applied(template: dict[str, Any]) -> dict[str, Any]:
    manifest = json.loads(re.sub(r"\{\{.*?\}\}", "1", template["resource"]["manifest"]))
    assert list(find_errors(manifest, schema_of(manifest))) == []
    return manifest


def test_an_ingress_sends_the_requests_of_a_host_to_the_service_with_tls_and_an_authentication_proxy() -> (
    None
):
    proxy = {"nginx.ingress.kubernetes.io/auth-url": "https://login.example.com/oauth2/auth"}
    rendered = render_templates(
        HOST,
        "serve.ingress_class=nginx",
        "serve.tls_secret=models-tls",
        f"serve.annotations={json.dumps(proxy)}",
    )

    ingress = read_applied(rendered["route"])

    assert ingress["kind"] == "Ingress"
    assert ingress["metadata"]["name"] == "cards"
    assert ingress["metadata"]["annotations"] == proxy

    assert ingress["spec"]["ingressClassName"] == "nginx"
    assert ingress["spec"]["tls"] == [{"hosts": ["models.example.com"], "secretName": "models-tls"}]
    (rule,) = ingress["spec"]["rules"]
    assert rule["host"] == "models.example.com"
    backend = {"service": {"name": "cards", "port": {"number": 9000}}}

    assert [
        (path["path"], path["pathType"], path["backend"]) for path in rule["http"]["paths"]
    ] == [
        ("/v1/models/cards:predict", "ImplementationSpecific", backend),
        ("/v1/models/cards", "Prefix", backend),
    ]


def test_an_http_route_sends_the_requests_of_a_host_from_a_gateway_to_the_service() -> None:
    route = read_applied(render_templates(HOST, "serve.gateway=infra/edge")["route"])
    assert route["kind"] == "HTTPRoute"
    assert route["metadata"]["name"] == "cards"
    assert route["spec"]["hostnames"] == ["models.example.com"]
    assert route["spec"]["parentRefs"] == [{"name": "edge", "namespace": "infra"}]
    (rule,) = route["spec"]["rules"]
    assert rule["backendRefs"] == [{"name": "cards", "port": 9000}]
    assert [match["path"] for match in rule["matches"]] == [
        {"type": "Exact", "value": "/v1/models/cards:predict"},
        {"type": "PathPrefix", "value": "/v1/models/cards"},
    ]


@pytest.mark.slow
def test_the_route_is_applied_only_if_the_new_servers_are_those_of_the_champion() -> None:
    tasks = {task["name"]: task for task in render_templates(HOST)["switch"]["dag"]["tasks"]}
    assert tasks["route"]["depends"] == "service"
    assert tasks["route"]["when"] == tasks["service"]["when"]
    assert "route" not in render_templates()


@pytest.mark.slow
def test_a_canary_splits_the_requests_of_the_host_in_the_same_http_route() -> None:
    rendered = render_templates(HOST, "serve.gateway=edge", "serve.canary={gateway: edge}")
    assert "route" not in rendered
    for name in ("share", "unshare"):
        route = read_applied(rendered[name])
        assert route["metadata"]["name"] == "cards"
        assert route["spec"]["hostnames"] == ["models.example.com"]
    by_pods = render_templates(HOST, "serve.gateway=edge", "serve.canary={steps: [50, 100]}")
    assert read_applied(by_pods["route"])["kind"] == "HTTPRoute"


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (
            ["serve.host=https://models.example.com"],
            "has the wrong form for: DNS name of the model",
        ),
        (["serve.host=models.example.com:443"], "has the wrong form for: DNS name of the model"),
        (["serve.host=Models.example.com"], "has the wrong form for: DNS name of the model"),
        (["serve.host='*.example.com'"], "has the wrong form for: DNS name of the model"),
        (["serve.host=10.0.0.1"], "Kubernetes accepts a DNS name, but no IP address"),
        ([HOST, "serve.gateway=a/b/c"], "has the wrong form for: Gateway of the HTTPRoute"),
        ([HOST, "serve.tls_secret=My_TLS"], "has the wrong form for: name of the Secret"),
        (["serve.gateway=edge"], "gateway has no effect without host: set serve.host"),
        (["serve.tls_secret=tls"], "tls_secret has no effect without host"),
        (["serve.annotations={a: b}"], "annotations has no effect without host"),
        (
            [HOST, "serve.gateway=edge", "serve.tls_secret=tls"],
            "tls_secret belongs to an Ingress, but gateway is set",
        ),
        (
            [HOST, "serve.gateway=edge", "serve.ingress_class=x"],
            "ingress_class belongs to an Ingress",
        ),
        (
            [HOST, "serve.canary={gateway: edge}"],
            'gateway is "": it must be "edge" like canary.gateway',
        ),
    ],
)
def test_wrong_settings_of_a_route_are_rejected(sets: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_config(GOLDEN, sets=sets, environment={})


@pytest.mark.slow
def test_a_changed_route_is_deployed_also_with_the_same_weights() -> None:
    def servers(*sets: str) -> str:
        evaluate = next(
            t for t in render_templates(*sets)["decide"]["dag"]["tasks"] if t["name"] == "evaluate"
        )
        return next(
            p["value"] for p in evaluate["arguments"]["parameters"] if p["name"] == "servers"
        )

    assert (
        len(
            {
                servers(),
                servers(HOST),
                servers(HOST, "serve.gateway=edge"),
                servers("serve.token=true"),
            }
        )
        == 4
    )


def test_the_token_in_the_environment_does_not_set_a_key_of_the_config() -> None:
    environment = {"REKINDLE_TOKEN": "own-value", "REKINDLE_SERVE__TOKEN": "true"}
    config = load_config(GOLDEN, environment=environment).config
    assert config.serve.token
    assert "own-value" not in config.model_dump_json()


def test_servers_and_verify_get_the_tokens_from_the_secret() -> None:
    reference = {"secretKeyRef": {"name": "rekindle-token", "key": "REKINDLE_TOKEN"}}
    rendered = render_templates("serve.token=true")
    (container,) = read_applied(rendered["deployment"])["spec"]["template"]["spec"]["containers"]
    for env in (container["env"], rendered["verify"]["container"]["env"]):
        assert {"name": "REKINDLE_TOKEN", "valueFrom": reference} in env
    assert {variable["name"] for variable in container["env"]} == {"POD_IP", "REKINDLE_TOKEN"}
    assert "REKINDLE_TOKEN" not in json.dumps(render_templates())
