"""Libraries that only some data need: imported when they are, with what to install if absent."""

import importlib
from typing import Any

from gradscope.errors import DatasetError

_EXTRAS = {"pyarrow": "data", "PIL": "data", "transformers": "hf"}


def need(module: str, what: str) -> Any:
    """Import a module of an optional library.

    Args:
        module: Its dotted name.
        what: What needs it, for the message.

    Raises:
        DatasetError: The library is not installed.
    """
    library = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ImportError as error:
        if error.name is not None and error.name.partition(".")[0] != library:
            raise
        name = {"PIL": "Pillow"}.get(library, library)
        raise DatasetError(
            f"{what} needs {name}, which is not installed",
            remedy=f"pip install 'gradscope[{_EXTRAS[library]}]'",
        ) from error
