"""The chains that result files name, bound as far as a merge needs them.

A file says which code its chains run, and a file comes from somewhere else: nothing is run unless
the user names it.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from gradscope.core.grammar import Stage, parse
from gradscope.errors import RefusedError, ResultFileError, SpecError
from gradscope.run.job import stages_digests
from gradscope.run.shards import require_one_pass
from gradscope.stages.chain import Chain, bind
from gradscope.stages.reducers import reducers
from gradscope.storage import Parts
from gradscope.storage.resume import differences


def reduced_chains(parts: Parts, code: Iterable[Path] = ()) -> dict[int, Chain]:
    """Return the reduced chains by number, from their reducers on.

    Args:
        parts: The files.
        code: Python files that may be run.

    Raises:
        ResultFileError: What is to be a chain is none.
        RefusedError: A chain takes the mean of each file only, or needs code that is not among
            `code` or is not what the run had.
    """
    with _of(parts):
        return _reduced(parts, code)


def _reduced(parts: Parts, code: Iterable[Path]) -> dict[int, Chain]:
    stages = [parse(text) for text, _ in parts.chains]
    if not parts.identity["shard"]:  # of a shard this is known
        for chain in stages:
            _require_one_pass(chain)
    ends = {k: _end(stages[k]) for k, (_, reduced) in enumerate(parts.chains) if reduced}
    if any(map(_own, ends.values())):
        _require_known_code(parts, stages, code)
    return {k: bind(_text(end)) for k, end in ends.items()}


@contextmanager
def _of(parts: Parts) -> Iterator[None]:
    """Say that a chain is the files' own and not what the user wrote."""
    try:
        yield
    except SpecError as error:
        raise ResultFileError(
            f"the files hold a chain that is none here: {error.what}",
            where=str(parts.files[0].path),
            remedy=f"{error.remedy or ''}\nMerge them with what computed them: the same version, "
            "and the packages that its stages are from.".lstrip(),
        ) from error


def _end(stages: tuple[Stage, ...]) -> tuple[Stage, ...]:
    """Return a chain's stages from its reducer on; all, where the reducer is the user's own."""
    first = next((k for k, stage in enumerate(stages) if stage.name in reducers), 0)
    return stages[first:]


def _require_one_pass(stages: tuple[Stage, ...]) -> None:
    known = tuple(stage for stage in stages if stage not in _own(stages))
    if known:
        require_one_pass([bind(_text(known))])


def _require_known_code(
    parts: Parts, stages: Iterable[tuple[Stage, ...]], code: Iterable[Path]
) -> None:
    """Check that the user's own stages may be run, and are those of the run."""
    named = {Path(s.name.rpartition(":")[0]).resolve() for chain in stages for s in _own(chain)}
    missing = sorted(map(str, named - {path.resolve() for path in code}))
    if missing:
        raise RefusedError(
            f"merging needs code that the files name: {', '.join(missing)}",
            where="chains",
            remedy="Give --code FILE.py for each of them, if you trust it.",
        )
    found = stages_digests([bind(text) for text, _ in parts.chains])
    recorded = (parts.identity.get("digests") or {}).get("stages")
    changed = list(differences(recorded, found, "digests.stages"))
    if changed:
        raise RefusedError(
            f"this is not the code that the run had: {'; '.join(changed)}",
            where="chains",
            remedy="Take the files as they were, or compute the shards again.",
        )


def _own(stages: tuple[Stage, ...]) -> tuple[Stage, ...]:
    return tuple(stage for stage in stages if ".py:" in stage.name)


def _text(stages: tuple[Stage, ...]) -> str:
    return " | ".join(map(str, stages))
