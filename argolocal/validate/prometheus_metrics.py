"""Check that the Prometheus metrics of a template have the names, help texts and values that Argo
requires.

Source: workflow/metrics/util.go.
"""

import re

from argolocal.manifest.types import Data
from argolocal.validate.findings import Findings

NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
KINDS = ("gauge", "counter", "histogram")


def check(findings: Findings, path: str, metrics: Data) -> None:
    for number, metric in enumerate(metrics.get("prometheus") or []):
        where = f"{path}.prometheus[{metric.get('name', number)}]"
        for name in [
            metric.get("name", ""),
            *(label.get("key", "") for label in metric.get("labels") or []),
        ]:
            if "{{" not in str(name) and not NAME.fullmatch(str(name)):
                findings.add(
                    where,
                    "metric",
                    f'"{name}" must be letters, digits and _, and not begin with a digit.',
                )

        if not metric.get("help"):
            findings.add(
                f"{where}.help", "metric", "the help text is missing: describe the metric."
            )

        for kind in KINDS:
            if kind in metric and not metric[kind].get("value"):
                findings.add(
                    f"{where}.{kind}.value", "metric", "the value is missing: give a value."
                )
