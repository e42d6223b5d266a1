"""`gradscope list`: the names that can be chosen, straight from the registries."""

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gradscope.cli import options

if TYPE_CHECKING:
    from gradscope.core.registry import Registry

Kind = StrEnum("Kind", ["BACKENDS", "TRANSFORMS", "REDUCERS", "LOSSES", "FORMATS"])
AUTO_SUMMARY = "The first of them that does not refuse and whose first batch is proved."


def list_(
    kind: Annotated[Kind, typer.Argument(show_default=False, help="What to list.")],
    json: options.Json = False,
) -> None:
    """List the backends, transforms, reducers, losses or formats there are."""
    from gradscope.report import console, print_facts

    rows = [
        {"name": name, "summary": registry.summary(name)}
        for registry in registries()[kind]
        for name in registry.names()
    ]
    if kind == "backends":
        rows.insert(0, {"name": "auto", "summary": AUTO_SUMMARY})
    if json:
        document = {"schema": "gradscope.list", "version": 1, "kind": kind, "entries": rows}
        options.print_json(document)
    else:
        print_facts(console(), [(row["name"], row["summary"]) for row in rows])


def registries() -> "dict[str, list[Registry[Any]]]":
    """Return the registries of each kind."""
    from gradscope.backends import backends
    from gradscope.sources import checkpoint_readers, dataset_readers
    from gradscope.stages.losses import losses
    from gradscope.stages.reducers import reducers
    from gradscope.stages.transforms import transforms

    return {
        "backends": [backends],
        "transforms": [transforms],
        "reducers": [reducers],
        "losses": [losses],
        "formats": [checkpoint_readers, dataset_readers],
    }
