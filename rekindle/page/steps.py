"""Adds the verdicts to the overview of a run, and finds its internal steps, which are steps that
blocks have added."""

from argolocal.page.sources import Run
from argolocal.page.tabs.graph_fold import IsInternal
from argolocal.page.tabs.graph_plan import Plan, PlannedStep
from rekindle.operations import results
from rekindle.page.tabs.verdict import choose_headline
from rekindle.view.plumbing import DONE_PHASES, NOT_RUN_PHASES, InternalSteps


def describe_verdicts(run: Run) -> list[str]:
    """Return a sentence for the verdict of each evaluation of a run, with its reason."""
    sentences: list[str] = []
    rows = results.list_verdicts(run.status)
    for row in rows:
        if row.get("verdict"):
            task = f"{row['task']}: " if len(rows) > 1 else ""
            headline = choose_headline(row["verdict"], run)
            sentences.append(f"{task}{headline}. {row.get('reason') or ''}".strip())
    return sentences


def find_internal(plan: Plan) -> IsInternal:
    """Return a function that tells whether a step is internal, that is, added by a block. Running
    and failed steps are never internal."""
    internal_steps = InternalSteps(plan.run.manifest, plan.run.status)

    def is_internal(step: PlannedStep) -> bool:
        if step.phase not in (*DONE_PHASES, "Planned"):
            return False
        is_run = step.phase not in (*NOT_RUN_PHASES, "Planned")
        task = str(step.task.get("name") or "")
        return internal_steps.is_added(task, step.template, step.parent or {}, is_run)

    return is_internal
