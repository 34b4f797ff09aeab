"""Generate docs/argo-fields.md, the fields of Argo Workflows that the local runner supports, from
schema.py.

    python -m tests.argo_fields > docs/argo-fields.md

Hera's models, which are generated from Argo's API, define the fields.
"""

from collections.abc import Iterator
from typing import Any, get_args

from hera.workflows import models
from pydantic import BaseModel

from argolocal.manifest.schema import REASONS_UNSUPPORTED, TABLES

OWNER_BY_TABLE = {
    "ArgumentArtifact": "arguments",
    "InputArtifact": "inputs",
    "OutputArtifact": "outputs",
}
LIMITS = {
    ("ArgumentArtifact", "fromExpression"): "of hooks: steps and tasks need from, or a location"
}
OWNER_BY_TABLE["Argument"] = "arguments"
OWNER_BY_TABLE["Input"] = "inputs"
OWNER_BY_TABLE["Output"] = "outputs"
PAGE_HEAD = """# Argo fields that the local runner supports

`rekindle run` implements a field as Argo does, or rejects the manifest before anything starts and names the path of the
field. *Ignored* fields do not matter on a single machine; runs of manifests that Rekindle did not render warn about
them once. This page is generated from the code (`python -m tests.argo_fields`); newer fields of Argo are rejected.

The runner follows Argo 4.1.2. With Argo 3.7.3, 57 of 60 random workflows had the same outcome; the other three
workflows differ between the versions of Argo:

- An expression of an output (`valueFrom.expression`) whose value is missing is an error, as in Argo 3.7.16 and 4.0.7 or
  newer; older versions set the output to the text `<nil>`.
- While a hook or a retry waits, Argo ends one of the steps that wait for a place of `parallelism` with the error `Max
  parallelism reached`; Argo 3.7 and 4.1 may choose different steps.
- [The conformance tests](../tests/conformance/README.md#where-37-and-41-differ) list the other differences between Argo
  3.7 and 4.1, such as the outputs of skipped steps.

The local runner uses no container images: an image is a program of this machine, and `python`, `alpine`, `busybox`,
`debian`, `ubuntu` and `bash` use the interpreter and the shell of the machine. `.rekindle/images.yaml` defines other
images:

```yaml
alpine/git:v2.26.2: {command: [git]}                          # used where a container does not set a command
registry.example.com/train:7: {python: /venvs/train/bin/python, env: {OMP_NUM_THREADS: "2"}, directory: /srv/train}
```

A container that exceeds `resources.limits.memory` is killed (exit code 137, OOMKilled) if the runner may create
cgroups: with cgroups of version 1 as root, with cgroups of version 2 if the parent cgroup belongs to the user, as in a
desktop terminal or below `systemd-run --user --scope` (limits of the scope itself do not apply to these containers). If
the runner cannot create cgroups, and for all other limits, the run warns that limits are not enforced.

Each pod has its own root directory `/` in a mount namespace. A pod owns /tmp and the directories of the files that its
template names; the pod can read the rest of the machine, but not change it. Writes of a pod to other directories go to
a temporary layer in memory, or fail if the kernel does not allow such layers. /dev/shm is shared with the machine
unless a volume is mounted there. **This is not a sandbox**: a pod can read your files, use your network and signal your
processes. Read manifests of strangers before you run them.

If the system does not allow mount namespaces, pods are processes of this machine with your permissions, and the run
warns about the missing mount namespaces. Without mount namespaces, templates with literal paths or volumes are
rejected; templates that take paths from `{{outputs.parameters.NAME.path}}` run.

A step may report its progress as `N/M` in the file whose path is in `ARGO_PROGRESS_FILE`; the annotation
`workflows.argoproj.io/progress` of its template sets the first progress. The runner records the progress every 10
seconds and at the end of the step, and `argolocal status`, `rekindle status`, the page and the API show it. The file is
`/argo/progress`, and only the main container has the variable; with Argo, the file is `/var/run/argo/progress`, and all
containers of the pod share it.

ConfigMaps, Secrets and PersistentVolumeClaims are in the file of the Workflow, separated by `---`, and are kept after
the run; a claim is a directory below `.rekindle/claims`.
"""


def collect_fields() -> dict[str, dict[str, set[type[BaseModel]]]]:
    """Return, for each table of schema.py, the fields of Argo and Hera's models that have these
    fields."""
    tables: dict[str, dict[str, set[type[BaseModel]]]] = {}
    pending_tables: list[tuple[str, type[BaseModel]]] = [
        ("CronSpec", models.CronWorkflowSpec),
        ("Spec", models.WorkflowSpec),
    ]
    seen_tables = set(pending_tables)

    for table, model in pending_tables:
        fields = tables.setdefault(table, {})
        for name, field in model.model_fields.items():
            alias = field.alias or name
            fields.setdefault(alias, set()).add(model)
            field_table = TABLES[table].get(alias, "").strip("[]{}")

            for inner_model in find_models(field.annotation):
                if field_table in TABLES and (field_table, inner_model) not in seen_tables:
                    seen_tables.add((field_table, inner_model))
                    pending_tables.append((field_table, inner_model))

    return tables


def find_models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        root = annotation.model_fields.get("__root__") or annotation.model_fields.get("root")
        yield from find_models(root.annotation) if root else iter([annotation])
    for argument in get_args(annotation):
        yield from find_models(argument)


def make_page() -> str:
    """Return the text of docs/argo-fields.md."""
    sections = [PAGE_HEAD]

    for table, fields in collect_fields().items():
        if not fields:
            continue

        rules = {name: TABLES[table].get(name, "!") for name in sorted(fields)}
        model_names = ", ".join(
            sorted({model.__name__ for owners in fields.values() for model in owners})
        )

        supported = [
            f"`{name}`" + (f" ({LIMITS[table, name]})" if (table, name) in LIMITS else "")
            for name, rule in rules.items()
            if rule not in "-!"
        ]

        ignored = [f"`{name}`" for name, rule in rules.items() if rule == "-"]

        refused = [
            f"`{name}`" + (f" ({REASONS_UNSUPPORTED[name]})" if name in REASONS_UNSUPPORTED else "")
            for name, rule in rules.items()
            if rule == "!"
        ]

        lines = [("Supported", supported), ("Ignored", ignored), ("Refused", refused)]
        title = model_names + (f" of {OWNER_BY_TABLE[table]}" if table in OWNER_BY_TABLE else "")
        sections.append(
            f"## {title}\n\n"
            + "\n".join(f"- {label}: {', '.join(fields)}" for label, fields in lines if fields)
        )

    return "\n\n".join(section.strip() for section in sections) + "\n"


if __name__ == "__main__":
    print(make_page(), end="")
