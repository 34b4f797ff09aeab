"""The graph of a run as an SVG picture: boxes, edges and links.

A closed group of steps is drawn as one box, an open group as a box that contains its steps. The
picture is controlled by query parameters and needs no JavaScript. The parameters are `open`
(identifiers of the open groups, separated by spaces), `root` (the group whose steps are drawn),
`node` (the selected step) and `all` (1: internal steps are drawn, too).
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from urllib.parse import quote, unquote, urlencode

from argolocal.common.wording import escape_control_chars, format_duration, truncate
from argolocal.errors import ConfigError
from argolocal.page.failure import address_of, find_failed_nodes, step_name
from argolocal.page.tabs.graph_fold import (
    IsInternal,
    Member,
    Members,
    find_fold,
    find_folds_around,
    fold,
    hide_internal,
    order_by_phase,
    remove_implied_edges,
)
from argolocal.page.tabs.graph_plan import Plan, PlannedStep
from argolocal.page.tabs.graph_words import (
    PHASE_WORDS,
    describe_counts_briefly,
    describe_dependencies,
    describe_loop,
    simplify_condition,
)
from argolocal.page.tabs.layout import Point, Size, arrange, smooth_path
from argolocal.view.summary import parse_timestamp

BOX = Size(212, 48)
JOIN = Size(6, 6)
PADDING = 14
HEAD_HEIGHT = 54
GRID_COLUMNS = 3
GRID_GAP = 12
# maximum number of items that are drawn in an open loop
MAX_ITEMS = 12
# a run with at most this number of steps is drawn with all groups open
MAX_OPEN_STEPS = 40
# maximum number of boxes in a picture
MAX_DRAWN = 250
# maximum number of characters of a label in a box
MAX_LABEL = 21
IDLE_PHASES = ("Planned", "Skipped", "Omitted")


@dataclass(frozen=True)
class DrawnNode:
    """A box of the picture. `name`: identifier of the step. `title` and `detail`: the two lines of
    text in the box. `link` is the URL of the step's details. `toggle` is the URL that opens or
    closes the box, or "" for a box that contains no steps."""

    name: str
    label: str
    title: str
    detail: str
    phase: str
    kind: str
    condition: str
    x: float
    y: float
    width: float
    height: float
    is_open: bool = False
    is_selected: bool = False
    link: str = ""
    toggle: str = ""


@dataclass(frozen=True)
class DrawnEdge:
    """An edge of the picture. `path`: an SVG path. `is_idle` is True if the step at the end of the
    edge has not run."""

    path: str
    is_idle: bool


@dataclass(frozen=True)
class Hook:
    """An exit handler or another hook. `owner`: name of the step to which the hook belongs, or ""
    for a hook of the run."""

    name: str
    label: str
    owner: str
    condition: str
    phase: str
    link: str


@dataclass(frozen=True)
class Crumb:
    """A link to a group that contains the drawn graph; the user follows it to leave the group."""

    label: str
    link: str


@dataclass(frozen=True)
class Graph:
    """The picture of a graph, and the hooks, which are not drawn. `crumbs`: links to the groups
    that contain the drawn group. `hidden`: sentences about steps that are not drawn.
    `internal_link` is the URL that shows or hides the internal steps."""

    nodes: list[DrawnNode]
    edges: list[DrawnEdge]
    width: float
    height: float
    hooks: list[Hook]
    crumbs: list[Crumb]
    hidden: list[str]
    internal_count: int = 0
    internal_link: str = ""


@dataclass(frozen=True)
class Piece:
    """A part of the picture, with coordinates relative to its upper left corner. `edges`: (points,
    True if the step at the end has not run)."""

    nodes: list[DrawnNode]
    edges: list[tuple[list[Point], bool]]
    width: float
    height: float


class Links:
    """Creates URLs of this tab with changed query parameters."""

    def __init__(self, query: Mapping[str, str]) -> None:
        names = ("open", "root", "node", "all")
        self.query: dict[str, str] = {name: query[name] for name in names if name in query}

    def to(self, anchor: str = "", **changes: str | None) -> str:
        """Return a URL with some query parameters changed. The value None removes a query
        parameter."""
        values = {**self.query, **changes}
        query = urlencode({name: value for name, value in values.items() if value is not None})
        return f"?{query}{anchor}"


class Drawing:
    """Draws the graph of a plan."""

    def __init__(self, plan: Plan, query: Mapping[str, str], is_internal: IsInternal) -> None:
        self.plan = plan
        self.links = Links(query)
        self.shows_internal = query.get("all") == "1"
        self.is_internal = is_internal
        self.internal_count = 0
        self.hidden_count = 0
        self.drawn_count = 0
        self.selected = query.get("node", "")
        self.root = self._find_root(query.get("root", ""))
        self.open_groups = self._find_open_groups(query)

    def _find_root(self, address: str) -> PlannedStep:
        if not address:
            return self.plan.root
        root = self.plan.find(address)
        if not root or not root.is_group:
            raise ConfigError(f'"{truncate(address, 100)}" is not a group of steps in this run.')
        return root

    def _find_open_groups(self, query: Mapping[str, str]) -> set[str]:
        """Return the identifiers of the open groups. If the query does not contain open groups, all
        groups of a small run are open, and in a large run the groups around the failed step."""
        if "open" in query:
            return {unquote(word) for word in query["open"].split()}

        steps = list(islice(self.plan.walk(self.root, self.is_hidden), MAX_OPEN_STEPS + 1))
        if len(steps) <= MAX_OPEN_STEPS:
            return {self.plan.address(step) for step in steps if step.kind in ("dag", "steps")}

        failed_nodes = find_failed_nodes(self.plan.run) if self.plan.run.is_finished else []
        if not failed_nodes or self.plan.run.phase == "Succeeded":
            return set()
        path = self.plan.path(address_of(self.plan.run.name, failed_nodes[0]["name"]))
        open_groups: set[str] = set()
        for parent, step in pairwise(path):
            if parent.kind == "loop":
                break
            open_groups.add(self.plan.address(parent))
            open_groups.update(find_folds_around(self.plan, self.visible_children(parent), step))
        self.internal_count = 0
        return open_groups

    def is_hidden(self, step: PlannedStep) -> bool:
        """Return True if the step is internal and internal steps are hidden."""
        return not self.shows_internal and self.is_internal(step)

    def draw(self) -> Graph:
        """Return the picture of the group `root`."""
        if self.root.is_group:
            piece = self._draw_group(self.root)
        else:
            piece = self._draw_members(Members([self._member(self.root)], []))

        path = self.plan.path(self.plan.address(self.root))
        crumbs = [
            Crumb(
                step.label,
                self.links.to(root=self.plan.address(step) if index else None, open=None),
            )
            for index, step in enumerate(path if len(path) > 1 else [])
        ]

        hidden: list[str] = []
        if self.hidden_count:
            hidden.append(
                f"{self.hidden_count:,} further steps are in the boxes with + and in the table."
            )
        return Graph(
            nodes=piece.nodes,
            edges=[DrawnEdge(smooth_path(points), is_idle) for points, is_idle in piece.edges],
            width=round(piece.width + 2),
            height=round(piece.height + 2),
            hooks=[self._hook(hook) for hook in self.plan.all_hooks(self.root)],
            crumbs=crumbs,
            hidden=hidden,
            internal_count=self.internal_count,
            internal_link=self.links.to(all=None if self.shows_internal else "1"),
        )

    def visible_children(self, step: PlannedStep) -> list[PlannedStep]:
        """Return the steps of a group; internal steps are included only if the user has asked for
        them."""
        if step.kind == "loop":
            return self.plan.children(step)
        children, internal_count = hide_internal(self.plan.children(step), self.is_internal)
        self.internal_count += internal_count
        return self.plan.children(step) if self.shows_internal else children

    def counts(self, step: PlannedStep) -> Counter[str]:
        """Return the number of visible steps of a group by phase."""
        if step.kind == "loop":
            return self.plan.counts(step)
        return Counter(
            child.phase for child in self.plan.children(step) if not self.is_hidden(child)
        )

    def _draw_group(self, step: PlannedStep) -> Piece:
        if step.kind == "loop":
            return self._draw_grid(step, self.plan.children(step), self.plan.address(step))
        return self._draw_members(fold(self.plan, self.visible_children(step)))

    def _can_open(self, member: Member) -> bool:
        """Return True if a box contains steps, so that users can open it."""
        step = member.steps[0]
        if member.is_fold:
            return True
        if not step.is_group or step.phase in ("Omitted", "Skipped"):
            return False
        return step.kind == "loop" or bool(self.counts(step))

    def _draw_members(self, members: Members) -> Piece:
        """Draw members and their edges, with the steps of open members inside."""
        pieces = [self._draw_member(member) for member in members.members]
        edges = remove_implied_edges(len(pieces), members.edges)
        edges, join_count = _join_edges(len(pieces), edges)
        sizes = [Size(piece.width, piece.height) for piece in pieces] + [JOIN] * join_count
        layout = arrange(sizes, edges)

        nodes: list[DrawnNode] = []
        drawn_edges: list[tuple[list[Point], bool]] = []
        for (_, target), points in zip(edges, layout.paths, strict=True):
            is_idle = target < len(pieces) and members.members[target].phase in IDLE_PHASES
            drawn_edges.append((points, is_idle))
        for piece, box in zip(pieces, layout.boxes, strict=False):
            moved_piece = _move(piece, box.x, box.y)
            nodes += moved_piece.nodes
            drawn_edges += moved_piece.edges
        return Piece(nodes, drawn_edges, layout.width, layout.height)

    def _draw_member(self, member: Member) -> Piece:
        """Draw the box of a member, with its steps inside if it is open."""
        self.drawn_count += 1
        step = member.steps[0]
        can_open = self._can_open(member)
        is_open = can_open and member.address in self.open_groups and self.drawn_count <= MAX_DRAWN
        if not is_open:
            if can_open:
                self.hidden_count += sum(member.counts.values()) if member.is_fold else 0
                self.hidden_count += sum(self.counts(step).values()) if step.is_group else 0
            elif step.is_group:
                self.visible_children(step)
            return Piece([self._box(member, can_open, False)], [], BOX.width, BOX.height)

        if member.is_fold and member.has_edges:
            inner = self._draw_members(fold(self.plan, member.steps))
        elif member.is_fold:
            inner = self._draw_grid(None, member.steps, member.address)
        else:
            inner = self._draw_group(step)

        width = max(BOX.width, inner.width) + 2 * PADDING
        height = inner.height + HEAD_HEIGHT + PADDING
        frame = replace(self._box(member, True, True), width=width, height=height)
        moved_piece = _move(inner, (width - inner.width) / 2, HEAD_HEIGHT)
        return Piece([frame, *moved_piece.nodes], moved_piece.edges, width, height)

    def _draw_grid(
        self, loop: PlannedStep | None, steps: Sequence[PlannedStep], address: str
    ) -> Piece:
        """Draw steps in rows without edges. If there are more than MAX_ITEMS steps, draw failed
        steps first, and add a link to the steps that are not drawn."""
        drawn_steps = list(steps)
        if len(steps) > MAX_ITEMS:
            drawn_steps = order_by_phase(steps)[:MAX_ITEMS]

        pieces = [self._draw_member(self._member(step)) for step in drawn_steps]
        hidden_count = len(steps) - len(drawn_steps)
        if hidden_count:
            self.hidden_count += hidden_count
            pieces.append(self._draw_more(loop, len(steps), hidden_count, address))
        if not pieces:
            text = "no items yet" if loop and loop.phase == "Planned" else "no items"
            pieces.append(self._draw_note(address, text))

        nodes: list[DrawnNode] = []
        edges: list[tuple[list[Point], bool]] = []
        x = y = width = row_height = 0.0
        for index, piece in enumerate(pieces):
            if index and index % GRID_COLUMNS == 0:
                y += row_height + GRID_GAP
                x = row_height = 0.0
            moved_piece = _move(piece, x, y)
            nodes += moved_piece.nodes
            edges += moved_piece.edges
            x += piece.width + GRID_GAP
            width = max(width, x - GRID_GAP)
            row_height = max(row_height, piece.height)
        return Piece(nodes, edges, width, y + row_height)

    def _draw_more(
        self, loop: PlannedStep | None, count: int, hidden_count: int, address: str
    ) -> Piece:
        """Draw the box with a link to the steps that are not drawn."""
        note = self._draw_note(address, f"all {count:,} {'items' if loop else 'steps'}")
        node = replace(
            note.nodes[0],
            title=f"{hidden_count:,} more",
            link=self.links.to(node=address, anchor="#node"),
        )
        return Piece([node], [], BOX.width, BOX.height)

    def _draw_note(self, address: str, text: str) -> Piece:
        """Draw a box with a text instead of a step."""
        node = DrawnNode(
            name=address,
            label=text,
            title=text,
            detail="" if text.startswith("no ") else text,
            phase="",
            kind="more",
            condition="",
            x=0,
            y=0,
            width=BOX.width,
            height=BOX.height,
        )
        return Piece([node], [], BOX.width, BOX.height)

    def _member(self, step: PlannedStep) -> Member:
        return Member(self.plan.address(step), step.label, (step,))

    def _box(self, member: Member, can_open: bool, is_open: bool) -> DrawnNode:
        step = member.steps[0]
        open_groups = self.open_groups ^ {member.address}
        words = " ".join(quote(name, safe="/:[]+,=") for name in sorted(open_groups))
        if member.is_fold:
            condition = ""
            detail = describe_counts_briefly(member.counts)
        else:
            condition = describe_condition(step)
            detail = self.detail(step)

        return DrawnNode(
            name=member.address,
            label=escape_control_chars(member.label),
            title=title_of(member, MAX_LABEL - (4 if can_open else 0)),
            detail=truncate(escape_control_chars(detail), MAX_LABEL + 2 - (3 if can_open else 0)),
            phase=member.phase,
            kind="fold" if member.is_fold else step.kind or "step",
            condition=condition,
            x=0,
            y=0,
            width=BOX.width,
            height=BOX.height,
            is_open=is_open,
            is_selected=self.selected == member.address,
            link=self.links.to(node=member.address, anchor="#node"),
            toggle=self.links.to(open=words) if can_open else "",
        )

    def detail(self, step: PlannedStep) -> str:
        """Return the second line in the box of a step: the counts of a group, a condition, or the
        phase and the duration."""
        if step.phase == "Skipped" and step.task.get("when"):
            return f"not true: {simplify_condition(str(step.task['when']))}"
        counts = self.counts(step) if step.is_group else {}
        if counts and step.phase not in IDLE_PHASES:
            return describe_counts_briefly(counts)
        if step.phase == "Planned":
            if step.task.get("when"):
                return f"if {simplify_condition(str(step.task['when']))}"
            return describe_loop(step.task) if step.kind == "loop" else "not started"

        attempt_count = len(self.plan.attempts_of(step))
        words = [PHASE_WORDS.get(step.phase, step.phase.lower())]
        if attempt_count > 1:
            words = [f"{attempt_count} attempts"]
        seconds = duration_of(step)
        if seconds is not None and step.phase not in IDLE_PHASES:
            words.append(format_duration(seconds))
        return " · ".join(words)

    def _hook(self, hook: PlannedStep) -> Hook:
        owner, separator, _ = hook.node_name.rpartition(".onExit")
        if not separator:
            owner = hook.node_name.rpartition(".hooks.")[0]
        run = self.plan.run.name
        condition = simplify_condition(str(hook.task.get("when") or ""))
        address = self.plan.address(hook)
        return Hook(
            name=address,
            label=hook.label,
            owner="" if owner == run else step_name(run, owner),
            condition=condition,
            phase=hook.phase,
            link=self.links.to(node=address, anchor="#node"),
        )

    def find_fold(self, address: str) -> Member | None:
        """Return the folded member with this identifier, or None."""
        first_address, separator, _ = address.rpartition("+")
        path = self.plan.path(first_address) if separator else []
        if len(path) < 2:
            return None
        group = path[-2]
        steps = self.visible_children(group) if group.kind != "loop" else []
        return find_fold(self.plan, steps, address)


def describe_condition(step: PlannedStep) -> str:
    """Return the condition and the dependencies of a step in words."""
    sentences: list[str] = []
    dependencies = describe_dependencies(step.task)
    if dependencies:
        sentences.append(f"after {dependencies}")
    if step.task.get("when"):
        sentences.append(f"if {simplify_condition(str(step.task['when']))}")
    if step.kind == "loop":
        sentences.append(describe_loop(step.task))
    return ", ".join(sentences)


def duration_of(step: PlannedStep) -> float | None:
    """Return the seconds that a step took, or None if it has not ended."""
    node = step.node or {}
    if not node.get("startedAt") or not node.get("finishedAt"):
        return None
    return round(parse_timestamp(node["finishedAt"]) - parse_timestamp(node["startedAt"]), 3)


def title_of(member: Member, length: int) -> str:
    """Return the label of a member, shortened to at most `length` characters."""
    label = escape_control_chars(member.label)
    if member.is_fold and len(label) > length:
        count_text = f" +{len(member.steps) - 1:,}"
        first_label = escape_control_chars(member.steps[0].label)
        return shorten_label(first_label, length - len(count_text)) + count_text
    return shorten_label(label, length)


def shorten_label(text: str, length: int) -> str:
    """Return a text of at most `length` characters. A text that is longer than `length` loses its
    middle, because names often differ only at their ends."""
    if len(text) <= length:
        return text
    end = length // 3
    return f"{text[: length - end - 1]}…{text[-end:]}"


def _move(piece: Piece, x: float, y: float) -> Piece:
    nodes = [replace(node, x=node.x + x, y=node.y + y) for node in piece.nodes]
    edges = [
        ([(point_x + x, point_y + y) for point_x, point_y in points], is_idle)
        for points, is_idle in piece.edges
    ]
    return Piece(nodes, edges, piece.width, piece.height)


def _join_edges(count: int, edges: Sequence[tuple[int, int]]) -> tuple[list[tuple[int, int]], int]:
    """If each node of one set is linked to each node of another set, replace these edges by edges
    to a join point between the sets. Return the new edges and the number of join points, whose
    indexes start at `count`."""
    sources_of: dict[int, set[int]] = {}
    for source, target in edges:
        sources_of.setdefault(target, set()).add(source)

    targets_of: dict[frozenset[int], list[int]] = {}
    for target, sources in sources_of.items():
        targets_of.setdefault(frozenset(sources), []).append(target)

    joined_edges: list[tuple[int, int]] = []
    join_count = 0
    for sources, targets in targets_of.items():
        if len(sources) > 1 and len(targets) > 1 and len(sources) * len(targets) > 4:
            join = count + join_count
            join_count += 1
            joined_edges += [(source, join) for source in sorted(sources)]
            joined_edges += [(join, target) for target in targets]
        else:
            joined_edges += [(source, target) for target in targets for source in sorted(sources)]
    return joined_edges, join_count
