"""The metrics that a template counts: Argo refuses one that Prometheus would not take.

Source: workflow/metrics/util.go.
"""

import re

from rekindle.argo.manifest.scopes import Data
from rekindle.argo.validate.findings import Findings

NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
KINDS = ("gauge", "counter", "histogram")


def check(found: Findings, path: str, metrics: Data) -> None:
    for number, each in enumerate(metrics.get("prometheus") or []):
        where = f"{path}.prometheus[{each.get('name', number)}]"
        for name in [each.get("name", ""), *(label.get("key", "") for label in each.get("labels") or [])]:
            if "{{" not in str(name) and not NAME.fullmatch(str(name)):
                found.add(where, "metric", f'"{name}" must be letters, digits and _, beginning with no digit.')
        if not each.get("help"):
            found.add(f"{where}.help", "metric", "it is missing: say what is counted.")
        for kind in KINDS:
            if kind in each and not each[kind].get("value"):
                found.add(f"{where}.{kind}.value", "metric", "it is missing: give one.")
