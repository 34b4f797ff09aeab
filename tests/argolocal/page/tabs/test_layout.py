"""The layout of a graph: no box covers another, and every edge leads down."""

from itertools import combinations, pairwise

from hypothesis import given
from hypothesis import strategies as st

from argolocal.page.tabs.layout import Box, Layout, Size, arrange, smooth_path

Edge = tuple[int, int]


@st.composite
def graphs(draw: st.DrawFn) -> tuple[list[Size], list[Edge]]:
    """Graphs without cycles, with nodes of different sizes."""
    count = draw(st.integers(1, 14))
    lengths = st.integers(4, 400)
    sizes = [Size(draw(lengths), draw(lengths)) for _ in range(count)]
    pairs = list(combinations(range(count), 2))
    edges = draw(st.lists(st.sampled_from(pairs), unique=True, max_size=30)) if pairs else []
    order = draw(st.permutations(range(count)))
    return sizes, [(order[source], order[target]) for source, target in edges]


def do_boxes_overlap(first_box: Box, second_box: Box) -> bool:
    return (
        first_box.x < second_box.x + second_box.width - 0.01
        and second_box.x < first_box.x + first_box.width - 0.01
        and first_box.y < second_box.y + second_box.height - 0.01
        and second_box.y < first_box.y + first_box.height - 0.01
    )


def check(layout: Layout, sizes: list[Size]) -> None:
    for box, box_size in zip(layout.boxes, sizes, strict=True):
        assert (box.width, box.height) == (box_size.width, box_size.height)
        assert -0.01 <= box.x <= layout.width - box.width + 0.01
        assert -0.01 <= box.y <= layout.height - box.height + 0.01
    for first_box, second_box in combinations(layout.boxes, 2):
        assert not do_boxes_overlap(first_box, second_box)


@given(graphs())
def test_no_box_covers_another_and_edges_lead_down(graph: tuple[list[Size], list[Edge]]) -> None:
    sizes, edges = graph
    layout = arrange(sizes, edges)
    check(layout, sizes)

    for (source, target), points in zip(edges, layout.paths, strict=True):
        upper = layout.boxes[source]
        lower = layout.boxes[target]
        assert upper.y + upper.height < lower.y
        assert points[0] == (upper.x + upper.width / 2, upper.y + upper.height)
        assert points[-1] == (lower.x + lower.width / 2, lower.y)
        assert all(y <= next_y + 0.01 for (_, y), (_, next_y) in pairwise(points))


@given(graphs())
def test_an_edge_passes_beside_the_boxes_of_other_steps(
    graph: tuple[list[Size], list[Edge]],
) -> None:
    sizes, edges = graph
    layout = arrange(sizes, edges)
    for edge, points in zip(edges, layout.paths, strict=True):
        other_boxes = [box for node, box in enumerate(layout.boxes) if node not in edge]
        for (x, y), (next_x, next_y) in pairwise(points):
            if x == next_x:
                line = Box(x, y, 0.1, next_y - y)
                assert not any(do_boxes_overlap(line, box) for box in other_boxes)


@given(st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8)), max_size=30))
def test_a_cycle_does_not_stop_the_page(edges: list[Edge]) -> None:
    sizes = [Size(100, 40)] * 9
    check(arrange(sizes, [edge for edge in edges if edge[0] != edge[1]]), sizes)


def test_a_graph_without_crossings_is_drawn_without_crossings() -> None:
    sizes = [Size(100, 40)] * 6
    layout = arrange(sizes, [(0, 5), (1, 4), (2, 3)])
    centers = [box.x for box in layout.boxes]
    for (first_box, first_end), (second_box, second_end) in combinations(
        [(0, 5), (1, 4), (2, 3)], 2
    ):
        assert (centers[first_box] < centers[second_box]) == (
            centers[first_end] < centers[second_end]
        )


def test_an_empty_graph_has_an_empty_picture() -> None:
    assert arrange([], []) == Layout([], [], 0, 0)


def test_a_path_is_vertical_at_its_points() -> None:
    assert smooth_path([(0, 0), (0, 10), (20, 30)]) == "M0.0 0.0V10.0C0.0 20.0 20.0 20.0 20.0 30.0"
