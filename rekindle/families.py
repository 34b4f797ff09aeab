"""Families are several models that a workload defines for the same data. A training trains a model
of each family, and validation chooses the best model.

    families = {"network": network, "trees": Fitted(trees, fit_trees)}

A family is a function `(section, facts)` that returns a torch.nn.Module, which is trained step by
step, or a `Fitted` model, which is trained by one call of `fit`. `section` is the config section
`model`, and `facts` are the facts of the dataset.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

from rekindle.errors import ConfigError, suggest_similar
from rekindle.gate import Metric
from rekindle.project.template import NAME_PATTERN

LOSS_METRIC = Metric("loss", better="lower")


@dataclass(frozen=True)
class Fitted:
    """A model without training steps, such as boosted trees.

    `model(section, facts)` returns a torch.nn.Module for the config section `model` and the facts
    of the dataset. `fit(model, samples)` sets the parameters and buffers of the model; `samples` is
    a Dataset of the training samples. `fit` runs in one process and is repeated after an
    interruption, so its result must be the same each time.
    """

    model: Callable[[Any, dict[str, Any]], Any]
    fit: Callable[[Any, Any], None]


def has_model(workload_module: Any) -> bool:
    """Return True if the workload defines `model` or `families`. A workload for a training program
    defines only `load`, which loads the result of the program."""
    return hasattr(workload_module, "model") or hasattr(workload_module, "families")


def get_families(workload_module: Any) -> dict[str, Any]:
    """Return the families of a workload by name. A workload with `model` has one family with the
    name ""; a workload with only `load` has none."""
    if hasattr(workload_module, "families"):
        return workload_module.families
    if hasattr(workload_module, "model"):
        return {"": workload_module.model}
    return {}


def select_families(workload_module: Any, requested_names: Collection[str]) -> list[str]:
    """Return the names of the families to train, which are `requested_names` or, if this is empty,
    all families.

    Raises ConfigError for an unknown name, a name that occurs twice, or a workload with only
    `load`.
    """
    family_by_name = get_families(workload_module)
    if not family_by_name:
        raise ConfigError(
            f"the workload {workload_module.__name__} has only `load`, so a program must train its"
            " model: add the section `program` to the config, or define model, dataset and loss in"
            " the workload."
        )

    repeated_names = [
        name for name, name_count in Counter(requested_names).items() if name_count > 1
    ]
    if repeated_names:
        raise ConfigError(
            f'families contains "{repeated_names[0]}" twice: each family is trained once.'
        )

    for name in requested_names:
        if name not in family_by_name:
            if any(family_by_name):
                family_names = ", ".join(family_by_name)
            else:
                family_names = "none, since it defines `model`"

            raise ConfigError(
                f"the workload {workload_module.__name__} has no family"
                f' "{name}".{suggest_similar(name, set(family_by_name))} Its families:'
                f" {family_names}."
            )

    return list(requested_names) or list(family_by_name)


def build(
    workload_module: Any, name: str, model_section: object, dataset_facts: dict[str, Any]
) -> Any:
    """Return a new model of the family `name`. Raises ConfigError if the family `name` does not
    exist."""
    [name] = select_families(workload_module, [name])
    family = get_families(workload_module)[name]
    return (family.model if isinstance(family, Fitted) else family)(model_section, dataset_facts)


def iterate_functions(
    workload_module: Any,
) -> Iterator[tuple[str, Callable[..., Any], tuple[str, ...]]]:
    """Yield (label, function, names of its parameters) for each function that defines a family."""
    for name, family in get_families(workload_module).items():
        family_label = f'families["{name}"]' if name else "model"
        yield (
            family_label,
            family.model if isinstance(family, Fitted) else family,
            ("section", "facts"),
        )
        if isinstance(family, Fitted):
            yield f"{family_label}.fit", family.fit, ("model", "samples")


def get_selection_metric(workload_module: Any) -> Metric:
    """Return the validation metric by which families are compared, which is `chosen_by` of the
    workload or, by default, the loss."""
    return getattr(workload_module, "chosen_by", LOSS_METRIC)


def check_validation(selected_families: Collection[str], validation_setting: float | str) -> None:
    """Raise ConfigError if several families are to be trained, but no samples are held out for
    validation."""
    if len(selected_families) > 1 and not validation_setting:
        raise ConfigError(
            f"the workload offers the families {', '.join(selected_families)}, and validation"
            " chooses between them: set train.validation, such as 0.1, or train one of them with"
            f" families: [{min(selected_families)}]."
        )


def check_families(workload_name: str, workload_module: Any) -> None:
    """Raise ConfigError unless the workload `workload_name`, which has a model, defines either
    `model` or families with valid names."""
    if hasattr(workload_module, "model") and hasattr(workload_module, "families"):
        raise ConfigError(
            f'workload "{workload_name}" defines both model and families: it must define one of'
            " them (see docs/your-own-model.md)."
        )

    family_by_name = get_families(workload_module)
    selection_metric = get_selection_metric(workload_module)

    family_names = list(family_by_name) if isinstance(family_by_name, dict) else []
    if not family_names or not all(
        family_name == "" or NAME_PATTERN.fullmatch(str(family_name))
        for family_name in family_names
    ):
        raise ConfigError(
            f'workload "{workload_name}": families is {_format_families(family_by_name)}: it must'
            " be a dict"
            ' with names of lower-case letters, digits and hyphens, such as {"network": network,'
            ' "trees": Fitted(trees, fit_trees)}.'
        )

    for key, family in family_by_name.items():
        if key and not isinstance(family, Fitted) and not callable(family):
            raise ConfigError(
                f'workload "{workload_name}": families["{key}"] is {family!r:.100}: it must be a'
                " function (section, facts) that returns a torch.nn.Module, or a rekindle.Fitted."
            )

    if not isinstance(selection_metric, Metric):
        raise ConfigError(
            f'workload "{workload_name}": chosen_by is {selection_metric!r:.100}: it must be a'
            ' rekindle.Metric with the name of one of its `measures`, such as Metric("accuracy").'
        )


def _format_families(family_by_name: object) -> str:
    if not isinstance(family_by_name, dict) or not family_by_name:
        return f"{family_by_name!r:.100}"
    return f"a dict with the names {', '.join(map(repr, family_by_name))}"
