"""`gradscope list`: the names that can be chosen, straight from the registries."""

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gradscope.cli import options

if TYPE_CHECKING:
    from gradscope.core.registry import Registry


class Kind(StrEnum):
    """What can be listed."""

    BACKENDS = "backends"
    TRANSFORMS = "transforms"
    REDUCERS = "reducers"
    LOSSES = "losses"
    FORMATS = "formats"


def list_(
    kind: Annotated[Kind, typer.Argument(show_default=False, help="What to list.")],
    json: options.Json = False,
) -> None:
    """List the backends, transforms, reducers, losses or formats there are."""
    rows = [
        {"name": name, "summary": registry.summary(name)}
        for registry in _registries(kind)
        for name in registry.names()
    ]
    if kind is Kind.BACKENDS:
        rows.insert(0, {"name": "auto", "summary": AUTO_SUMMARY})
    if json:
        options.print_json(
            {"schema": "gradscope.list", "version": 1, "kind": kind, "entries": rows}
        )
        return
    from gradscope.report import console, print_facts

    print_facts(console(), [(row["name"], row["summary"]) for row in rows])


def _registries(kind: Kind) -> list["Registry[Any]"]:
    if kind is Kind.BACKENDS:
        from gradscope.backends import backends

        return [backends]
    if kind is Kind.TRANSFORMS:
        from gradscope.stages.transforms import transforms

        return [transforms]
    if kind is Kind.REDUCERS:
        from gradscope.stages.reducers import reducers

        return [reducers]
    if kind is Kind.LOSSES:
        from gradscope.stages.losses import losses

        return [losses]
    from gradscope.sources import checkpoint_readers, dataset_readers

    return [checkpoint_readers, dataset_readers]


AUTO_SUMMARY = "The first of them that does not refuse and whose first batch is proved."
