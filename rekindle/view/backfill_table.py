"""The runs of `rekindle backfill` as a table."""

from typing import Any

from argolocal.view import runs


def format_backfill_table(backfill_rows: list[dict[str, Any]]) -> str:
    """Return the table of a backfill's runs, with one column for each metric of any run."""
    metric_names = list(
        dict.fromkeys(name for backfill_row in backfill_rows for name in backfill_row["metrics"])
    )

    def make_cells(backfill_row: dict[str, Any]) -> dict[str, str]:
        metric_values = {name: backfill_row["metrics"].get(name) for name in metric_names}
        metric_texts = {
            name: "" if metric_value is None else f"{metric_value:.4g}"
            for name, metric_value in metric_values.items()
        }
        cell_texts = {
            "scheduled": backfill_row["scheduled"],
            "phase": backfill_row["phase"],
            "gate": backfill_row["gate"] or "",
        }
        return cell_texts | metric_texts | {"weights": (backfill_row["model_sha256"] or "")[:12]}

    return runs.format_table([make_cells(backfill_row) for backfill_row in backfill_rows])
