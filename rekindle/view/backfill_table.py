"""The runs of `rekindle backfill` as a table."""

from typing import Any

from argolocal.view import runs


def table(rows: list[dict[str, Any]]) -> str:
    names = list(dict.fromkeys(name for row in rows for name in row["metrics"]))

    def cells(row: dict[str, Any]) -> dict[str, str]:
        metrics = {name: row["metrics"].get(name) for name in names}
        figures = {name: "" if value is None else f"{value:.4g}" for name, value in metrics.items()}
        result = {"scheduled": row["scheduled"], "phase": row["phase"], "gate": row["gate"] or ""}
        return result | figures | {"weights": (row["model_sha256"] or "")[:12]}

    return runs.format_table([cells(row) for row in rows])
