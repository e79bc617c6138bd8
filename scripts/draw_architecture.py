"""Draw docs/architecture.svg from the imports: the rooms of the project, floor by floor.

    python scripts/draw_architecture.py           write docs/architecture.svg
    python scripts/draw_architecture.py --check   print circles and arrows that point up; exit code 1 if there are any

A room is a package (or a file beside it). An import anywhere in a file counts, also inside a function; only those under
`if TYPE_CHECKING:` do not. Arrows point from the importing room down to the imported one. An arrow that a longer path
implies is not drawn.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("run.py", "scripts", "pqcache", "baselines")

# From the top down. A room may import rooms of its own floor or of a lower one.
FLOORS: tuple[tuple[str, ...], ...] = (
    ("run", "scripts"),
    ("pqcache.harness.command",),
    ("pqcache.harness.launch",),
    ("pqcache.harness.run",),
    ("pqcache.harness.report", "pqcache.harness.lookup"),
    ("pqcache.harness.config",),
    ("pqcache.harness.tasks",),
    ("pqcache.api",),
    ("pqcache.embedded", "pqcache.diagnostics", "baselines", "pqcache.pq", "pqcache.measure"),
    ("pqcache.selective",),
    ("pqcache.device",),
    ("pqcache.store",),
    ("pqcache.kernels",),
    ("pqcache.registry", "pqcache.naming", "pqcache.atomic", "pqcache.fields", "pqcache.places", "pqcache.sources"),
)
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}

Graph = dict[str, set[str]]

# What each room is for, one line under its name.
SAYS = {
    "run": "the command",
    "scripts": "benchmarks, training",
    "pqcache.harness.command": "what is typed",
    "pqcache.harness.launch": "the plan, times, progress, engines",
    "pqcache.harness.run": "models, lm-eval adapter, cells",
    "pqcache.harness.report": "rows, tables, figures",
    "pqcache.harness.lookup": "list=, explain=, help",
    "pqcache.harness.config": "options, composition, identity",
    "pqcache.harness.tasks": "one file per benchmark",
    "baselines": "every other method",
    "pqcache.api": "pqcache.use and pqcache.methods",
    "pqcache.pq": "PQCache",
    "pqcache.diagnostics": "recall, mass, traces",
    "pqcache.embedded": "the small trained model",
    "pqcache.measure": "rooflines, geometries",
    "pqcache.selective": "the shared interface: method, layer, cache, three families",
    "pqcache.device": "decode steps by Triton kernels",
    "pqcache.store": "where K and V live",
    "pqcache.kernels": "numba kernels",
    "pqcache.registry": "table of methods",
    "pqcache.naming": "did-you-mean",
    "pqcache.fields": "options of dataclasses",
    "pqcache.places": "where files are",
    "pqcache.sources": "options read as text",
    "pqcache.atomic": "whole files or none",
}


def modules(root: Path = ROOT) -> dict[str, Path]:
    """Dotted module name -> file, of everything below SOURCES."""
    files: dict[str, Path] = {}
    for source in SOURCES:
        path = root / source
        for file in [path] if path.is_file() else sorted(path.rglob("*.py")):
            name = ".".join(file.relative_to(root).with_suffix("").parts)
            files[name.removesuffix(".__init__")] = file
    return files


def imports(files: dict[str, Path]) -> Graph:
    """Module -> the project's modules that it imports."""
    return {name: set(_imported(name, file, files)) - {name} for name, file in files.items()}


def _imported(name: str, file: Path, files: dict[str, Path]) -> Iterator[str]:
    for node in _nodes(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in files)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:  # relative to the package of this module
                package = name.split(".") if file.stem == "__init__" else name.split(".")[:-1]
                base = ".".join([*package[: len(package) - node.level + 1], *base.split(".")]).rstrip(".")
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                if inner in files or base in files:
                    yield inner if inner in files else base


def _nodes(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those under `if TYPE_CHECKING:`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            for other in child.orelse:
                yield other
                yield from _nodes(other)
            continue
        yield child
        yield from _nodes(child)


def room_of(module: str) -> str:
    """The room a module stands in: the longest room name that it begins with."""
    parts = module.split(".")
    for end in range(len(parts), 0, -1):
        if (room := ".".join(parts[:end])) in FLOOR_OF:
            return room
    return module


def between_rooms(graph: Graph) -> Graph:
    """The same graph between rooms. Bare packages (`pqcache`, `pqcache.harness`) are no rooms."""
    rooms: Graph = {}
    for module, targets in graph.items():
        for target in targets:
            here, there = room_of(module), room_of(target)
            if here != there and here in FLOOR_OF and there in FLOOR_OF:
                rooms.setdefault(here, set()).add(there)
    return rooms


def circles(graph: Graph) -> list[list[str]]:
    """Groups of nodes that import each other, directly or through others (Tarjan's strongly connected components)."""
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    result: list[list[str]] = []

    def visit(node: str) -> None:
        order[node] = lowest[node] = len(order)
        stack.append(node)
        for target in sorted(graph.get(node, ())):
            if target not in order:
                visit(target)
            if target in stack:
                lowest[node] = min(lowest[node], lowest[target])
        if lowest[node] == order[node]:
            at = stack.index(node)
            if len(stack) - at > 1:
                result.append(sorted(stack[at:]))
            del stack[at:]

    for node in sorted(graph):
        if node not in order:
            visit(node)
    return result


def arrows_up(graph: Graph) -> list[tuple[str, str]]:
    """(importing module, imported module) wherever the imported one stands on a higher floor."""
    pairs = [(a, b) for a, targets in sorted(graph.items()) for b in sorted(targets)]
    return [(a, b) for a, b in pairs if _floor(a) > _floor(b)]


def _floor(module: str) -> int:
    return FLOOR_OF.get(room_of(module), len(FLOORS))  # a bare package: below all


def unplaced(files: dict[str, Path]) -> list[str]:
    """Modules that stand in no room, except `__init__` files. A new folder needs a floor."""
    return [name for name, file in files.items() if room_of(name) not in FLOOR_OF and file.stem != "__init__"]


def needed(rooms: Graph) -> list[tuple[str, str]]:
    """The arrows that no longer path implies."""

    def reaches(start: str, goal: str) -> bool:
        seen, todo = set(), [target for target in rooms.get(start, ()) if target != goal]
        while todo:
            node = todo.pop()
            if node == goal:
                return True
            if node not in seen:
                seen.add(node)
                todo.extend(rooms.get(node, ()))
        return False

    return [(a, b) for a in sorted(rooms) for b in sorted(rooms[a]) if not reaches(a, b)]


# -- the picture -------------------------------------------------------------------------------------------------------

# In pixels: width of the sheet, top of the first floor, floor to floor, height of a box, space between boxes.
WIDTH, TOP, STEP, HIGH, GAP = 1080, 54, 88, 50, 18

Box = tuple[float, float, float]  # left, top, width


def boxes() -> dict[str, Box]:
    """Room -> its box."""
    placed = {}
    for floor, rooms in enumerate(FLOORS):
        widths = [max(150.0, 7.0 * max(len(SAYS[room]), len(room) + 2) + 24) for room in rooms]
        left = (WIDTH - sum(widths) - GAP * (len(rooms) - 1)) / 2
        for room, width in zip(rooms, widths):
            placed[room] = (left, TOP + STEP * floor, width)
            left += width + GAP
    return placed


def svg(rooms: Graph) -> str:
    """The picture as text; the same imports give the same text."""
    placed = boxes()
    height = TOP + STEP * len(FLOORS)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="Helvetica, Arial, sans-serif">',
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0,0 L8,4 L0,8 z" fill="#5b6573"/></marker></defs>',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        f'<text x="{WIDTH / 2}" y="30" text-anchor="middle" font-size="17" fill="#1d2530">'
        "Who imports whom: arrows point down, and there is no circle</text>",
    ]
    for a, b in needed(rooms):
        if FLOOR_OF[b] == len(FLOORS) - 1:
            continue  # every floor may use these; their arrows would hide the others
        between = [placed[room] for floor in FLOORS[FLOOR_OF[a] + 1 : FLOOR_OF[b]] for room in floor]
        curve = _curve(placed[a], placed[b], between)
        lines.append(f'<path d="{curve}" fill="none" stroke="#5b6573" marker-end="url(#tip)"/>')
    bottom = TOP + STEP * (len(FLOORS) - 1) - 12
    lines.append(
        f'<text x="{WIDTH / 2}" y="{bottom}" text-anchor="middle" font-size="11.5" fill="#4a5563">'
        "single files that every floor may use (arrows left out)</text>"
    )
    for room, (left, top, width) in placed.items():
        name = (
            "run.py" if room == "run" else room.replace(".", "/") + ("" if FLOOR_OF[room] == len(FLOORS) - 1 else "/")
        )
        middle = left + width / 2
        lines += [
            f'<rect x="{left:.0f}" y="{top}" width="{width:.0f}" height="{HIGH}" rx="6" fill="#eef3fa" stroke="#3d6fb4"/>',
            f'<text x="{middle:.0f}" y="{top + 21}" text-anchor="middle" font-size="14" fill="#1d2530">{name}</text>',
            f'<text x="{middle:.0f}" y="{top + 39}" text-anchor="middle" font-size="11.5" fill="#4a5563">{SAYS[room]}</text>',
        ]
    return "\n".join([*lines, "</svg>"]) + "\n"


def _curve(start: Box, end: Box, between: list[Box]) -> str:
    """An arrow: along the floor, straight down to the next floor, or past the boxes of the floors between."""
    (x, y, w), (u, v, t) = start, end
    if y == v:
        right = u > x
        return f"M{x + w if right else x:.0f},{y + HIGH / 2:.0f} L{u if right else u + t:.0f},{v + HIGH / 2:.0f}"
    a, b = x + w / 2, u + t / 2
    if not between:
        bend = (v - y - HIGH) / 2
        return f"M{a:.0f},{y + HIGH} C{a:.0f},{y + HIGH + bend:.0f} {b:.0f},{v - bend:.0f} {b:.0f},{v - 1}"
    low, high = leftmost(between), rightmost(between)
    right = b > high if not low < b < high else a > (low + high) / 2
    lane = max(high + 80, b) if right else min(low - 80, b)
    side = x + w if right else x
    return f"M{side:.0f},{y + HIGH / 2:.0f} C{lane:.0f},{y + HIGH / 2:.0f} {lane:.0f},{v - STEP:.0f} {b:.0f},{v - 1}"


def leftmost(boxes: list[Box]) -> float:
    return min(left for left, _, _ in boxes)


def rightmost(boxes: list[Box]) -> float:
    return max(left + width for left, _, width in boxes)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="draw nothing; exit 1 if a circle or an arrow up exists")
    arguments = parser.parse_args()
    files = modules()
    graph = imports(files)
    rooms = between_rooms(graph)
    if not arguments.check:
        target = ROOT / "docs" / "architecture.svg"
        target.write_text(svg(rooms), encoding="utf-8")
        print(target)
        return 0
    rings = [*circles(graph), *circles(rooms)]
    up = arrows_up(graph)
    for ring in rings:
        print("circle:", ", ".join(ring))
    for a, b in up:
        print(f"arrow up: {a} -> {b}")
    for name in (lost := unplaced(files)):
        print(f"in no room: {name}")
    print(f"{len(files)} modules, {len(rings)} circles, {len(up)} arrows up")
    return 1 if rings or up or lost else 0


if __name__ == "__main__":
    sys.exit(main())
