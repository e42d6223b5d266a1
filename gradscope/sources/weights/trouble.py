"""What the libraries raise about a checkpoint, in our own words."""

import pickle
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gradscope.core.locate import first_line
from gradscope.core.shortage import is_shortage
from gradscope.errors import CheckpointError
from gradscope.sources.damage import damage

AGAIN = "Write or download it again."
STATE_DICT = (
    "Save model.state_dict() with torch.save or safetensors, and give that file. "
    "If you trust this one, --unsafe-pickle loads it."
)

# torch's unpickler names what it refuses in one of these ways
_REFUSED = re.compile(
    r"GLOBAL (?P<g>\S+)|unrecognized function (?P<f>.+)|but got (?P<c><class .+>)"
    r"|(?P<m>\S+) must be imported to load"
)


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn what the libraries raise about a file into a `CheckpointError` of our own words."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:  # a damaged file can make a parser raise anything
        if is_shortage(error):
            raise CheckpointError(
                f"it needs more memory than there is: {first_line(error)}",
                where=str(path),
                remedy=f"{AGAIN[:-1]} if it should not be that large.",
            ) from error
        refused = _REFUSED.search(str(error))
        if refused is None and isinstance(error, pickle.UnpicklingError):
            # torch's own text advises to switch its protection off
            reason = "its pickled part cannot be read without executing code, or not at all"
            raise damaged(path, reason) from error
        if refused is None:
            raise damaged(path, damage(error)) from error
        name = next(text for text in refused.groups() if text)
        raise CheckpointError(
            f"it holds more than tensors: {name}. Such a file can execute code and is not loaded",
            where=str(path),
            remedy=STATE_DICT,
        ) from error


def damaged(path: Path, reason: str) -> CheckpointError:
    """Return the error for a file that is not what was written."""
    return CheckpointError(
        f"the checkpoint is damaged or cut off: {reason}", where=str(path), remedy=AGAIN
    )
