"""What a part of a run cannot compute."""

from collections.abc import Iterable

from gradscope.errors import RefusedError
from gradscope.stages.chain import Chain


def require_one_pass(chains: Iterable[Chain]) -> None:
    """Refuse chains that need the mean over all samples first: a part of a run has only its own.

    Raises:
        RefusedError: A chain is one of them.
    """
    for chain in chains:
        first = chain.first_pass
        if first is not None:
            raise RefusedError(
                f"{chain.text!r} needs the result of {first.text!r} over all samples first, and a "
                "part of them has only its own",
                where="shard",
                remedy=f"Compute it without --shard. Or compute {first.text!r} in shards, merge "
                "them, and give the stored vector: cosine:with=MEAN.h5:0 for cosine:to=mean.",
            )
