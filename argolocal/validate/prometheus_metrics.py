"""Check that the Prometheus metrics of a template have the names, help texts and values that Argo
requires.

Source: workflow/metrics/util.go.
"""

import re

from argolocal.manifest.types import Data
from argolocal.validate.findings import Findings

METRIC_NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
METRIC_KINDS = ("gauge", "counter", "histogram")


def check_metrics(findings: Findings, path: str, metrics: Data) -> None:
    """Check the field `metrics` of a template."""
    for index, metric in enumerate(metrics.get("prometheus") or []):
        metric_path = f"{path}.prometheus[{metric.get('name', index)}]"
        for metric_or_label_name in [
            metric.get("name", ""),
            *(label.get("key", "") for label in metric.get("labels") or []),
        ]:
            if "{{" not in str(metric_or_label_name) and not METRIC_NAME.fullmatch(
                str(metric_or_label_name)
            ):
                findings.add(
                    metric_path,
                    "metric",
                    f'"{metric_or_label_name}" must be letters, digits and _, and not begin with a'
                    " digit.",
                )

        if not metric.get("help"):
            findings.add(
                f"{metric_path}.help", "metric", "the help text is missing: describe the metric."
            )

        for metric_kind in METRIC_KINDS:
            if metric_kind in metric and not metric[metric_kind].get("value"):
                findings.add(
                    f"{metric_path}.{metric_kind}.value",
                    "metric",
                    "the value is missing: give a value.",
                )
