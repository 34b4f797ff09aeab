"""The HTTP routes of the actions: a GET request asks the user for confirmation, and a POST request
performs the action.

The form must contain the form token, so that a page of another site cannot submit the form.
access.py checks the login.
"""

import hmac
import secrets
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import parse_qsl

from pydantic import TypeAdapter, ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import BaseRoute, Route

from argolocal.errors import ConfigError
from argolocal.page.access import FORM_TOKEN
from argolocal.page.actions.action import Action, Outcome, PageAction, Plan, select_values
from argolocal.page.sources import Run

MAX_FORM_BYTES = 256 << 10
MAX_NOTES = 64
FORM_TYPE = "application/x-www-form-urlencoded"
FORM_VALUES = TypeAdapter(dict[str, str])


class PageMethods(Protocol):
    """The methods of `Page` that the actions use."""

    def find_run(self, name: str) -> Run: ...

    def answer(
        self, request: Request, content: type, value: object, template: str, **values: object
    ) -> Response: ...


@dataclass(frozen=True)
class Actions:
    """The actions on a run that are possible now."""

    actions: list[Plan]


class ActionPages:
    """Handles the HTTP requests for actions. `notes`: messages about the latest actions, by the
    random id in the query parameter `note` of the page that shows the message."""

    def __init__(
        self, page: PageMethods, actions: Sequence[Action], page_actions: Sequence[PageAction]
    ) -> None:
        self.page = page
        self.actions = {action.name: action for action in actions}
        self.page_actions = page_actions
        self.notes: OrderedDict[str, str] = OrderedDict()

    def routes(self) -> list[BaseRoute]:
        methods = ["GET", "POST"]
        page_routes = [
            Route(action.path, self._make_handler(action), methods=methods)
            for action in self.page_actions
        ]
        return [
            Route("/runs/{run}/actions", self.show_all),
            Route("/runs/{run}/actions/{action}", self.respond, methods=methods),
            *page_routes,
        ]

    def plans(self, run: Run) -> list[Plan]:
        """Return the plans of the actions that are possible now."""
        plans = (action.plan(run) for action in self.actions.values())
        return [plan for plan in plans if plan]

    def show_all(self, request: Request) -> Response:
        """Answer GET /runs/RUN/actions."""
        run = self.page.find_run(request.path_params["run"])
        actions = Actions(self.plans(run))
        return self.page.answer(
            request, Actions, actions, "actions.html", title=run.name, current_section="runs"
        )

    async def respond(self, request: Request) -> Response:
        """Answer GET and POST of /runs/RUN/actions/ACTION."""
        form = await read_form(request) if request.method == "POST" else None
        return await run_in_threadpool(self._respond, request, form)

    def _respond(self, request: Request, form: Mapping[str, str] | None) -> Response:
        run = self.page.find_run(request.path_params["run"])
        name = request.path_params["action"]
        action = self.actions.get(name)
        if action is None:
            raise HTTPException(404, f"the action {name[:100]!r} does not exist.")

        plan = action.plan(run)
        if plan is None:
            raise HTTPException(
                409, f"{run.name} is {run.phase.lower()}: the action {name!r} is not possible now."
            )
        return self.ask_or_act(
            request, plan, form, lambda values: action.perform(run, values), current_section="runs"
        )

    def _make_handler(self, action: PageAction) -> Callable[[Request], Awaitable[Response]]:
        """Return the function that responds to requests for an action."""

        async def respond(request: Request) -> Response:
            form = await read_form(request) if request.method == "POST" else None
            return await run_in_threadpool(answer, request, form)

        def answer(request: Request, form: Mapping[str, str] | None) -> Response:
            parameters = request.path_params
            plan = action.plan(parameters)
            if plan is None:
                raise HTTPException(404, "the action does not exist, or is not possible now.")
            return self.ask_or_act(
                request,
                plan,
                form,
                lambda values: action.perform(parameters, values),
                current_section=action.section,
            )

        return respond

    def ask_or_act(
        self,
        request: Request,
        plan: Plan,
        form: Mapping[str, str] | None,
        perform: Callable[[Mapping[str, str]], Outcome],
        current_section: str,
    ) -> Response:
        """If `form` is None, return a page with the plan of the action. If `form` is a form, call
        `perform` with its values, and return a redirect to the page with the result, or the outcome
        as JSON."""
        if form is None:
            return self.page.answer(
                request,
                Plan,
                plan,
                "action.html",
                title=plan.title,
                current_section=current_section,
                form_token=request.scope.get(FORM_TOKEN, ""),
            )

        outcome = perform(select_values(plan.fields, form))
        if "text/html" not in request.headers.get("accept", ""):
            body = TypeAdapter(Outcome).dump_json(outcome, indent=2)
            return Response(body, media_type="application/json")
        return RedirectResponse(f"{outcome.address}?note={self._add_note(outcome.message)}", 303)

    def _add_note(self, message: str) -> str:
        """Store a message and return its id."""
        note_id = secrets.token_hex(8)
        self.notes[note_id] = message
        while len(self.notes) > MAX_NOTES:
            self.notes.popitem(last=False)
        return note_id


async def read_form(request: Request) -> dict[str, str]:
    """Return the values of a form, or of a JSON object whose values are strings. Raises
    HTTPException for a malformed form, and for a form that another site may have sent."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_FORM_BYTES:
            raise HTTPException(413, f"a form may have at most {MAX_FORM_BYTES:,} bytes.")

    # JSON needs no form token, because browsers do not let pages of other origins send JSON
    if request.headers.get("content-type", "").partition(";")[0] == "application/json":
        try:
            return FORM_VALUES.validate_json(bytes(body) or b"{}", strict=True)
        except ValidationError:
            raise ConfigError("the body is malformed: it must be a JSON object of texts.") from None

    try:
        pairs = parse_qsl(body.decode(), keep_blank_values=True, max_num_fields=1000)
    except (UnicodeDecodeError, ValueError):
        raise ConfigError(f"the body is malformed: it must be a form ({FORM_TYPE}).") from None

    values = dict(pairs)
    token = values.pop(FORM_TOKEN, "")
    expected_token = str(request.scope.get(FORM_TOKEN, ""))
    # a program that sends the access token of the page does not need the form token
    has_bearer_token = "authorization" in request.headers
    if not has_bearer_token and not hmac.compare_digest(token.encode(), expected_token.encode()):
        raise HTTPException(403, "the form is not from this page: reload the page, and try again.")
    return values
