"""Check tags in the fields of a spec other than `templates`. Argo's validation does not read these
fields. Each finding is a warning, because a tag without a value just remains in the text.

The allowed tags follow these functions of Argo 4.0.7: substituteGlobalVariables,
substituteParamsInVolumes, substitutePodParams, processPodSpecPatch and SubstituteParams.
"""

from collections.abc import Iterable

from argolocal.manifest import tag_scope
from argolocal.manifest.tag_scope import Nodes, Scope, TagSet
from argolocal.manifest.types import Manifest
from argolocal.validate import tag_rules
from argolocal.validate.workflow_facts import WorkflowFacts

# fields that Argo copies into each pod; they may therefore use the inputs of the pod's template
POD_FIELDS = (
    "affinity",
    "dnsConfig",
    "hostAliases",
    "imagePullSecrets",
    "nodeSelector",
    "podMetadata",
    "podPriorityClassName",
    "schedulerName",
    "securityContext",
    "serviceAccountName",
    "tolerations",
    "volumes",
)
# fields that Argo copies into templates; they may therefore use all tags of the template
TEMPLATE_FIELDS = ("arguments", "hooks", "podSpecPatch", "templateDefaults")
ITEM_TAGS = ("item", "tasks.name", "steps.name")


class SpecScopes:
    """The scopes (tags with a value) of the fields of a spec. `global_names`: tags that have a
    value in all fields."""

    def __init__(self, facts: WorkflowFacts, global_names: Iterable[str]) -> None:
        templates = facts.templates
        inputs = {
            tag
            for template in templates.values()
            for tag in tag_scope.declared_tags("inputs", template)
        }
        paths = {tag for template in templates.values() for tag in tag_scope.path_tags(template)}

        self.everywhere = TagSet(global_names)
        self.in_pods = TagSet({"pod.name", *inputs})
        self.in_templates = TagSet({"outputs", *paths, *tag_rules.ATTEMPT_TAGS, *ITEM_TAGS})
        self.nodes = TagSet(_node_tags(templates))

    def scope(self, field: str) -> Scope:
        """Return the scope of a field of the spec."""
        layers = [self.everywhere]
        if field in (*POD_FIELDS, *TEMPLATE_FIELDS):
            layers.append(self.in_pods)
        if field in ("volumes", *TEMPLATE_FIELDS):
            layers.append(self.nodes)
        if field in TEMPLATE_FIELDS:
            layers.append(self.in_templates)
        return Scope(tuple(layers))


def check_tags(facts: WorkflowFacts, field: str, path: str, text: str, scope: Scope) -> None:
    """Warn about tags that have no value in the text of a field."""
    use = tag_rules.TextUse(is_validated=False, is_used=False)
    tags = tag_rules.TAG.findall(text)
    if field == "arguments":
        # tags workflow.* in an argument are checked together with the templates that read the
        # argument
        tags = [tag for tag in tags if not tag.strip().startswith("workflow.")]

    complete_tags = " ".join(f"{{{{{tag}}}}}" for tag in tags)
    tag_rules.check_text(facts.findings, path, complete_tags, scope, use)

    for tag in {tag.strip() for tag in tags}:
        if tag in tag_rules.ATTEMPT_TAGS and field not in TEMPLATE_FIELDS:
            message = "only templates have a value for it: move it to a template, or remove it."
            facts.warn(path, "tag", f"{{{{{tag}}}}}: {message}")


def _node_tags(templates: dict[str, Manifest]) -> set[str]:
    """Return the tags of all tasks and steps of the templates."""
    tags = set[str]()

    for template in templates.values():
        tasks = (template.get("dag") or {}).get("tasks") or []
        steps = [step for group in template.get("steps") or [] for step in group]

        for kind, callers in (("tasks", tasks), ("steps", steps)):
            by_name = {str(caller.get("name")): caller for caller in callers}
            nodes = Nodes(kind, by_name, templates)
            for name in by_name:
                tags.update(f"{kind}.{name}.{tag}" for tag in nodes.tags_of(name).names)

    return tags
