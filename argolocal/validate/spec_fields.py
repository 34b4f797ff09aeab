"""Check tags in the fields of a spec other than `templates`. Argo's validation does not read the
fields of a spec other than `templates`. All findings about these fields are warnings, because a tag
without a value remains in the text of the field.

The tags that have a value in each field are taken from substituteGlobalVariables,
substituteParamsInVolumes, substitutePodParams, processPodSpecPatch and SubstituteParams of Argo
4.0.7.
"""

from collections.abc import Iterable

from argolocal.manifest import tag_scope
from argolocal.manifest.tag_scope import NodeTags, TagScope, TagSet
from argolocal.manifest.types import Manifest
from argolocal.validate import tag_rules
from argolocal.validate.workflow_facts import WorkflowFacts

# fields that Argo copies into each pod, so they may use the inputs of the pod's template
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
# fields that Argo copies into templates, so they may use all tags of the template
TEMPLATE_FIELDS = ("arguments", "hooks", "podSpecPatch", "templateDefaults")
ITEM_TAGS = ("item", "tasks.name", "steps.name")


class SpecScopes:
    """The tags that have a value in each field of a spec. `global_names`: tags that have a value in
    all fields."""

    def __init__(self, workflow_facts: WorkflowFacts, global_names: Iterable[str]) -> None:
        templates = workflow_facts.templates
        input_tags = {
            tag
            for template in templates.values()
            for tag in tag_scope.list_declared_tags("inputs", template)
        }
        path_tags = {
            tag for template in templates.values() for tag in tag_scope.list_path_tags(template)
        }

        self.everywhere = TagSet(global_names)
        self.in_pods = TagSet({"pod.name", *input_tags})
        self.in_templates = TagSet({"outputs", *path_tags, *tag_rules.ATTEMPT_TAGS, *ITEM_TAGS})
        self.nodes = TagSet(_list_node_tags(templates))

    def scope(self, field: str) -> TagScope:
        """Return the tags that have a value in a field of the spec."""
        layers = [self.everywhere]
        if field in (*POD_FIELDS, *TEMPLATE_FIELDS):
            layers.append(self.in_pods)
        if field in ("volumes", *TEMPLATE_FIELDS):
            layers.append(self.nodes)
        if field in TEMPLATE_FIELDS:
            layers.append(self.in_templates)
        return TagScope(tuple(layers))


def check_tags(
    workflow_facts: WorkflowFacts, field: str, path: str, text: str, scope: TagScope
) -> None:
    """Warn about tags without a value in a text. `field`: the field of the spec that contains the
    text."""
    text_use = tag_rules.TextUse(is_validated=False, is_used=False)
    tags = tag_rules.TAG.findall(text)
    if field == "arguments":
        # WorkflowRules checks the tags workflow.* of an argument, because they matter only if a
        # template reads the argument
        tags = [tag for tag in tags if not tag.strip().startswith("workflow.")]

    complete_tags = " ".join(f"{{{{{tag}}}}}" for tag in tags)
    tag_rules.check_text(workflow_facts.findings, path, complete_tags, scope, text_use)

    for tag in {tag.strip() for tag in tags}:
        if tag in tag_rules.ATTEMPT_TAGS and field not in TEMPLATE_FIELDS:
            message = "only templates have a value for it: move it to a template, or remove it."
            workflow_facts.warn(path, "tag", f"{{{{{tag}}}}}: {message}")


def _list_node_tags(templates: dict[str, Manifest]) -> set[str]:
    """Return the tags of all tasks and steps of the templates."""
    tags = set[str]()

    for template in templates.values():
        tasks = (template.get("dag") or {}).get("tasks") or []
        steps = [step for step_group in template.get("steps") or [] for step in step_group]

        for caller_kind, callers in (("tasks", tasks), ("steps", steps)):
            callers_by_name = {str(caller.get("name")): caller for caller in callers}
            finished_nodes = NodeTags(caller_kind, callers_by_name, templates)
            for caller_name in callers_by_name:
                tags.update(
                    f"{caller_kind}.{caller_name}.{tag}"
                    for tag in finished_nodes.list_tags(caller_name).names
                )

    return tags
