"""Compute a layered layout of a directed graph, from top to bottom, with Sugiyama's method.

    layout = arrange([Size(180, 44), Size(180, 44)], [(0, 1)])
    layout.boxes[1].y > layout.boxes[0].y

In a layered layout, each node is in a layer below the layers of all its predecessors. A long edge
passes through an invisible node in each layer between its ends. Repeated passes over the layers of
the graph reduce the number of crossings (median heuristic). Further passes over the layers align
the nodes with their neighbours without changing their order.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

GAP_X = 20.0
GAP_Y = 46.0
# number of passes that reduce crossings
ORDER_SWEEPS = 8
# number of passes that align the nodes
POSITION_SWEEPS = 6
# width that an edge needs when it passes through a layer
BEND_WIDTH = 12.0

Edge = tuple[int, int]
Point = tuple[float, float]


@dataclass(frozen=True)
class Size:
    """The size of a node."""

    width: float
    height: float


@dataclass(frozen=True)
class Box:
    """The position of a node: its upper left corner, and its size."""

    x: float
    y: float
    width: float
    height: float


@dataclass(frozen=True)
class Layout:
    """The box of each node, the points of each edge from top to bottom (`paths`), and the size of
    the whole layout."""

    boxes: list[Box]
    paths: list[list[Point]]
    width: float
    height: float


def arrange(sizes: Sequence[Size], edges: Sequence[Edge]) -> Layout:
    """Return the layout of a graph. If the graph contains a cycle, an edge that leads back to an
    upper layer is drawn from the upper to the lower node."""
    layer_of = assign_layers(len(sizes), edges)
    chains: list[list[int]] = []
    links: list[Edge] = []
    all_sizes = list(sizes)

    for source, target in edges:
        if layer_of[source] > layer_of[target]:
            source, target = target, source
        chain = [source]
        for layer in range(layer_of[source] + 1, layer_of[target]):
            layer_of.append(layer)
            all_sizes.append(Size(BEND_WIDTH, 0))
            chain.append(len(all_sizes) - 1)
        chain.append(target)
        chains.append(chain)
        links += pairwise(chain)

    upper, lower = _neighbours(len(all_sizes), links)
    layers = _order_layers(layer_of, upper, lower)
    centers = _assign_centers(layers, [size.width for size in all_sizes], upper, lower)
    tops, heights = _stack(layers, [size.height for size in all_sizes])

    leftmost = min(
        (centers[node] - all_sizes[node].width / 2 for node in range(len(all_sizes))), default=0.0
    )
    boxes = [
        Box(
            centers[node] - size.width / 2 - leftmost,
            tops[layer_of[node]] + (heights[layer_of[node]] - size.height) / 2,
            size.width,
            size.height,
        )
        for node, size in enumerate(all_sizes)
    ]
    paths = [
        _path(chain, boxes, [(tops[layer_of[node]], heights[layer_of[node]]) for node in chain])
        for chain in chains
    ]
    width = max((box.x + box.width for box in boxes), default=0.0)
    height = tops[-1] + heights[-1] if heights else 0.0
    return Layout(boxes[: len(sizes)], paths, width, height)


def assign_layers(count: int, edges: Iterable[Edge]) -> list[int]:
    """Return the number of the layer of each node, from 0 at the top. A node is below all its
    predecessors. A node without predecessors is directly above its uppermost successor."""
    successors: list[list[int]] = [[] for _ in range(count)]
    open_edges = [0] * count
    for source, target in edges:
        if source != target:
            successors[source].append(target)
            open_edges[target] += 1

    is_source = [not number for number in open_edges]
    layer_of = [0] * count
    ready = [node for node in range(count) if is_source[node]]
    finished: list[int] = []
    candidates = iter(range(count))

    while len(finished) < count:
        if not ready:
            # only nodes of a cycle remain: continue with the first of these nodes
            ready = [next(node for node in candidates if open_edges[node] > 0)]
            open_edges[ready[0]] = 0
        node = ready.pop()
        finished.append(node)
        open_edges[node] = -1
        for successor in successors[node]:
            if open_edges[successor] <= 0:
                continue
            layer_of[successor] = max(layer_of[successor], layer_of[node] + 1)
            open_edges[successor] -= 1
            if not open_edges[successor]:
                ready.append(successor)

    for node in reversed(finished):
        if is_source[node] and successors[node]:
            nearest = min(layer_of[successor] for successor in successors[node])
            layer_of[node] = max(layer_of[node], nearest - 1)
    return layer_of


def _neighbours(count: int, links: Iterable[Edge]) -> tuple[list[list[int]], list[list[int]]]:
    """Return each node's neighbours in the layer above, and its neighbours in the layer below."""
    upper: list[list[int]] = [[] for _ in range(count)]
    lower: list[list[int]] = [[] for _ in range(count)]
    for source, target in links:
        upper[target].append(source)
        lower[source].append(target)
    return upper, lower


def _order_layers(
    layer_of: Sequence[int], upper: list[list[int]], lower: list[list[int]]
) -> list[list[int]]:
    """Return the nodes of each layer from left to right. Of the orders that were tried, the order
    with the fewest crossings of edges is returned."""
    layers: list[list[int]] = [[] for _ in range(max(layer_of, default=-1) + 1)]
    for node, layer in enumerate(layer_of):
        layers[layer].append(node)

    rank = [0.0] * len(layer_of)
    for layer in layers:
        for index, node in enumerate(layer):
            rank[node] = index

    best = [list(layer) for layer in layers]
    fewest = _count_crossings(layers, rank, lower)
    for sweep in range(ORDER_SWEEPS):
        if not fewest:
            break
        is_downward = sweep % 2 == 0
        neighbours = upper if is_downward else lower
        for layer in layers if is_downward else reversed(layers):
            keys = {
                node: median(rank[other] for other in neighbours[node])
                if neighbours[node]
                else rank[node]
                for node in layer
            }
            layer.sort(key=keys.__getitem__)
            for index, node in enumerate(layer):
                rank[node] = index

        crossings = _count_crossings(layers, rank, lower)
        if crossings < fewest:
            fewest = crossings
            best = [list(layer) for layer in layers]

    return best


def _count_crossings(
    layers: Iterable[Sequence[int]], rank: Sequence[float], lower: list[list[int]]
) -> int:
    """Return the number of pairs of links that cross each other. The number of crossings is the
    number of inversions of the lower ends if the links are sorted by their upper ends."""
    crossings = 0
    for layer in layers:
        ends = [end for node in layer for end in sorted(int(rank[low]) for low in lower[node])]
        size = max(ends, default=0) + 1
        # Fenwick tree with the number of ends so far, by rank
        tree = [0] * (size + 1)
        for count, end in enumerate(ends):
            index = end + 1
            not_greater = 0
            while index:
                not_greater += tree[index]
                index -= index & -index
            crossings += count - not_greater
            index = end + 1
            while index <= size:
                tree[index] += 1
                index += index & -index
    return crossings


def _assign_centers(
    layers: list[list[int]],
    widths: Sequence[float],
    upper: list[list[int]],
    lower: list[list[int]],
) -> list[float]:
    """Return the x coordinate of the center of each node. The center of a node is close to the mean
    of the node's neighbours, but nodes do not overlap."""
    centers = [0.0] * len(widths)
    for layer in layers:
        position = 0.0
        for node in layer:
            centers[node] = position + widths[node] / 2
            position += widths[node] + GAP_X
        shift = (position - GAP_X) / 2
        for node in layer:
            centers[node] -= shift

    for sweep in range(POSITION_SWEEPS):
        is_downward = sweep % 2 == 0
        neighbours = upper if is_downward else lower
        for layer in layers if is_downward else reversed(layers):
            targets = [
                sum(centers[other] for other in neighbours[node]) / len(neighbours[node])
                if neighbours[node]
                else centers[node]
                for node in layer
            ]
            # give the bends of long edges a higher weight, so that long edges become straight
            weights = [4.0 if widths[node] == BEND_WIDTH else 1.0 for node in layer]
            for node, center in zip(
                layer, _separate(targets, [widths[node] for node in layer], weights), strict=True
            ):
                centers[node] = center
    return centers


def _separate(
    targets: Sequence[float], widths: Sequence[float], weights: Sequence[float]
) -> list[float]:
    """Return the centers of the nodes of a layer, in the same order and without overlaps, with the
    smallest sum of squared distances to their targets (pool adjacent violators)."""
    offsets: list[float] = []
    position = 0.0
    for index, width in enumerate(widths):
        if index:
            position += widths[index - 1] / 2 + GAP_X + width / 2
        offsets.append(position)

    # blocks of adjacent nodes that touch each other: (weighted mean, weight, number of nodes)
    blocks: list[tuple[float, float, int]] = []
    for target, offset, weight in zip(targets, offsets, weights, strict=True):
        mean = target - offset
        count = 1
        while blocks and blocks[-1][0] > mean:
            other_mean, other_weight, other_count = blocks.pop()
            total = weight + other_weight
            mean = (mean * weight + other_mean * other_weight) / total
            weight = total
            count += other_count
        blocks.append((mean, weight, count))

    means = [mean for mean, _, count in blocks for _ in range(count)]
    return [mean + offset for mean, offset in zip(means, offsets, strict=True)]


def _stack(
    layers: Sequence[Sequence[int]], heights: Sequence[float]
) -> tuple[list[float], list[float]]:
    """Return the y coordinate of the top of each layer, and its height."""
    layer_heights = [max((heights[node] for node in layer), default=0.0) for layer in layers]
    tops: list[float] = []
    position = 0.0
    for height in layer_heights:
        tops.append(position)
        position += height + GAP_Y
    return tops, layer_heights


def _path(
    chain: Sequence[int], boxes: Sequence[Box], layers: Sequence[tuple[float, float]]
) -> list[Point]:
    """Return the points of an edge, from the lower side of the first node of a chain to the upper
    side of the last node. `layers`: (top, height) of the layer of each node."""
    first_box = boxes[chain[0]]
    last = boxes[chain[-1]]
    points = [(first_box.x + first_box.width / 2, first_box.y + first_box.height)]
    # if the node is less high than its layer, the edge first goes vertically to the end of the
    # layer
    if first_box.y + first_box.height < layers[0][0] + layers[0][1]:
        points.append((points[0][0], layers[0][0] + layers[0][1]))

    for node, (top, height) in zip(chain[1:-1], layers[1:-1], strict=True):
        x = boxes[node].x + BEND_WIDTH / 2
        points.append((x, top))
        if height:
            points.append((x, top + height))

    end = (last.x + last.width / 2, last.y)
    if last.y > layers[-1][0]:
        points.append((end[0], layers[-1][0]))
    points.append(end)
    return points


def smooth_path(points: Sequence[Point]) -> str:
    """Return an SVG path through the points that is vertical at each point."""
    x, y = points[0]
    parts = [f"M{x:.1f} {y:.1f}"]
    for next_x, next_y in points[1:]:
        if abs(next_x - x) < 0.5:
            parts.append(f"V{next_y:.1f}")
        else:
            middle = (y + next_y) / 2
            parts.append(
                f"C{x:.1f} {middle:.1f} {next_x:.1f} {middle:.1f} {next_x:.1f} {next_y:.1f}"
            )
        x, y = next_x, next_y
    return "".join(parts)
