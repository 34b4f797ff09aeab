"""Computes the costs of a sweep's trials from their ledgers."""

from collections import Counter
from collections.abc import Iterable

from rekindle.keys import LEDGER
from rekindle.training.cost.bill import Bill, compute_bill
from rekindle.training.cost.tariff import Tariff
from rekindle.training.ledger.accounting import summarize
from rekindle.training.ledger.events import read_events
from rekindle.training.sweep.study import Study


def compute_trial_bills(study: Study, trial_tariff: Tariff) -> dict[int, Bill]:
    """Compute the cost of each trial; call `study.read()` before. Raises StorageError."""
    ledger_name = LEDGER.rpartition("/")[2]
    ledger_by_trial = {
        trial.number: f"{study.checkpoint_prefix(trial.number)}/{ledger_name}"
        for trial in study.trials()
    }
    return {
        trial_number: compute_bill(summarize(read_events(study.store, ledger_prefix)), trial_tariff)
        for trial_number, ledger_prefix in ledger_by_trial.items()
    }


def sum_amounts(bills: Iterable[Bill]) -> dict[str, float]:
    """Sum the amounts of several bills by name."""
    amount_by_name: Counter[str] = Counter()
    for bill in bills:
        amount_by_name.update(bill.amounts())
    return dict(amount_by_name)
