"""The command lines of `argo` that are tested: one command line for each command, and one for each
flag.

In a command line, {done} is a workflow that succeeded, {failed} a workflow that failed, {gated} a
workflow with a suspended step, {long} a workflow that does not end by itself, {copied} a
resubmitted workflow, {uid} the uid of a failed workflow, {fresh} a new name, and {files} the folder
with the files of the test. A new workflow is created for each command line that changes a workflow.
"""

from dataclasses import dataclass
from typing import Literal

Outcome = Literal["works", "ignored", "differs", "refused"]
WORKS: Outcome = "works"
# `argo` sends this flag to no server
IGNORED: Outcome = "ignored"
DIFFERS: Outcome = "differs"
REFUSED: Outcome = "refused"


@dataclass(frozen=True)
class Case:
    """A command line, and a pattern of its output. `flag`: "" for the command itself. `then`,
    `then_expect`: a later command line, and the pattern of its output. `note`: the difference from
    an Argo server, or the reason why the command is refused."""

    command: str
    flag: str
    line: str
    expect: str
    then: str = ""
    then_expect: str = ""
    outcome: Outcome = WORKS
    note: str = ""


def make_flag_cases(command: str, *cases: tuple[str, ...]) -> list[Case]:
    """Return the cases of a command: (flag, arguments, pattern, further command line, its
    pattern)."""
    return [
        Case(command, flag, f"{command} {arguments}", expect, "".join(more[:1]), "".join(more[1:]))
        for flag, arguments, expect, *more in cases
    ]


def make_ignored_cases(command: str, *cases: tuple[str, str, str]) -> list[Case]:
    """Return the cases of flags that `argo` does not send: (flag, arguments, pattern)."""
    return [
        Case(command, flag, f"{command} {arguments}", expect, outcome=IGNORED)
        for flag, arguments, expect in cases
    ]


def make_differing_case(command: str, flag: str, arguments: str, expect: str, note: str) -> Case:
    """Return a case whose effect differs from its effect with an Argo server."""
    return Case(command, flag, f"{command} {arguments}", expect, outcome=DIFFERS, note=note)


def make_refused_case(command: str, arguments: str, expect: str, note: str) -> Case:
    """Return the case of a command that `argolocal server` refuses."""
    return Case(command, "", f"{command} {arguments}", expect, outcome=REFUSED, note=note)


NO_TIMES = "lines of a log are stored without times: the last change of the log counts"
EXISTING = "an Argo server refuses it while the workflow exists"

CASES = [
    *make_flag_cases(
        "submit",
        ("", "{files}/hello.yaml", "Name: +w-"),
        (
            "--dry-run",
            "--dry-run -o name --name {fresh} {files}/hello.yaml",
            "{fresh}",
            "get {fresh}",
            "not found",
        ),
        ("--entrypoint", "--entrypoint bad --wait {files}/entrypoints.yaml", "Failed at"),
        ("--from", "--from workflowtemplate/stored --wait", "Succeeded at"),
        ("--generate-name", "--generate-name made- -o name {files}/hello.yaml", "made-"),
        (
            "--labels",
            "-l team={fresh} --name {fresh} {files}/hello.yaml",
            "{fresh}",
            "list -l team={fresh} -o name",
            "{fresh}",
        ),
        ("--log", "--log -p message=seen {files}/hello.yaml", ": seen"),
        ("--name", "--name {fresh} -o name {files}/hello.yaml", "{fresh}"),
        (
            "--node-field-selector",
            "--watch --node-field-selector name=x {files}/hello.yaml",
            "Status: +Succeeded",
        ),
        ("--output", "-o json {files}/hello.yaml", '"kind": "Workflow"'),
        ("--parameter", "-p message=given --log {files}/hello.yaml", ": given"),
        ("--parameter-file", "-f {files}/parameters.yaml --log {files}/hello.yaml", ": of a file"),
        ("--priority", "--priority 7 -o json {files}/hello.yaml", '"priority": 7'),
        (
            "--scheduled-time",
            "--from cronwf/stored --scheduled-time 2026-01-02T03:04:05Z -o json",
            'scheduled-time": "2026-01-02T03:04:05Z"',
        ),
        (
            "--server-dry-run",
            "--server-dry-run -o yaml --name {fresh} {files}/hello.yaml",
            "uid: ",
            "get {fresh}",
            "not found",
        ),
        ("--status", "--watch --status Failed {files}/hello.yaml", "Status: +Succeeded"),
        ("--strict", "--strict {files}/unknown-field.yaml", "unknown field"),
        ("--wait", "--wait {files}/hello.yaml", "Succeeded at"),
        ("--watch", "--watch {files}/hello.yaml", "Status: +Succeeded"),
    ),
    make_differing_case(
        "submit",
        "--serviceaccount",
        "--serviceaccount robot -o json {files}/hello.yaml",
        '"serviceAccountName": "robot"',
        "the workflow keeps it, and its processes have the user of the server",
    ),
    *make_flag_cases(
        "list",
        ("", "", "NAME +STATUS"),
        ("--all-namespaces", "-A --prefix {done}", "argo +{done}"),
        ("--chunk-size", "--chunk-size 1 -o name", "{done}"),
        ("--completed", "--completed --prefix {gated}", "No workflows found"),
        ("--field-selector", "--field-selector metadata.name={done} -o name", "^{done}$"),
        ("--no-headers", "--no-headers", "^(?!NAME)"),
        ("--older", "--older 1h -o name", "No workflows found"),
        ("--output", "-o wide --prefix {done}", "PARAMETERS"),
        ("--prefix", "--prefix {done} -o name", "^{done}$"),
        ("--resubmitted", "--resubmitted -o name", "{copied}"),
        ("--running", "--running -o name", "{gated}"),
        ("--selector", "-l kind=done -o name", r"\b{done}$"),
        ("--since", "--since 1h -o name", "{done}"),
        ("--status", "--status Failed,Error -o name", "{failed}"),
    ),
    *make_flag_cases(
        "get",
        ("", "{done}", "Status: +Succeeded"),
        ("--no-color", "--no-color {done}", "✔ {done}"),
        ("--no-utf8", "--no-utf8 --no-color {failed}", "`-"),
        (
            "--node-field-selector",
            "--no-color --node-field-selector displayName=second {failed}",
            "second",
        ),
        ("--output", "-o yaml {done}", "kind: Workflow"),
        ("--status", "--no-color --status Failed {failed}", "second"),
    ),
    *make_flag_cases(
        "logs",
        ("", "--no-color {failed}", r"one\n.*two"),
        ("--container", "-c main {done}", "hello"),
        ("--follow", "-f {done}", "hello"),
        ("--grep", "--no-color --grep ^o.e$ {failed}", r"^[^\n]*: one$"),
        ("--no-color", "--no-color {done}", "^{done}: hello"),
        ("--selector", "-l app=x {done}", "^$"),
        ("--tail", "--no-color --tail 1 {done}", "^{done}: hello$"),
    ),
    make_differing_case(
        "logs",
        "--previous",
        "--previous {done}",
        "hello",
        "a pod has one log: its containers do not start again",
    ),
    make_differing_case("logs", "--since", "--since 1h {done}", "hello", NO_TIMES),
    make_differing_case(
        "logs", "--since-time", "--since-time 2100-01-01T00:00:00Z {done}", "^$", NO_TIMES
    ),
    make_differing_case(
        "logs", "--timestamps", "--no-color --timestamps {done}", "^{done}: 20.*Z h", NO_TIMES
    ),
    *make_flag_cases(
        "watch",
        ("", "{done}", "Status: +Succeeded"),
        ("--node-field-selector", "--node-field-selector phase=x {done}", "Status: +Succeeded"),
        ("--status", "--status Failed {done}", "Status: +Succeeded"),
    ),
    *make_flag_cases(
        "wait",
        ("", "{done}", "{done} Succeeded at"),
        ("--ignore-not-found", "--ignore-not-found nothing", "^$"),
    ),
    *make_flag_cases(
        "retry",
        ("", "-p code=0 {failed}", "Status: +(Running|Pending)"),
        (
            "--field-selector",
            "-p code=0 --field-selector metadata.name={failed} --wait",
            "Succeeded at",
        ),
        ("--log", "-p code=0 --log {failed}", "two"),
        (
            "--node-field-selector",
            "--restart-successful --node-field-selector displayName=first --log {failed}",
            "one",
        ),
        ("--output", "-p code=0 -o name {failed}", "^{failed}$"),
        ("--parameter", "-p code=0 --wait {failed}", "Succeeded at"),
        (
            "--restart-successful",
            "--restart-successful --node-field-selector phase=Succeeded --wait {done}",
            "Succeeded at",
        ),
        ("--selector", "-p code=0 -l name={failed} -o name", "^{failed}$"),
        ("--wait", "--wait {failed}", "Failed at"),
        ("--watch", "-p code=0 --watch {failed}", "Status: +Succeeded"),
    ),
    *make_flag_cases(
        "resubmit",
        ("", "{done}", "Name: +{done}-"),
        ("--field-selector", "--field-selector metadata.name={done} -o name", "^{done}-"),
        ("--log", "--log {done}", "hello"),
        ("--memoized", "--memoized -p code=0 --watch {failed}", "original pod: {failed}-"),
        ("--output", "-o name {done}", "^{done}-"),
        ("--parameter", "-p message=changed --log {done}", ": changed"),
        ("--selector", "-l name={failed} -o name", "^{failed}-"),
        ("--wait", "--wait {done}", "Succeeded at"),
        ("--watch", "--watch {done}", "Status: +Succeeded"),
    ),
    *make_ignored_cases("resubmit", ("--priority", "--priority 3 -o name {done}", "^{done}-")),
    *make_flag_cases(
        "stop",
        ("", "{long}", "workflow {long} stopped", "wait {long}", "Failed at"),
        ("--dry-run", "--dry-run {gated}", "{gated}", "get {gated}", "Status: +Running"),
        ("--field-selector", "--field-selector metadata.name={long}", "workflow {long} stopped"),
        (
            "--message",
            "--node-field-selector displayName=gate --message rejected {gated}",
            "stopped",
            "get {gated}",
            "rejected",
        ),
        (
            "--node-field-selector",
            "--node-field-selector displayName=gate {gated}",
            "stopped",
            "wait {gated}",
            "Failed at",
        ),
        ("--selector", "-l name={long}", "workflow {long} stopped", "wait {long}", "Failed at"),
    ),
    *make_flag_cases(
        "terminate",
        ("", "{long}", "workflow {long} terminated", "wait {long}", "Failed at"),
        ("--dry-run", "--dry-run {gated}", "{gated}", "get {gated}", "Status: +Running"),
        ("--field-selector", "--field-selector metadata.name={long}", "{long} terminated"),
        ("--selector", "-l name={long}", "{long} terminated", "wait {long}", "Failed at"),
    ),
    *make_flag_cases(
        "suspend", ("", "{gated}", "suspended", "get {gated} -o json", '"suspend": true')
    ),
    *make_flag_cases(
        "resume",
        ("", "{gated}", "resumed", "wait {gated}", "Succeeded at"),
        (
            "--node-field-selector",
            "--node-field-selector displayName=gate {gated}",
            "resumed",
            "wait {gated}",
            "Succeeded at",
        ),
    ),
    *make_flag_cases(
        "node",
        (
            "",
            "set {gated} --node-field-selector displayName=gate --phase Failed",
            "workflow values set",
            "wait {gated}",
            "Failed at",
        ),
        (
            "--message",
            "set {gated} --node-field-selector displayName=gate -m please",
            "workflow values set",
            "get {gated}",
            "please",
        ),
        (
            "--node-field-selector",
            "set {gated} --node-field-selector displayName=nothing --phase Failed",
            "no suspend nodes matching",
        ),
        (
            "--output-parameter",
            "set {gated} --node-field-selector displayName=gate -p go=yes",
            "workflow values set",
            "get {gated} -o json",
            '"value": "yes"',
        ),
        (
            "--phase",
            "set {gated} --node-field-selector displayName=gate --phase Succeeded",
            "workflow values set",
        ),
    ),
    *make_flag_cases(
        "delete",
        ("", "{failed}", "'{failed}' deleted", "get {failed}", "not found"),
        ("--all", "--all --dry-run", r"deleted \(dry-run\)"),
        ("--all-namespaces", "-A --prefix {failed}", "'{failed}' deleted"),
        ("--completed", "--completed --prefix {failed}", "'{failed}' deleted"),
        ("--dry-run", "--dry-run {done}", "dry-run", "get {done}", "Succeeded"),
        ("--field-selector", "--field-selector metadata.name={failed}", "'{failed}' deleted"),
        ("--force", "--force {failed}", "'{failed}' deleted"),
        ("--older", "--older 10d", "No resources found"),
        ("--prefix", "--prefix {failed}", "'{failed}' deleted"),
        ("--query-chunk-size", "--query-chunk-size 1 --prefix {failed}", "'{failed}' deleted"),
        ("--resubmitted", "--resubmitted --dry-run", "'{copied}' deleted"),
        ("--selector", "-l name={failed}", "'{failed}' deleted"),
        ("--status", "--status Failed --prefix {failed}", "'{failed}' deleted"),
    ),
    *make_flag_cases(
        "lint",
        ("", "{files}/hello.yaml", "no linting errors found"),
        ("--kinds", "--kinds workflows {files}/hello.yaml", "no linting errors found"),
        ("--no-color", "--no-color {files}/broken.yaml", "does not exist"),
        ("--offline", "--offline {files}/hello.yaml", "no linting errors found"),
        ("--output", "-o simple {files}/broken.yaml", "broken.yaml.*does not exist"),
        ("--strict", "--strict {files}/unknown-field.yaml", "unknown field"),
    ),
    *make_flag_cases(
        "cp",
        ("", "{failed} {files}/{fresh}", "Created"),
        ("--artifact-name", "{failed} {files}/{fresh} --artifact-name x", "Created"),
        ("--namespace", "{failed} {files}/{fresh} -n argo", "Created"),
        ("--node-id", "{failed} {files}/{fresh} --node-id nothing", "^$"),
        ("--path", "{failed} {files}/{fresh} --path {workflowName}", "Created"),
        ("--template-name", "{failed} {files}/{fresh} --template-name first", "Created"),
    ),
    *make_flag_cases(
        "archive list",
        ("", "", "NAME +STATUS"),
        ("--chunk-size", "--chunk-size 1 -o name", "{done}"),
        ("--output", "-o name", "{done}"),
        ("--selector", "-l kind=done -o name", r"\b{done}\b"),
    ),
    *make_flag_cases(
        "archive get", ("", "{uid}", "Status: +Failed"), ("--output", "-o json {uid}", "Failed")
    ),
    *make_flag_cases("archive delete", ("", "{uid}", "deleted")),
    *make_flag_cases("archive list-label-keys", ("", "", "workflows.argoproj.io/phase")),
    *make_flag_cases(
        "archive list-label-values",
        ("", "-l workflows.argoproj.io/phase", "Succeeded"),
        ("--selector", "-l kind", "done"),
    ),
    *make_flag_cases(
        "archive resubmit",
        ("", "{uid}", "Name: "),
        ("--log", "-p code=0 --log {uid}", "two"),
        ("--memoized", "--memoized -p code=0 --watch {uid}", "original pod: "),
        ("--output", "-o name {uid}", "-"),
        ("--parameter", "-p code=0 --wait {uid}", "Succeeded at"),
        ("--selector", "-l name={failed}", "Name: +{failed}-"),
        ("--wait", "--wait {uid}", "Failed at"),
        ("--watch", "-p code=0 --watch {uid}", "Status: +Succeeded"),
    ),
    *make_ignored_cases("archive resubmit", ("--priority", "--priority 3 -o name {uid}", "-")),
    *make_ignored_cases(
        "archive resubmit", ("--field-selector", "--field-selector metadata.name={done}", "^$")
    ),
    *make_ignored_cases(
        "archive retry", ("--field-selector", "--field-selector metadata.name={done}", "^$")
    ),
    make_differing_case("archive retry", "", "-p code=0 --wait {uid}", "Succeeded at", EXISTING),
    *make_flag_cases(
        "archive retry",
        ("--log", "-p code=0 --log {uid}", "two"),
        (
            "--node-field-selector",
            "--restart-successful --node-field-selector displayName=first --log {uid}",
            "one",
        ),
        ("--output", "-p code=0 -o name {uid}", "."),
        ("--parameter", "-p code=0 --wait {uid}", "Succeeded at"),
        (
            "--restart-successful",
            "--restart-successful --node-field-selector displayName=first --log {uid}",
            "one",
        ),
        ("--selector", "-l name={failed} -o name", "{failed}"),
        ("--wait", "--wait {uid}", "Failed at"),
        ("--watch", "-p code=0 --watch {uid}", "Status: +Succeeded"),
    ),
    *make_flag_cases("auth token", ("", "", "Bearer ")),
    *make_flag_cases(
        "version", ("", "", "argo-server: v4"), ("--short", "--short", "argo-server: v4")
    ),
    make_refused_case(
        "sync create",
        "x --type database --limit 3",
        "need an Argo server",
        "limits of semaphores are in ConfigMaps",
    ),
    make_refused_case(
        "sync get",
        "x --type database",
        "need an Argo server",
        "limits of semaphores are in ConfigMaps",
    ),
    make_refused_case(
        "sync update",
        "x --type database --limit 3",
        "need an Argo server",
        "limits of semaphores are in ConfigMaps",
    ),
    make_refused_case(
        "sync delete",
        "x --type database",
        "need an Argo server",
        "limits of semaphores are in ConfigMaps",
    ),
    make_refused_case(
        "cron backfill",
        "stored --name {fresh} --start 2026-01-01T00:00:00Z --format 2006-01-02T15:04:05Z07:00",
        "is a Workflow, which the local runner does not support",
        "it creates workflows by a resource template, which runs here only for other kinds",
    ),
]


def template_cases(command: str, file: str, has_namespace: bool) -> list[Case]:
    """Return the cases of the commands for templates."""
    lists = [
        ("", "", "stored"),
        ("--output", "-o name", "stored"),
    ]
    if has_namespace:
        lists += [
            ("--all-namespaces", "-A", "argo +stored"),
            ("--selector", "-l team=a -o name", "stored"),
        ]
    renamed = f"{{files}}/{{fresh}}.{file}"
    return [
        *make_flag_cases(
            f"{command} create",
            ("", renamed, "Name: +{fresh}"),
            ("--output", f"-o name {renamed}", "{fresh}"),
            ("--strict", f"--strict {{files}}/unknown-field.{file}", "unknown field"),
        ),
        *make_flag_cases(
            f"{command} get",
            ("", "stored", "Name: +stored"),
            ("--output", "-o json stored", '"name": "stored"'),
        ),
        *make_flag_cases(f"{command} list", *lists),
        *make_flag_cases(
            f"{command} update",
            ("", f"{{files}}/stored.{file}", "Name: +stored"),
            ("--output", f"-o name {{files}}/stored.{file}", "stored"),
            ("--strict", f"--strict {{files}}/unknown-field.{file}", "unknown field"),
        ),
        *make_flag_cases(
            f"{command} lint",
            ("", f"{{files}}/stored.{file}", "no linting errors"),
            ("--output", f"-o simple {{files}}/stored.{file}", "no linting errors"),
            ("--strict", f"--strict {{files}}/unknown-field.{file}", "unknown field"),
        ),
    ]


CASES += template_cases("template", "template.yaml", has_namespace=True)
CASES += template_cases("cluster-template", "cluster-template.yaml", has_namespace=False)
CASES += template_cases("cron", "cron.yaml", has_namespace=True)
SHOW_FRESH = ("{fresh}", "cron get {fresh} -o json")
CASES += make_flag_cases(
    "cron create",
    ("--entrypoint", "--entrypoint main {files}/{fresh}.cron.yaml", *SHOW_FRESH, "main"),
    ("--generate-name", "--generate-name made- {files}/{fresh}.cron.yaml", "Name: +made-"),
    ("--name", "--name {fresh} {files}/stored.cron.yaml", "Name: +{fresh}"),
    ("--parameter", "-p message=cron {files}/{fresh}.cron.yaml", *SHOW_FRESH, "cron"),
    (
        "--parameter-file",
        "-f {files}/parameters.yaml {files}/{fresh}.cron.yaml",
        *SHOW_FRESH,
        "of a file",
    ),
    ("--schedule", "--schedule '1 2 3 4 *' {files}/{fresh}.cron.yaml", "1 2 3 4"),
    ("--serviceaccount", "--serviceaccount robot {files}/{fresh}.cron.yaml", *SHOW_FRESH, "robot"),
)
CASES += make_ignored_cases(
    "cron create", ("--labels", "-l by=me {files}/{fresh}.cron.yaml", "{fresh}")
)
CASES += make_ignored_cases(
    "cron update",
    ("--entrypoint", "--entrypoint other {files}/stored.cron.yaml", "stored"),
    ("--generate-name", "--generate-name made- {files}/stored.cron.yaml", "stored"),
    ("--labels", "-l by=me {files}/stored.cron.yaml", "stored"),
    ("--name", "--name other {files}/stored.cron.yaml", "stored"),
    ("--parameter", "-p message=cron {files}/stored.cron.yaml", "stored"),
    ("--parameter-file", "-f {files}/parameters.yaml {files}/stored.cron.yaml", "stored"),
    ("--serviceaccount", "--serviceaccount robot {files}/stored.cron.yaml", "stored"),
)
CASES += make_flag_cases("cron suspend", ("", "stored", "suspended", "cron list", "true"))
CASES += make_flag_cases("cron resume", ("", "stored", "resumed", "cron list", "false"))
for command in ("template", "cluster-template", "cron"):
    CASES += make_flag_cases(
        f"{command} delete",
        ("", "nothing", "not found|deleted"),
        ("--all", "--all", "deleted|No |^$"),
    )


def make_table() -> str:
    """Return the table of the page: the commands, and what their flags do."""
    lines = ["| command | flags that work | differences |", "| --- | --- | --- |"]
    for command in dict.fromkeys(case.command for case in CASES):
        cases = [case for case in CASES if case.command == command]
        working = [f"`{case.flag}`" for case in cases if case.flag and case.outcome == WORKS]
        remarks = [_describe(case) for case in cases if case.outcome in (DIFFERS, REFUSED)]
        ignored_flags = [f"`{case.flag}`" for case in cases if case.outcome == IGNORED]
        if ignored_flags:
            remarks.append(f"{', '.join(ignored_flags)}: `argo` does not send them to any server")
        lines.append(f"| `{command}` | {', '.join(working)} | {'; '.join(remarks)} |")
    return "\n".join(lines)


def _describe(case: Case) -> str:
    subject = f"`{case.flag}`" if case.flag else "the command"
    if case.outcome == REFUSED:
        return f"refused: {case.note}"
    return f"{subject}: {case.note}"


if __name__ == "__main__":
    print(make_table())
