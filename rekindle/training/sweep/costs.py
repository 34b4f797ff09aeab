"""Computes the costs of a sweep's trials from their ledgers."""

from collections import Counter
from collections.abc import Iterable

from rekindle.keys import LEDGER_KEY
from rekindle.training.cost.bill import Bill, compute_bill
from rekindle.training.cost.tariff import TrainingTariff
from rekindle.training.ledger.accounting import summarize_events
from rekindle.training.ledger.events import read_events
from rekindle.training.sweep.study import SweepStudy


def compute_trial_bills(study: SweepStudy, trial_tariff: TrainingTariff) -> dict[int, Bill]:
    """Compute the cost of each trial; `study.read()` must be called before. Raises StorageError."""
    ledger_name = LEDGER_KEY.rpartition("/")[2]
    ledger_by_trial = {
        trial.number: f"{study.make_checkpoint_prefix(trial.number)}/{ledger_name}"
        for trial in study.trials()
    }
    return {
        trial_number: compute_bill(
            summarize_events(read_events(study.store, ledger_prefix)), trial_tariff
        )
        for trial_number, ledger_prefix in ledger_by_trial.items()
    }


def sum_amounts(bills: Iterable[Bill]) -> dict[str, float]:
    """Sum the amounts of several bills by name."""
    amount_by_name: Counter[str] = Counter()
    for bill in bills:
        amount_by_name.update(bill.amounts())
    return dict(amount_by_name)
