"""What Argo would refuse, or worse, accept: checks of a manifest as plain data, before anything runs.

    rekindle lint configs/demo.yaml
    rekindle lint --manifest workflow.yaml -o json

Hera compiles an unknown entrypoint, a misspelt argument or a tag that nothing fills without a word, and some of
these Argo runs as well. Needs no cluster, no network and no Hera. The rules: workflow.py (a workflow and its
templates), graph.py (who waits for whom), tags.py, objects.py (what resource templates apply), pods.py.
"""

from collections.abc import Mapping
from typing import Any

from pipelines import scopes
from pipelines.lint import objects
from pipelines.lint.findings import Finding, Findings
from pipelines.lint.workflow import WorkflowRules
from steps.errors import ConfigError

__all__ = ["Finding", "check", "lint"]


def check(manifest: Mapping[str, Any], file: str = "") -> list[Finding]:
    """What is found and not fatal. Raises ConfigError with all that is, one line each."""
    found = lint(manifest, file)
    if wrong := [str(finding) for finding in found if finding.fatal]:
        raise ConfigError("\n".join(["the manifest cannot run:", *wrong]))
    return found


def lint(manifest: Mapping[str, Any], file: str = "") -> list[Finding]:
    """All findings of a Workflow, WorkflowTemplate, CronWorkflow, or of an object such as a training job."""
    found = Findings(file)
    other = "argoproj.io/" not in str(manifest.get("apiVersion", "argoproj.io/"))
    if other or manifest.get("kind") in ("WorkflowEventBinding", "EventBus", "EventSource", "Sensor"):
        objects.check(found, "", scopes.present(manifest))
    elif wrong := list(scopes.misshapen(manifest)):
        for each in wrong:
            found.add(each.split()[0], "shape", each.partition(" ")[2] + ".")
    else:
        WorkflowRules(scopes.present(manifest), found).run()
    return found.all()
