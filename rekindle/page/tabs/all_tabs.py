"""Adds the tabs that only runs of a training have, such as its curves and costs."""

from argolocal.page.sources import RunSource
from argolocal.page.tab import Tab
from rekindle.page.tabs.canary import CanaryTab
from rekindle.page.tabs.changes import ChangesTab
from rekindle.page.tabs.cost import CostTab
from rekindle.page.tabs.curve_points import CurveReader
from rekindle.page.tabs.curves import CurvesTab
from rekindle.page.tabs.records import Records
from rekindle.page.tabs.siblings import Siblings
from rekindle.page.tabs.training import TrainingTab
from rekindle.page.tabs.trials import TrialsTab
from rekindle.page.tabs.verdict import VerdictTab
from rekindle.page.tabs.weeks import WeeksTab


def make_training_tabs(source: RunSource, records: Records, curves: CurveReader) -> list[Tab]:
    """Return the tabs of a training's run, in their order on the page."""
    siblings = Siblings(source, records)
    return [
        TrainingTab(records),
        CurvesTab(records, curves, siblings),
        TrialsTab(records),
        VerdictTab(records),
        CanaryTab(records, curves),
        ChangesTab(records, siblings),
        WeeksTab(source, records),
        CostTab(records),
    ]
