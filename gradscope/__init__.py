"""gradscope: each sample's gradient, and the expectation of a transformation of it.

The public names are imported when first used, so that the command line answers without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from gradscope.errors import GradscopeError
from gradscope.version import VERSION

if TYPE_CHECKING:
    from gradscope import derivatives, extend, training
    from gradscope.attribution import Scores, attribute
    from gradscope.comparison import Comparison, compare
    from gradscope.core.batch import Whole
    from gradscope.model.problem import model_loss
    from gradscope.report.plots import plot
    from gradscope.scope import Scope, expectation, norms, per_sample_gradients
    from gradscope.stages.declared import reducer, transform
    from gradscope.stages.reducers.base import Reducer
    from gradscope.storage import GradientFile
    from gradscope.storage import open_file as open

__version__ = VERSION

__all__ = [
    "Comparison",
    "GradientFile",
    "GradscopeError",
    "Reducer",
    "Scope",
    "Scores",
    "Whole",
    "__version__",
    "attribute",
    "compare",
    "derivatives",
    "expectation",
    "extend",
    "model_loss",
    "norms",
    "open",
    "per_sample_gradients",
    "plot",
    "reducer",
    "training",
    "transform",
]

_HOMES = {
    "Comparison": ("gradscope.comparison", "Comparison"),
    "GradientFile": ("gradscope.storage", "GradientFile"),
    "Reducer": ("gradscope.stages.reducers.base", "Reducer"),
    "Scores": ("gradscope.attribution", "Scores"),
    "Whole": ("gradscope.core.batch", "Whole"),
    "attribute": ("gradscope.attribution", "attribute"),
    "Scope": ("gradscope.scope", "Scope"),
    "compare": ("gradscope.comparison", "compare"),
    "expectation": ("gradscope.scope", "expectation"),
    "model_loss": ("gradscope.model.problem", "model_loss"),
    "norms": ("gradscope.scope", "norms"),
    "open": ("gradscope.storage", "open_file"),
    "per_sample_gradients": ("gradscope.scope", "per_sample_gradients"),
    "plot": ("gradscope.report.plots", "plot"),
    "reducer": ("gradscope.stages.declared", "reducer"),
    "transform": ("gradscope.stages.declared", "transform"),
}


def __getattr__(name: str) -> Any:
    if name in ("derivatives", "extend", "training"):
        return import_module(f"gradscope.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _HOMES[name]
    value = getattr(import_module(module), attribute)
    globals()[name] = value
    return value
