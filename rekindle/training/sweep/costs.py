"""The costs of the trials of a sweep, from their ledgers."""

from collections import Counter
from collections.abc import Iterable

from rekindle.keys import LEDGER
from rekindle.training.cost.bill import Bill, charge
from rekindle.training.cost.tariff import Tariff
from rekindle.training.ledger.accounting import summarize
from rekindle.training.ledger.events import read
from rekindle.training.sweep.study import Study


def trial_bills(study: Study, tariff: Tariff) -> dict[int, Bill]:
    """Return the cost of each trial of a study that was read. Raises StorageError."""
    name = LEDGER.rpartition("/")[2]
    ledgers = {
        trial.number: f"{study.checkpoints(trial.number)}/{name}" for trial in study.trials()
    }
    return {
        number: charge(summarize(read(study.store, ledger)), tariff)
        for number, ledger in ledgers.items()
    }


def total_amounts(bills: Iterable[Bill]) -> dict[str, float]:
    """Return the sums of all amounts by name."""
    amounts: Counter[str] = Counter()
    for bill in bills:
        amounts.update(bill.amounts())
    return dict(amounts)
