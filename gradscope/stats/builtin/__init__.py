"""The statistics that come with the package: every module here registers its own.

`docs/statistics.md` explains every key of every record.
"""

from importlib import import_module
from pkgutil import iter_modules

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
