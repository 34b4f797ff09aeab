"""Families are several models that a workload defines for the same data. All families are trained,
and validation chooses one of them.

    families = {"network": network, "trees": Fitted(trees, fit_trees)}

A family is a function `(section, facts)` that returns a torch.nn.Module, which is trained step by
step, or a `Fitted` model, which is trained by one call of `fit`. `section` is the config section
`model`, and `facts` are the facts of the dataset.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

from rekindle.errors import ConfigError, did_you_mean
from rekindle.gate import Metric
from rekindle.project.template import NAME

LOSS = Metric("loss", better="lower")


@dataclass(frozen=True)
class Fitted:
    """A model without training steps, such as boosted trees.

    `model(section, facts)` returns a torch.nn.Module for the config section `model` and the facts
    of the dataset. `fit(model, samples)` sets its parameters and buffers; `samples` is a Dataset of
    the training samples. `fit` runs in one process and is repeated after an interruption, so its
    result must be the same each time.
    """

    model: Callable[[Any, dict[str, Any]], Any]
    fit: Callable[[Any, Any], None]


def has_model(workload: Any) -> bool:
    """Return True if the workload defines `model` or `families`. A workload for a training program
    defines only `load`, which loads the result."""
    return hasattr(workload, "model") or hasattr(workload, "families")


def get_families(workload: Any) -> dict[str, Any]:
    """Return the families of a workload by name. A workload with `model` has one family with the
    name ""; a workload with only `load` has none."""
    if hasattr(workload, "families"):
        return workload.families
    if hasattr(workload, "model"):
        return {"": workload.model}
    return {}


def select(workload: Any, names: Collection[str]) -> list[str]:
    """Return the names of the families to train: `names` or, if it is empty, all families.

    Raises ConfigError for an unknown name, a name that occurs twice, or a workload with only
    `load`.
    """
    family_by_name = get_families(workload)
    if not family_by_name:
        raise ConfigError(
            f"the workload {workload.__name__} has only `load`, so a program must train its model:"
            " add the section `program` to the config, or define model, dataset and loss in the"
            " workload."
        )

    repeated = [name for name, count in Counter(names).items() if count > 1]
    if repeated:
        raise ConfigError(f'families contains "{repeated[0]}" twice: each family is trained once.')

    for name in names:
        if name not in family_by_name:
            if any(family_by_name):
                family_names = ", ".join(family_by_name)
            else:
                family_names = "none, since it defines `model`"

            raise ConfigError(
                f"the workload {workload.__name__} has no family"
                f' "{name}".{did_you_mean(name, set(family_by_name))} Its families: {family_names}.'
            )

    return list(names) or list(family_by_name)


def build(workload: Any, name: str, section: object, facts: dict[str, Any]) -> Any:
    """Return a new model of the family `name`. Raises ConfigError if this family does not exist."""
    [name] = select(workload, [name])
    family = get_families(workload)[name]
    return (family.model if isinstance(family, Fitted) else family)(section, facts)


def iterate_functions(workload: Any) -> Iterator[tuple[str, Callable[..., Any], tuple[str, ...]]]:
    """Yield (label, function, names of its parameters) for each function that defines a family."""
    for name, family in get_families(workload).items():
        label = f'families["{name}"]' if name else "model"
        yield label, family.model if isinstance(family, Fitted) else family, ("section", "facts")
        if isinstance(family, Fitted):
            yield f"{label}.fit", family.fit, ("model", "samples")


def get_selection_metric(workload: Any) -> Metric:
    """Return the validation metric by which families are compared: `chosen_by` of the workload or,
    by default, the loss."""
    return getattr(workload, "chosen_by", LOSS)


def check_validation(selected: Collection[str], validation: float | str) -> None:
    """Raise ConfigError if several families are to be trained, but no samples are held out for
    validation."""
    if len(selected) > 1 and not validation:
        raise ConfigError(
            f"the workload offers the families {', '.join(selected)}, and validation chooses"
            " between them: set train.validation, such as 0.1, or train one of them with families:"
            f" [{min(selected)}]."
        )


def check(name: str, workload: Any) -> None:
    """Raise ConfigError unless the workload `name`, which has a model, defines either `model` or
    families with valid names."""
    if hasattr(workload, "model") and hasattr(workload, "families"):
        raise ConfigError(
            f'workload "{name}" defines both model and families: it must define one of them (see'
            " docs/your-own-model.md)."
        )

    family_by_name = get_families(workload)
    chosen_by = get_selection_metric(workload)

    names = list(family_by_name) if isinstance(family_by_name, dict) else []
    if not names or not all(name == "" or NAME.fullmatch(str(name)) for name in names):
        raise ConfigError(
            f'workload "{name}": families is {_describe(family_by_name)}: it must be a dict with'
            ' names of lower-case letters, digits and hyphens, such as {"network": network,'
            ' "trees": Fitted(trees, fit_trees)}.'
        )

    for key, family in family_by_name.items():
        if key and not isinstance(family, Fitted) and not callable(family):
            raise ConfigError(
                f'workload "{name}": families["{key}"] is {family!r:.100}: it must be a function'
                " (section, facts) that returns a torch.nn.Module, or a rekindle.Fitted."
            )

    if not isinstance(chosen_by, Metric):
        raise ConfigError(
            f'workload "{name}": chosen_by is {chosen_by!r:.100}: it must be a rekindle.Metric with'
            ' the name of one of its `measures`, such as Metric("accuracy").'
        )


def _describe(family_by_name: object) -> str:
    if not isinstance(family_by_name, dict) or not family_by_name:
        return f"{family_by_name!r:.100}"
    return f"a dict with the names {', '.join(map(repr, family_by_name))}"
