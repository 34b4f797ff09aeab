"""Label selectors of Kubernetes, compared with labels, some of which may be unknown."""

from collections.abc import Mapping

from argolocal.manifest.types import Object

# label that Kubernetes gives to each namespace
NAMESPACE_LABEL = "kubernetes.io/metadata.name"


def matches(selector: Object, labels: Mapping[str, str], is_complete: bool = True) -> bool | None:
    """Return whether a selector matches labels; an empty selector matches all labels.

    With `is_complete=False`, `labels` are only a part of the labels: return None if the result
    depends on the unknown labels.
    """
    results = [
        _match_expression(expression, labels, is_complete)
        for expression in _list_expressions(selector)
    ]
    if False in results:
        return False
    return None if None in results else True


def format_selector(selector: Object) -> str:
    """Return a selector as text, such as `team=a, zone NotIn (b, c)`."""
    texts = []
    for expression in _list_expressions(selector):
        label_values = expression.get("values") or []
        if expression["operator"] == "In" and len(label_values) == 1:
            texts.append(f"{expression['key']}={label_values[0]}")
        elif label_values:
            texts.append(
                f"{expression['key']} {expression['operator']} ({', '.join(label_values)})"
            )
        else:
            texts.append(f"{expression['key']} {expression['operator']}")
    return ", ".join(texts) or "all"


def _list_expressions(selector: Object) -> list[Object]:
    label_expressions = [
        {"key": key, "operator": "In", "values": [value]}
        for key, value in (selector.get("matchLabels") or {}).items()
    ]
    return [*label_expressions, *(selector.get("matchExpressions") or [])]


def _match_expression(
    expression: Object, labels: Mapping[str, str], is_complete: bool
) -> bool | None:
    key = expression["key"]
    label_values = expression.get("values") or []
    if key not in labels and not is_complete:
        return None
    if expression["operator"] == "In":
        return labels.get(key) in label_values
    if expression["operator"] == "NotIn":
        return labels.get(key) not in label_values
    if expression["operator"] == "Exists":
        return key in labels
    return key not in labels
