"""Tests of Hera's WorkflowsService: each method that `argolocal server` supports answers with the
object that Hera expects."""

import inspect
from pathlib import Path
from typing import Any

import pytest
from hera.exceptions import AlreadyExists, NotFound, NotImplemented, Unauthorized
from hera.workflows import DAG, Container, Workflow, WorkflowsService
from hera.workflows import models as m
from hera.workflows.models.sync import CreateSyncLimitRequest, UpdateSyncLimitRequest

from tests.argolocal.server.api.running import (
    ApiServer,
    Document,
    make_cron_workflow,
    make_failing_workflow,
    make_gated_workflow,
    make_hello_workflow,
    make_long_workflow,
    make_stored_template,
)
from tests.commands import ROOT, list_blocks

# methods that do not send a request
LOCAL = {"close", "get_workflow_link", "get_cron_workflow_link"}
# Hera returns the text of the bytes of an artifact
CONTENT = str(b"x\n")
# limits of semaphores, which need an Argo server on Kubernetes
REFUSED_METHODS = {"create_sync_limit", "get_sync_limit", "update_sync_limit", "delete_sync_limit"}


class Recorder:
    """Hera's service, and the names of the methods that were called and have answered."""

    def __init__(self, service: WorkflowsService) -> None:
        self.service = service
        self.answered: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.service, name)

        def call(*arguments: Any, **options: Any) -> Any:
            answer = method(*arguments, **options)
            self.answered.add(name)
            return answer

        return call


def connect(api: ApiServer) -> WorkflowsService:
    return WorkflowsService(host=api.url, token=api.token, namespace="argo", verify_ssl=False)


def create(manifest: Document) -> m.WorkflowCreateRequest:
    return m.WorkflowCreateRequest(workflow=m.Workflow(**manifest))


def name_of(kubernetes_object: Any) -> str:
    return kubernetes_object.metadata.name


def test_all_methods_answer_except_the_limits_of_semaphores(api: ApiServer) -> None:
    hera = Recorder(connect(api))
    use_workflows(api, hera)
    use_steps(api, hera)
    use_archive(api, hera)
    use_artifacts(api, hera)
    use_templates(hera)
    use_cron_workflows(hera)
    assert hera.get_info().managed_namespace == "argo"
    assert hera.get_version().version.startswith("v4")
    assert hera.get_user_info().subject

    methods = {
        name
        for name, _ in inspect.getmembers(WorkflowsService, inspect.isfunction)
        if not name.startswith("_")
    }
    assert methods - LOCAL - REFUSED_METHODS == hera.answered
    assert len(hera.answered) >= 50


def use_workflows(api: ApiServer, hera: Recorder) -> None:
    created = hera.create_workflow(create(make_hello_workflow("hera")))
    assert name_of(created) == "hera"
    api.wait("hera")
    assert hera.get_workflow("hera").status.phase == "Succeeded"
    items = hera.list_workflows(label_selector="workflows.argoproj.io/phase=Succeeded").items
    assert "hera" in {name_of(item) for item in items}
    linted = hera.lint_workflow(
        m.WorkflowLintRequest(workflow=m.Workflow(**make_hello_workflow("hera")))
    )
    assert name_of(linted) == "hera"

    node = next(iter(hera.get_workflow("hera").status.nodes.values()))
    assert hera.workflow_logs("hera") is not None
    assert hera.pod_logs("hera", node.id) is not None

    copied = hera.resubmit_workflow("hera", m.WorkflowResubmitRequest(memoized=False))
    api.wait(name_of(copied))
    hera.delete_workflow(name_of(copied))
    with pytest.raises(NotFound):
        hera.service.get_workflow(name_of(copied))

    api.wait(name_of(hera.create_workflow(create(make_failing_workflow("hera-failing")))))
    request = m.WorkflowRetryRequest(parameters=["code=0"])
    hera.retry_workflow("hera-failing", request)
    assert api.wait("hera-failing")["status"]["phase"] == "Succeeded"


def use_steps(api: ApiServer, hera: Recorder) -> None:
    hera.create_workflow(create(make_gated_workflow("hera-gated")))
    api.wait_until_suspended("hera-gated")
    hera.suspend_workflow("hera-gated", m.WorkflowSuspendRequest())
    selector = "displayName=gate"
    request = m.WorkflowSetRequest(node_field_selector=selector, output_parameters='{"go": "yes"}')
    hera.set_workflow("hera-gated", request)
    hera.resume_workflow("hera-gated", m.WorkflowResumeRequest())
    assert api.wait("hera-gated")["status"]["phase"] == "Succeeded"

    for action, request in (
        (hera.stop_workflow, m.WorkflowStopRequest()),
        (hera.terminate_workflow, m.WorkflowTerminateRequest()),
    ):
        name = name_of(hera.create_workflow(create(make_long_workflow())))
        api.wait(name, "Running")
        action(name, request)
        assert api.wait(name)["status"]["phase"] == "Failed"


def use_archive(api: ApiServer, hera: Recorder) -> None:
    assert hera.list_archived_workflows().items
    assert "workflows.argoproj.io/phase" in hera.list_archived_workflow_label_keys().items
    values = hera.list_archived_workflow_label_values(label_selector="workflows.argoproj.io/phase")
    assert "Succeeded" in values.items

    uid = api.submit_and_wait(make_failing_workflow("hera-old"))["metadata"]["uid"]
    assert name_of(hera.get_archived_workflow(uid)) == "hera-old"
    parameters: Any = {"parameters": ["code=0"]}
    copied = hera.resubmit_archived_workflow(uid, m.ResubmitArchivedWorkflowRequest(**parameters))
    api.wait(name_of(copied))
    hera.retry_archived_workflow(uid, m.RetryArchivedWorkflowRequest(**parameters))
    api.wait("hera-old")
    hera.delete_archived_workflow(uid)


def use_artifacts(api: ApiServer, hera: Recorder) -> None:
    ended = api.submit_and_wait(make_failing_workflow("hera-artifact"))
    uid = ended["metadata"]["uid"]
    nodes = ended["status"]["nodes"].values()
    node = next(node["id"] for node in nodes if node["displayName"] == "first")
    assert hera.get_output_artifact("hera-artifact", node, "x") == CONTENT
    assert hera.get_output_artifact_by_uid(uid, node, "x") == CONTENT
    assert hera.get_artifact_file("workflows", "hera-artifact", node, "x", "outputs") == CONTENT

    reading = api.submit_and_wait(with_input())
    uid = reading["metadata"]["uid"]
    nodes = reading["status"]["nodes"].values()
    node = next(item["id"] for item in nodes if item["displayName"] == "second")
    assert hera.get_input_artifact("hera-input", node, "y") == CONTENT
    assert hera.get_input_artifact_by_uid(uid, node, "y") == CONTENT


def with_input() -> Document:
    """Return a workflow whose second step reads the artifact of the first step."""
    manifest = make_failing_workflow("hera-input")
    main_template, _, second_template = manifest["spec"]["templates"]
    second_template["inputs"] = {"artifacts": [{"name": "y", "path": "/tmp/y"}]}
    source = {"name": "y", "from": "{{steps.first.outputs.artifacts.x}}"}
    main_template["steps"][1][0]["arguments"] = {"artifacts": [source]}
    return manifest


def use_templates(hera: Recorder) -> None:
    manifest = m.WorkflowTemplate(**make_stored_template("hera"))
    hera.create_workflow_template(m.WorkflowTemplateCreateRequest(template=manifest))
    stored = hera.get_workflow_template("hera")
    assert [name_of(item) for item in hera.list_workflow_templates(name_pattern="her").items]
    hera.update_workflow_template("hera", m.WorkflowTemplateUpdateRequest(template=stored))
    hera.lint_workflow_template(m.WorkflowTemplateLintRequest(template=manifest))
    request = m.WorkflowSubmitRequest(resource_kind="WorkflowTemplate", resource_name="hera")
    assert name_of(hera.submit_workflow(request)).startswith("hera-")
    with pytest.raises(AlreadyExists):
        hera.service.create_workflow_template(m.WorkflowTemplateCreateRequest(template=manifest))
    hera.delete_workflow_template("hera")

    manifest = m.ClusterWorkflowTemplate(**make_stored_template("hera", "ClusterWorkflowTemplate"))
    request = m.ClusterWorkflowTemplateCreateRequest(template=manifest)
    hera.create_cluster_workflow_template(request)
    stored = hera.get_cluster_workflow_template("hera")
    assert hera.list_cluster_workflow_templates().items
    request = m.ClusterWorkflowTemplateUpdateRequest(template=stored)
    hera.update_cluster_workflow_template("hera", request)
    request = m.ClusterWorkflowTemplateLintRequest(template=manifest)
    hera.lint_cluster_workflow_template(request)
    hera.delete_cluster_workflow_template("hera")


def use_cron_workflows(hera: Recorder) -> None:
    manifest = m.CronWorkflow(**make_cron_workflow("hera"))
    hera.create_cron_workflow(m.CreateCronWorkflowRequest(cron_workflow=manifest))
    stored = hera.get_cron_workflow("hera")
    assert hera.list_cron_workflows().items
    hera.update_cron_workflow("hera", m.UpdateCronWorkflowRequest(cron_workflow=stored))
    hera.lint_cron_workflow(m.LintCronWorkflowRequest(cron_workflow=manifest))
    assert hera.suspend_cron_workflow("hera", m.CronWorkflowSuspendRequest()).spec.suspend
    assert not hera.resume_cron_workflow("hera", m.CronWorkflowResumeRequest()).spec.suspend
    hera.delete_cron_workflow("hera")


def test_the_limits_of_semaphores_are_refused_with_a_sentence(api: ApiServer) -> None:
    service = connect(api)
    create_request = CreateSyncLimitRequest(key="x", limit=1)
    update_request = UpdateSyncLimitRequest(key="x", limit=1)
    calls = [
        lambda: service.create_sync_limit(create_request),
        lambda: service.get_sync_limit("x"),
        lambda: service.update_sync_limit("x", update_request),
        lambda: service.delete_sync_limit("x"),
    ]
    for call in calls:
        with pytest.raises(NotImplemented, match="need an Argo server on Kubernetes"):
            call()


def test_a_wrong_token_is_an_error_of_hera(api: ApiServer) -> None:
    service = WorkflowsService(host=api.url, token="wrong", namespace="argo")  # nosec B106
    with pytest.raises(Unauthorized, match="token"):
        service.get_workflow("x")


def test_the_example_of_the_page_submits_a_workflow(
    api: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (example,) = list_blocks(ROOT / "docs/argo-server.md", "python")
    (tmp_path / ".argolocal").symlink_to(api.home)
    monkeypatch.chdir(tmp_path)
    space = {"__name__": "submit_hello"}
    exec(compile(example.text, str(example), "exec"), space)
    space["URL"] = api.url
    assert api.wait(space["submit"]())["status"]["phase"] == "Succeeded"  # type: ignore[operator]


def test_a_workflow_of_hera_is_created_and_waited_for(api: ApiServer) -> None:
    with Workflow(
        generate_name="made-by-hera-",
        entrypoint="main",
        namespace="argo",
        workflows_service=connect(api),
    ) as made:
        say = Container(name="say", image="busybox", command=["echo", "hello"])
        with DAG(name="main"):
            say(name="first")
            say(name="second")
    created: Any = made.create()
    assert api.wait(created.metadata.name)["status"]["phase"] == "Succeeded"
    waited: Any = made.wait(poll_interval=0)
    assert waited.status.phase == "Succeeded"
