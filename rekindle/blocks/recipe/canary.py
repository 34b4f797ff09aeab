"""A release gets a growing part of the requests, and a step watches each part."""

from collections.abc import Mapping
from typing import Any

from hera.workflows import Resource

from rekindle.blocks.container import retries
from rekindle.blocks.recipe.inputs import after, number, text
from rekindle.blocks.recipe.servers import servers_of
from rekindle.blocks.resource import apply
from rekindle.blocks.serving import canary as canaries
from rekindle.blocks.serving import deployment as serving
from rekindle.blocks.wiring import Block, handed
from rekindle.blocks.workflow import Pipeline, at_exit, step


def canary(made: Pipeline, model: str, serve: Any, server: str, verified: Block) -> tuple[Block, list[str]]:
    """Give the candidate one share of the requests after the other, and watch each; gives the last watch, and all."""
    rule, former = serve.canary, verified.outputs.former
    taken = {name: handed(verified, name) for name in ("version", "champion", "run_id")}
    tasks: list[str] = []
    last, ours = verified, {"name": model, "server": server, "former": former, "rule": rule} | taken
    may = former != ""
    for percent in [100] if rule.shadow else rule.steps[:-1]:
        if rule.gateway:
            values = {"percent": percent, "rest": 100 - percent}
        else:
            values = {"model_uri": handed(verified, "model_uri"), "version": taken["version"], "former": former}
            values["replicas"] = canaries.replicas(percent, serve)
        name = made.name("", f"share-{percent}")
        made.add(name, _share(made, model, serve), {"server": server} | values, {"when": may}, [last.name])
        watch = step(
            "steps.canary",
            task=f"{prefix(verified)}canary-{percent}",
            inputs=ours | {"percent": percent},
            after=[name],
        )
        last = after(last, watch)
        unshare(made, model, serve, server, {"when": last.outputs.canary != "passed"}, last)
        tasks += [name, last.name]
        may = (former != "") & (last.outputs.canary == "passed")
        ours |= {"before": last.outputs.canary}
    with at_exit():  # when it was stopped on the way
        unshare(made, model, serve, "", {"when": "{{workflow.status}} != Succeeded"}, None)
    return last, tasks


def prefix(verified: Block) -> str:
    """What the tasks of a canary begin with, where there are several."""
    return "" if verified.name == "verify" else f"{verified.name}-"


def _share(made: Pipeline, model: str, serve: Any) -> Resource:
    """The template that gives a candidate its part of the requests."""
    known = ("share", model)
    if known not in made.templates:
        rule = serve.canary
        if rule.gateway:
            inputs = ("server", "percent", "rest")
            manifest = canaries.route(model, serve, rule, text("server"), number("percent"), number("rest"))
            more: dict[str, Any] = {}
        else:
            inputs = ("model_uri", "server", "version", "former", "replicas")
            servers = servers_of(model, made.config.cluster, serve)
            manifest = canaries.canary(servers, model, text("server"), text("former"), number("replicas"))
            more = {"success": serving.SUCCESS, "failure": serving.FAILURE}
        made.templates[known] = apply(made.template_name("share"), manifest, inputs=inputs, retry=retries(2), **more)
    return made.templates[known]


def unshare(
    made: Pipeline, model: str, serve: Any, server: str, options: Mapping[str, Any], after: Block | None
) -> None:
    """Take its part of the requests from a candidate; one without a name is any of this workflow's."""
    name, needed = made.name("", "unshare"), [after.name] if after else []
    if serve.canary.gateway:
        known = ("unshare", model)
        if known not in made.templates:
            manifest = canaries.route(model, serve, serve.canary)
            made.templates[known] = apply(made.template_name("unshare"), manifest, retry=retries(2))
        made.add(name, made.templates[known], {}, options, needed)
        return
    objects = f"{server}-canary" if server else f"-l={canaries.WORKFLOW}={{{{workflow.name}}}}"
    made.add(name, made.cleaner(), {"kind": "deployment", "object": objects}, options, needed)
