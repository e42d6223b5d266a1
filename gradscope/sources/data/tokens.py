"""Texts to token ids, by a Hugging Face tokenizer that lies in a folder; nothing is fetched."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gradscope.core.locate import first_line
from gradscope.errors import DatasetError
from gradscope.sources.data.columns import Ragged, Texts
from gradscope.sources.extras import need

_SLICE = 1024  # texts that are tokenized together


def tokenized(texts: Texts, path: Path) -> tuple[Ragged, float | None]:
    """Return the token ids of texts, and the id that the tokenizer pads with, if it has one.

    Args:
        texts: One a sample.
        path: A tokenizer.json, or a folder with one, as `save_pretrained` writes it.

    Raises:
        DatasetError: There is no tokenizer, or transformers is not installed.
    """
    tokenizer = _load(path)

    def ids(start: int, stop: int) -> list[list[int]]:
        found: list[list[int]] = tokenizer(list(texts.read(start, stop)))["input_ids"]
        return found

    def read(start: int, stop: int) -> list[Tensor]:
        return [torch.tensor(row, dtype=torch.int64) for row in ids(start, stop)]

    lengths = [
        len(row)
        for start in range(0, texts.n, _SLICE)
        for row in ids(start, min(start + _SLICE, texts.n))
    ]
    own = tokenizer.pad_token_id
    return Ragged(torch.tensor(lengths), (), torch.int64, read), None if own is None else int(own)


def _load(path: Path) -> Any:
    if not path.exists():
        raise DatasetError(
            "there is no such tokenizer",
            where=str(path),
            remedy="Give a tokenizer.json, or the folder that save_pretrained wrote.",
        )
    library = need("transformers", "a tokenizer")
    try:
        if path.is_file():
            return library.PreTrainedTokenizerFast(tokenizer_file=str(path))
        return library.AutoTokenizer.from_pretrained(
            str(path), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # its parsers raise anything
        raise DatasetError(
            f"the tokenizer cannot be read: {first_line(error)}",
            where=str(path),
            remedy="Give a tokenizer.json, or the folder that save_pretrained wrote.",
        ) from error
