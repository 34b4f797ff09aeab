"""Computes the costs of a sweep's trials from their ledgers."""

from collections import Counter
from collections.abc import Iterable

from rekindle.keys import LEDGER
from rekindle.training.cost.bill import Bill, compute_bill
from rekindle.training.cost.tariff import Tariff
from rekindle.training.ledger.accounting import summarize
from rekindle.training.ledger.events import read_events
from rekindle.training.sweep.study import Study


def compute_trial_bills(study: Study, tariff: Tariff) -> dict[int, Bill]:
    """Compute the cost of each trial; call `study.read()` before. Raises StorageError."""
    name = LEDGER.rpartition("/")[2]
    ledgers = {
        trial.number: f"{study.checkpoint_prefix(trial.number)}/{name}" for trial in study.trials()
    }
    return {
        number: compute_bill(summarize(read_events(study.store, ledger)), tariff)
        for number, ledger in ledgers.items()
    }


def sum_amounts(bills: Iterable[Bill]) -> dict[str, float]:
    """Sum the amounts of several bills by name."""
    amounts: Counter[str] = Counter()
    for bill in bills:
        amounts.update(bill.amounts())
    return dict(amounts)
