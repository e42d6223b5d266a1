"""Memory that is reused instead of being given back and fetched anew."""

from functools import cache

import torch

_LARGEST_KEPT = 31 * 2**20  # below the 32 MiB to which glibc's threshold may grow


@cache
def keep_pages() -> None:
    """Let freed tensors of up to 31 MiB stay with the process.

    glibc maps blocks above a threshold freshly and unmaps them when they are freed; fresh pages
    cost five times as much to write as reused ones. The threshold follows the largest block that
    was ever freed (`man mallopt`, M_MMAP_THRESHOLD), so freeing one raises it. Elsewhere than under
    glibc this does nothing.
    """
    torch.empty(_LARGEST_KEPT, dtype=torch.uint8)
