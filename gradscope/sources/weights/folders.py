"""Which file of a folder holds the weights."""

from pathlib import Path

from gradscope.errors import CheckpointError
from gradscope.sources.listing import listed

_NAMES = (  # Hugging Face's, in the order in which it looks for them
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
_SUFFIXES = {".safetensors", ".pt", ".pth", ".bin", ".ckpt", ".pt2"}
_OTHERS = {"optimizer", "scheduler", "rng_state", "training_args", "scaler"}  # of a trainer


def weights_in(folder: Path) -> Path:
    """Return the one file of a folder that holds the weights, or that lists those which do.

    Raises:
        CheckpointError: There is none, or it is not clear which.
    """
    try:
        names = sorted(entry.name for entry in folder.iterdir())
    except OSError as error:
        reason = f"cannot be read: {error.strerror}"
        raise _error(folder, reason, "Check its permissions.") from error
    for name in _NAMES:
        if name in names:
            return folder / name
    _refuse_others(folder, set(names))
    indices = [name for name in names if name.endswith(".index.json")]
    files = [n for n in names if Path(n).suffix in _SUFFIXES and Path(n).stem not in _OTHERS]
    found = indices or files
    if len(found) == 1:
        return folder / found[0]
    if not found:
        held = f"it holds: {listed(names)}" if names else "it is empty"
        raise _error(folder, f"no weights are in this folder; {held}", "Give the file itself.")
    if any("-of-" in name for name in found):
        raise _error(
            folder,
            f"the index.json that lists the parts of the checkpoint is missing: {listed(found)}",
            "Download the folder again, index included.",
        )
    raise _error(folder, f"several files may be meant: {listed(found)}", "Give one of them.")


def _refuse_others(folder: Path, names: set[str]) -> None:
    """Refuse folders that are checkpoints of a kind that is not read."""
    if ".metadata" in names and any(name.endswith(".distcp") for name in names):
        raise _error(
            folder,
            "this is a distributed checkpoint; its metadata are a pickle, which is never loaded",
            "Convert it: python -m torch.distributed.checkpoint.format_utils dcp_to_torch "
            "FOLDER OUT.pt",
        )
    if "adapter_config.json" in names:
        raise _error(
            folder,
            "this folder holds an adapter, not a model",
            "Merge it into its model, save that, and give its folder.",
        )
    if "data.pkl" in names:
        raise _error(
            folder,
            "this is an unpacked archive of torch.save",
            "Pack it again, or give the file as it was.",
        )


def _error(folder: Path, what: str, remedy: str) -> CheckpointError:
    return CheckpointError(what, where=str(folder), remedy=remedy)
