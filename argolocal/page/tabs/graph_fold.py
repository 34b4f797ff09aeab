"""Determine the boxes that a graph draws for the steps of a group. A box of a graph is called a
member. Many similar steps are folded into one member.

A page never draws more than about MAX_MEMBERS members of a group. The identifier of a folded member
is `FIRST+N`: the identifier of its first step, and the number of its other steps. Users can open a
folded member like a group.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from argolocal.page.tabs.graph_plan import Plan, PlannedStep, combine_phases
from argolocal.page.tabs.layout import assign_layers

MAX_MEMBERS = 60
# maximum number of members if each member consists of the steps of successive layers
MAX_BLOCKS = 24
# minimum number of steps with the same template, dependencies and dependents that are folded into
# one member
MIN_EQUAL_STEPS = 8

# function that returns True for an internal step, which a program has added to the workflow
IsInternal = Callable[[PlannedStep], bool]
# function that returns, for the workflow of a plan, the function that recognizes internal steps
FindInternal = Callable[[Plan], IsInternal]


@dataclass(frozen=True)
class Member:
    """One box of a drawn graph. `steps`: one step, or the steps of a folded member. `has_edges` is
    True if steps of a folded member depend on each other."""

    address: str
    label: str
    steps: tuple[PlannedStep, ...]
    has_edges: bool = False

    @property
    def is_fold(self) -> bool:
        return len(self.steps) > 1

    @property
    def phase(self) -> str:
        """The combined phase of the member's steps."""
        return combine_phases(self.counts)

    @property
    def counts(self) -> Counter[str]:
        """The number of steps by phase."""
        return Counter(step.phase for step in self.steps)


@dataclass(frozen=True)
class Members:
    """The members of a group and their edges, as pairs of indexes."""

    members: list[Member]
    edges: list[tuple[int, int]]


def hide_internal(
    steps: Sequence[PlannedStep], is_internal: IsInternal
) -> tuple[list[PlannedStep], int]:
    """Return the steps that are not internal, and the number of the other steps. If a returned step
    depends on an internal step, it depends on the dependencies of the internal step instead."""
    internal = {step.label: step.needs for step in steps if is_internal(step)}
    visible_steps: list[PlannedStep] = []
    for step in steps:
        if step.label in internal:
            continue
        needs: dict[str, None] = {}
        visited: set[str] = set()
        stack = list(reversed(step.needs))
        while stack:
            need = stack.pop()
            if need in visited:
                continue
            visited.add(need)
            if need in internal:
                stack += reversed(internal[need])
            else:
                needs[need] = None
        visible_steps.append(replace(step, needs=tuple(needs)))
    return visible_steps, len(internal)


def fold(plan: Plan, steps: Sequence[PlannedStep], max_members: int = MAX_MEMBERS) -> Members:
    """Return the members that represent the steps of a group in the graph."""
    groups = _fold_equal(steps)
    if len(groups) > max_members:
        layers = _layers(steps)
        groups = _group(steps, lambda step: (layers[step.label], step.template.get("name")))

        # a long chain with one member per layer is not more informative than a few members
        layer_count = max(layers.values()) + 1
        is_chain = len(groups) == layer_count > MAX_BLOCKS
        if len(groups) > max_members or is_chain:
            layers_per_member = -(-layer_count // MAX_BLOCKS)
            groups = _group(steps, lambda step: layers[step.label] // layers_per_member)

    return _connect(plan, groups)


def find_fold(plan: Plan, steps: Sequence[PlannedStep], address: str) -> Member | None:
    """Return the folded member of a group with the identifier `address`, or None."""
    pending = [list(steps)]
    while pending:
        for member in fold(plan, pending.pop()).members:
            if member.address == address:
                return member
            if member.is_fold and member.has_edges:
                pending.append(list(member.steps))
    return None


def find_folds_around(
    plan: Plan, steps: Sequence[PlannedStep], inner_step: PlannedStep
) -> list[str]:
    """Return the identifiers of folded members that contain `inner_step` and whose steps depend on
    each other, from the outermost to the innermost."""
    addresses: list[str] = []
    while True:
        members = fold(plan, steps).members
        member = next(
            (
                member
                for member in members
                if member.has_edges and any(step.label == inner_step.label for step in member.steps)
            ),
            None,
        )
        if member is None:
            return addresses
        addresses.append(member.address)
        steps = member.steps


def _fold_equal(steps: Sequence[PlannedStep]) -> list[list[PlannedStep]]:
    """Return the steps in groups: at least MIN_EQUAL_STEPS equal steps are one group, and each
    other step is a group of its own."""
    dependents: dict[str, list[str]] = {}
    for step in steps:
        for need in step.needs:
            dependents.setdefault(need, []).append(step.label)

    def key(step: PlannedStep) -> tuple[object, ...]:
        template = str(step.template.get("name"))
        return template, step.scope, step.kind, step.needs, tuple(dependents.get(step.label, ()))

    groups = _group(steps, key)
    return [
        members
        for group in groups
        for members in ([group] if len(group) >= MIN_EQUAL_STEPS else [[step] for step in group])
    ]


def _group(
    steps: Sequence[PlannedStep], key: Callable[[PlannedStep], object]
) -> list[list[PlannedStep]]:
    """Return the steps in groups with the same key, in the order of the first step of each
    group."""
    groups: dict[object, list[PlannedStep]] = {}
    for step in steps:
        groups.setdefault(key(step), []).append(step)
    return list(groups.values())


def _layers(steps: Sequence[PlannedStep]) -> dict[str, int]:
    """Return the layer of each step, by its label."""
    index = {step.label: number for number, step in enumerate(steps)}
    edges = [
        (index[need], number)
        for number, step in enumerate(steps)
        for need in step.needs
        if need in index
    ]
    return dict(zip(index, assign_layers(len(index), edges), strict=True))


def _connect(plan: Plan, groups: Sequence[Sequence[PlannedStep]]) -> Members:
    """Return a member for each group of steps, and the edges between the members."""
    member_of = {step.label: index for index, group in enumerate(groups) for step in group}
    edges: dict[tuple[int, int], None] = {}
    # members that contain steps that depend on each other
    linked_members: set[int] = set()

    for index, group in enumerate(groups):
        for step in group:
            for need in step.needs:
                source = member_of.get(need)
                if source == index:
                    linked_members.add(index)
                elif source is not None:
                    edges[source, index] = None

    members = [
        _make_member(plan, group, index in linked_members) for index, group in enumerate(groups)
    ]
    return Members(members, list(edges))


def _make_member(plan: Plan, steps: Sequence[PlannedStep], has_edges: bool) -> Member:
    first_step = steps[0]
    address = plan.address(first_step)
    if len(steps) == 1:
        return Member(address, first_step.label, (first_step,))
    label = f"{first_step.label} … {steps[-1].label}"
    return Member(f"{address}+{len(steps) - 1}", label, tuple(steps), has_edges)


def remove_implied_edges(count: int, edges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the edges without the implied edges, whose nodes are also connected by a longer path.
    The removal is slow, so the number of edges must be small."""
    successors: list[list[int]] = [[] for _ in range(count)]
    for source, target in edges:
        successors[source].append(target)

    def is_implied(source: int, target: int) -> bool:
        stack = [other for other in successors[source] if other != target]
        visited = set(stack)
        while stack:
            node = stack.pop()
            if node == target:
                return True
            new_nodes = [successor for successor in successors[node] if successor not in visited]
            visited.update(new_nodes)
            stack += new_nodes
        return False

    return [edge for edge in edges if not is_implied(*edge)]


def order_by_phase(steps: Sequence[PlannedStep]) -> list[PlannedStep]:
    """Return the steps in the order failed, running or interrupted, then all others."""
    ranks: Mapping[str, int] = {"Failed": 0, "Error": 0, "Interrupted": 1, "Running": 1}
    return sorted(steps, key=lambda step: ranks.get(step.phase, 2))
