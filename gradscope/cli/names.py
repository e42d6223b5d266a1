"""Names for `gradscope list` and for completion in shells."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gradscope.core.registry import Registry

# {option: the kinds of names that its value may have}
_KINDS = {
    "backend": ["backends"],
    "backends": ["backends"],
    "loss": ["losses"],
    "transform": ["transforms", "reducers"],
}


def registries() -> "dict[str, list[Registry[Any]]]":
    """Return the registries of each kind."""
    from gradscope.backends.base import backends
    from gradscope.sources.formats import checkpoint_readers, dataset_readers
    from gradscope.stages.losses import losses
    from gradscope.stages.reducers.base import reducers
    from gradscope.stages.transforms.base import transforms

    return {
        "backends": [backends],
        "transforms": [transforms],
        "reducers": [reducers],
        "losses": [losses],
        "formats": [checkpoint_readers, dataset_readers],
    }


def completion(parameter: str) -> Callable[[str], list[str]] | None:
    """Return the function that completes the value of an option in a shell.

    In a chain, it completes the last stage.

    Args:
        parameter: The option's name in Python.

    Returns:
        A function from the incomplete value to complete ones, or None if the option takes no names.
    """
    if parameter not in _KINDS:
        return None

    def complete(incomplete: str) -> list[str]:
        head, bar, word = incomplete.rpartition("|")
        stem = f"{head}{bar} " if bar else ""
        known = [r.names() for kind in _KINDS[parameter] for r in registries()[kind]]
        names = ["auto"] * (parameter == "backend") + [name for names in known for name in names]
        return [stem + name for name in names if name.startswith(word.strip())]

    return complete
