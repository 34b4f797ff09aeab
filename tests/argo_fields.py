"""Generate docs/argo-fields.md, the fields of Argo Workflows that the local runner supports, from schema.py.

    python -m tests.argo_fields > docs/argo-fields.md

Hera's models, which are generated from Argo's API, define the fields.
"""

from collections.abc import Iterator
from typing import Any, get_args

from hera.workflows import models
from pydantic import BaseModel

from argolocal.manifest.schema import TABLES, WHY

PARTS = {"Supplied": "arguments", "InputArtifact": "inputs", "OutputArtifact": "outputs"}
ONLY = {("Supplied", "fromExpression"): "of hooks: steps and tasks need from, or a location"}
PARTS |= {"Argument": "arguments", "Input": "inputs", "Output": "outputs"}
HEAD = """# What of Argo's API runs on this machine

`rekindle run` does what a field says as Argo does it, or refuses the manifest before anything starts, with the path of
the field. *Ignored* is what cannot matter on one machine; a run of a manifest that is not ours says so once. This page
is generated from the code (`python -m tests.argo_fields`); fields that Argo has got since are refused.
Where Argo 3.7 and 4.1 differ the runner is as 4.1:
[what was seen of it](../tests/conformance/README.md#where-37-and-41-differ).

Without containers an image is a program of this machine: `python`, `alpine`, `busybox`, `debian`, `ubuntu` and `bash`
run on its own interpreter and shell. What any other image is here, `.rekindle/images.yaml` says:

```yaml
alpine/git:v2.26.2: {command: [git]}                          # what it runs where a container gives no command
registry.example.com/train:7: {python: /venvs/train/bin/python, env: {OMP_NUM_THREADS: "2"}, directory: /srv/train}
```

A container that uses more memory than `resources.limits.memory` is killed (exit code 137, OOMKilled) where the runner
may make cgroups: in version 1 as root, in version 2 where the cgroup above its own is the user's, as in a terminal of a
desktop or below `systemd-run --user --scope` (limits of the scope itself do not hold for these containers). Elsewhere,
and for all other limits, the run says that nothing holds it to them.

Each pod has a `/` of its own (mount namespaces): /tmp and the directories of the files that its template names are its
own, the rest is the machine's, which it sees and cannot change. What it writes there goes with it (a layer in memory),
or is refused where the kernel allows no layer; /dev/shm is the machine's where no volume is mounted there. **It is no
sandbox**: a pod reads what you can read, reaches your network and signals your processes. Read a stranger's manifest
first.

Where the system gives no mount namespaces, pods are processes of this machine with your rights, and the run says so. A
template that spells out a path or mounts a volume is then refused; one that takes its paths from
`{{outputs.parameters.NAME.path}}` runs.

ConfigMaps, Secrets and PersistentVolumeClaims lie in the file of the Workflow, separated by `---`, and are kept; a
claim is a directory below `.rekindle/claims`.
"""


def described() -> dict[str, dict[str, set[type[BaseModel]]]]:
    """Return for each table the fields of Argo and the models that have them."""
    tables: dict[str, dict[str, set[type[BaseModel]]]] = {}
    waiting: list[tuple[str, type[BaseModel]]] = [
        ("CronSpec", models.CronWorkflowSpec),
        ("Spec", models.WorkflowSpec),
    ]
    seen = set(waiting)
    for table, model in waiting:
        fields = tables.setdefault(table, {})
        for name, field in model.model_fields.items():
            alias = field.alias or name
            fields.setdefault(alias, set()).add(model)
            below = TABLES[table].get(alias, "").strip("[]{}")
            for inner in _models(field.annotation):
                if below in TABLES and (below, inner) not in seen:
                    seen.add((below, inner))
                    waiting.append((below, inner))
    return tables


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        root = annotation.model_fields.get("__root__") or annotation.model_fields.get("root")
        yield from _models(root.annotation) if root else iter([annotation])
    for argument in get_args(annotation):
        yield from _models(argument)


def page() -> str:
    """Return the page."""
    sections = [HEAD]
    for table, fields in described().items():
        if not fields:
            continue
        rules = {name: TABLES[table].get(name, "!") for name in sorted(fields)}
        names = ", ".join(sorted({model.__name__ for owners in fields.values() for model in owners}))
        done = [
            f"`{name}`" + (f" ({ONLY[table, name]})" if (table, name) in ONLY else "")
            for name, rule in rules.items()
            if rule not in "-!"
        ]
        ignored = [f"`{name}`" for name, rule in rules.items() if rule == "-"]
        refused = [
            f"`{name}`" + (f" ({WHY[name]})" if name in WHY else "") for name, rule in rules.items() if rule == "!"
        ]
        lines = [("Supported", done), ("Ignored", ignored), ("Refused", refused)]
        title = names + (f" of {PARTS[table]}" if table in PARTS else "")
        sections.append(
            f"## {title}\n\n" + "\n".join(f"- {label}: {', '.join(fields)}" for label, fields in lines if fields)
        )
    return "\n\n".join(section.strip() for section in sections) + "\n"


if __name__ == "__main__":
    print(page(), end="")
