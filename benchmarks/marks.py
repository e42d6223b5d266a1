"""The marks that gradscope is to reach, and where a run misses them."""

from collections.abc import Iterable, Sequence

from benchmarks.run import Cell
from benchmarks.workloads import REAL

# Ratios to a plain pass in float32 on a CPU. They follow from arithmetic:
# norms need no gradient of a weight, and a clipped mean needs it once, as a plain pass does.
MARKS = {
    ("mlp", "norms"): 1.05,
    ("mlp", "moments"): 1.4,
    ("mlp", "clipped"): 1.25,
    ("cnn", "norms"): 1.1,
    ("cnn", "moments"): 1.15,
    ("cnn", "clipped"): 1.15,
    ("resnet", "norms"): 1.05,
    ("resnet", "moments"): 1.6,
    ("resnet", "clipped"): 1.3,
    ("gpt", "norms"): 1.05,
    ("gpt", "moments"): 1.2,
    ("gpt", "clipped"): 1.1,
    ("lstm", "gradients"): 2.1,
    ("lstm", "norms"): 1.9,
    ("lstm", "moments"): 2.4,
    ("lstm", "clipped"): 2.3,
    ("mlp", "sjlt"): 8.0,
    # wherever a layer is linear
    **{(m, "kronecker"): 1.3 for m in ("mlp", "gpt", *REAL) if m != "resnet50"},
    ("gpt2", "command"): 2.2,
}
OF_PLAIN_MEMORY = 1.5  # of a plain pass's peak, beside the result: what real sizes may take
COMMAND_MEMORY = 5 * 10**9  # bytes, of the whole process
OF_FLOOR = 1.1  # times a plain pass and the writing of n·P numbers: "gradients" of the others
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
    lines += _large(where, table)
    lines += _faster(where, ratio, table.values())
    assert ours.timing is not None  # there is a ratio
    if key[1] == "command":
        return lines
    extra = (ours.timing.first - min(ours.timing.seconds)) / min(ours.timing.unit)
    if extra > FIRST_CALL:
        lines.append(
            f"{where}: the first call takes {extra:.1f} plain passes more than a later one"
        )
    return lines


def _large(where: str, table: dict[str, Cell]) -> list[str]:
    """Return a line if the peak of memory is beyond its mark, which real sizes have."""
    ours, unit = table[AUTO], table.get("plain backward")
    peak = ours.timing and ours.timing.peak_bytes
    if ours.model not in REAL or ours.task == "gradients" or peak is None:
        return []
    mark: float = COMMAND_MEMORY
    if ours.task != "command":
        plain = unit and unit.timing and unit.timing.peak_bytes
        if plain is None:
            return []
        mark = OF_PLAIN_MEMORY * plain + (ours.result_bytes or 0)
    if peak <= mark:
        return []
    return [f"{where}: {peak / 1e9:.2f} GB of memory, the mark is {mark / 1e9:.2f}"]


def _mark(key: tuple[str, str], table: dict[str, Cell]) -> float | None:
    if key in MARKS:
        return MARKS[key]
    floor = _ratio(table, "floor")
    if floor is None:
        return None
    return {"gradients": OF_FLOOR * floor, "file": floor / OF_WRITING}.get(key[1])


def _ratio(table: dict[str, Cell], method: str) -> float | None:
    return table[method].ratio if method in table else None


def _faster(where: str, ratio: float, cells: Iterable[Cell]) -> Sequence[str]:
    from benchmarks.methods import METHODS

    found = []
    for cell in cells:
        method = METHODS.get(cell.method)
        peer = method is not None and method.comparable and not method.ours
        if peer and cell.ratio is not None and cell.ratio < ratio:
            found.append(f"{where}: {cell.method} is faster, {cell.ratio:.2f} against {ratio:.2f}")
    return found
