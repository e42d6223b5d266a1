"""What to do when the data do not fit the model, told by what torch said and by the batch."""

import re

import torch
from torch import Tensor

from gradscope.core.batch import Batch, tensors

_GENERAL = "Check that the data fit the model: shapes, dtypes and the order of inputs."
_LABEL = re.compile(r"Target (-?\d+) is out of bounds")
_TARGET = re.compile(r"expected target dtype to be Long")
_COUNT = re.compile(r"positional arguments? but|required positional|unexpected keyword argument")
_INDEX = re.compile(r"index out of range in self")
_WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
_DTYPE = re.compile(r"dtype|scalar type|Input type .* and (weight|bias) type|not implemented for")


def hint(error: BaseException, batch: Batch | None) -> tuple[str | None, str]:
    """Return which sample an error of the model or its loss is about, if known, and a remedy.

    Args:
        error: What was raised.
        batch: What the model was given.
    """
    if batch is None:
        return None, _GENERAL
    text, whole = str(error), [t for t in tensors(batch.inputs) if t.dtype in _WHOLE]
    label = _LABEL.search(text)
    if label:
        remedy = "Class labels go from 0 to one less than the model's outputs; -100 is ignored."
        return _sample(batch.targets, batch, int(label[1])), remedy
    if _INDEX.search(text):
        largest = max((int(t.max()) for t in whole if t.numel()), default=0)
        return (
            _sample(batch.inputs, batch, largest),
            f"An index is not in the table it looks up; the largest among the inputs is {largest}.",
        )
    if _COUNT.search(text):
        given = sum(1 for _ in tensors(batch.inputs))
        return None, (
            f"The model is called with {given} {'input' if given == 1 else 'inputs'} and the loss "
            "with (outputs, targets): [dataset] inputs and targets say which arrays these are."
        )
    if _TARGET.search(text):
        return None, (
            'Class labels are integers: a dataset spec says dtype = { NAME = "int64" }. A '
            "missing one makes floating-point numbers of its whole column: leave that sample out."
        )
    if whole and _DTYPE.search(text):
        kind = "truth values" if whole[0].dtype == torch.bool else "integers"
        return None, (
            f"The inputs hold {kind}. For a model that computes with floating-point numbers, a "
            'dataset spec says dtype = { NAME = "float32" }.'
        )
    return None, _GENERAL


def _sample(tree: object, batch: Batch, value: int) -> str | None:
    """Return the first sample among whose integers there is `value`."""
    for tensor in tensors(tree):
        if tensor.dtype in _WHOLE and tensor.dim() and len(tensor) == len(batch):
            rows: Tensor = (tensor == value).reshape(len(batch), -1).any(1)
            if rows.any():
                return f"sample {int(batch.index[rows.cpu()][0])}"
    return None
