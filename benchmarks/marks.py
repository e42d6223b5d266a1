"""The marks that gradscope is to reach, and where a run misses them."""

from collections.abc import Iterable, Sequence

from benchmarks.run import Cell

# Ratios to a plain pass on two CPU cores in float32; that of "gradients" for the MLP is to the
# floor, because writing the numbers is most of it there.
MARKS = {
    ("mlp", "norms"): 0.9,
    ("mlp", "moments"): 1.4,
    ("mlp", "clipped"): 1.25,
    ("cnn", "gradients"): 1.05,
    ("cnn", "norms"): 1.1,
    ("cnn", "moments"): 1.2,
    ("cnn", "clipped"): 1.2,
    ("resnet", "gradients"): 1.5,
    ("resnet", "norms"): 1.35,
    ("resnet", "moments"): 1.8,
    ("resnet", "clipped"): 1.6,
    ("gpt", "gradients"): 0.95,
    ("gpt", "norms"): 0.9,
    ("gpt", "moments"): 0.95,
    ("gpt", "clipped"): 1.0,
    ("lstm", "gradients"): 3.0,
    ("lstm", "norms"): 2.5,
    ("lstm", "moments"): 3.0,
    ("lstm", "clipped"): 3.0,
}
OF_FLOOR = {("mlp", "gradients"): 1.15}
OF_WRITING = 0.85  # the share of the rate of raw writing that "file" is to have
FIRST_CALL = 5.0  # plain passes that the first call may take beyond a later one

AUTO = "gradscope auto"


def verdicts(cells: Iterable[Cell]) -> list[str]:
    """Return a line for each mark that is missed, and for each peer that is faster."""
    tables: dict[tuple[str, str], dict[str, Cell]] = {}
    for cell in cells:
        tables.setdefault((cell.model, cell.task), {})[cell.method] = cell
    return [line for key, table in tables.items() for line in _of_table(key, table)]


def _of_table(key: tuple[str, str], table: dict[str, Cell]) -> list[str]:
    where = f"{key[0]}, {key[1]}"
    ours = table.get(AUTO)
    if ours is None:
        return []
    ratio = ours.ratio
    if ratio is None:
        return [f"{where}: {AUTO} is {ours.status}: {ours.reason}"]
    lines = []
    mark = _mark(key, table)
    if mark is not None and ratio > mark:
        lines.append(f"{where}: {ratio:.2f}, the mark is {mark:.2f}")
    lines += _faster(where, ratio, table.values())
    assert ours.timing is not None  # there is a ratio
    extra = (ours.timing.first - min(ours.timing.seconds)) / min(ours.timing.unit)
    if extra > FIRST_CALL:
        lines.append(
            f"{where}: the first call takes {extra:.1f} plain passes more than a later one"
        )
    return lines


def _mark(key: tuple[str, str], table: dict[str, Cell]) -> float | None:
    floor = table["floor"].ratio if "floor" in table else None
    if floor is not None and key in OF_FLOOR:
        return OF_FLOOR[key] * floor
    if floor is not None and key[1] == "file":
        return floor / OF_WRITING
    return MARKS.get(key)


def _faster(where: str, ratio: float, cells: Iterable[Cell]) -> Sequence[str]:
    from benchmarks.methods import METHODS

    found = []
    for cell in cells:
        method = METHODS.get(cell.method)
        peer = method is not None and method.comparable and not method.ours
        if peer and cell.ratio is not None and cell.ratio < ratio:
            found.append(f"{where}: {cell.method} is faster, {cell.ratio:.2f} against {ratio:.2f}")
    return found
