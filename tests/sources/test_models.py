"""The user's factory: called, checked, and its model put in the mode asked for."""

from pathlib import Path

import pytest
import torch
from torch import nn

from gradscope.config import CheckpointSpec, ModelSpec
from gradscope.errors import CheckpointError, ModelError
from gradscope.sources.models import build, load_model, notes_on

FILE = """
import torch
from torch import nn
def good(width: int = 2): return nn.Sequential(nn.Linear(3, width), nn.Dropout())
def nothing(): nn.Linear(2, 2)
def weights(): return nn.Linear(2, 2).state_dict()
def bare(): return nn.ReLU()
def frozen(): return nn.Linear(2, 2).requires_grad_(False)
def lazy(): return nn.LazyLinear(2)
def meta(): return nn.Linear(2, 2, device="meta")
def broken(): return nn.Linear("a", 2)
def leaving():
    import sys
    sys.exit("bye")
class Net(nn.Linear):
    def __init__(self, width=2): super().__init__(width, width)
class Stubborn(Net):
    def train(self, mode=True): raise RuntimeError("never")
instance = nn.Linear(2, 2)
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.py"
    path.write_text(FILE)
    return path


@pytest.mark.parametrize("mode", ["eval", "train"])
def test_a_model_is_built_in_the_mode_asked_for(file: Path, mode: str) -> None:
    model = build(f"{file}:good", {"width": 5}, mode)
    assert isinstance(model, nn.Sequential)
    assert model[0].out_features == 5
    assert {m.training for m in model.modules()} == {mode == "train"}
    assert build(f"{file}:Net", {"width": 4}).in_features == 4  # a class is a factory


@pytest.mark.parametrize(
    ("name", "kwargs", "expected"),
    [
        ("nothing", {}, "returned None, not a torch.nn.Module"),
        ("weights", {}, "returned an OrderedDict"),
        ("bare", {}, "no parameter at all"),
        ("frozen", {}, "no trainable parameter"),
        ("lazy", {}, "have no shape yet"),
        ("meta", {}, "meta device"),
        ("broken", {}, "your code raised TypeError"),
        ("leaving", {}, "your code called sys.exit('bye')"),
        ("Stubborn", {}, "your code raised RuntimeError: never"),
        ("good", {"widht": 3}, "got an unexpected keyword argument 'widht'"),
        ("good", {"wide": 3}, "It takes: width: int = 2"),
        ("good", {"width": "x"}, "your code raised TypeError"),
    ],
)
def test_a_factory_that_gives_no_model(file: Path, name: str, kwargs: dict, expected: str) -> None:
    with pytest.raises(ModelError) as caught:
        build(f"{file}:{name}", kwargs)
    assert expected in str(caught.value)
    assert str(file) in str(caught.value)
    assert caught.value.remedy
    assert caught.value.exit_code == 3


def test_tied_and_frozen_parameters_are_told() -> None:
    model = nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 4, bias=False), nn.Linear(4, 2))
    assert notes_on(model) == ()
    model[1].weight = model[0].weight
    model[2].requires_grad_(False)
    tied, frozen = notes_on(model)
    assert tied == "Tied parameters are one parameter under the first name: 0.weight = 1.weight."
    assert frozen == "Frozen parameters have no gradients: 2 of 3 parameters (2.weight, 2.bias)."


DIGITS = "The checkpoint has more digits than the model: its weights are rounded"
ARITHMETIC = """
import torch
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.scale = nn.Linear(3, 2), nn.Parameter(torch.ones(2))
        self.register_buffer("shift", torch.zeros(2))
        self.register_buffer("calls", torch.tensor(0))
    def forward(self, x):
        return self.layer(x) * self.scale + self.shift
def build():
    return Net()
def half():
    return Net().half()
def double():
    return Net().double()
"""


def precise(tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """A state dict in float64, of which float32 has not all digits."""
    (tmp_path / "net.py").write_text(ARITHMETIC)
    draw = torch.Generator().manual_seed(0)
    shapes = {"layer.weight": (2, 3), "layer.bias": (2,), "scale": (2,), "shift": (2,)}
    state = {k: torch.randn(s, generator=draw, dtype=torch.float64) for k, s in shapes.items()}
    state["calls"] = torch.tensor(7)
    torch.save(state, tmp_path / "w.pt")
    return tmp_path / "w.pt", state


@pytest.mark.parametrize("lean", [False, True])
@pytest.mark.parametrize("factory", ["build", "half", "double"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, None])
def test_weights_keep_the_digits_of_the_dtype_that_is_computed_in(
    tmp_path: Path, factory: str, dtype: torch.dtype | None, lean: bool
) -> None:
    path, state = precise(tmp_path)
    spec = ModelSpec(factory=f"{tmp_path}/net.py:{factory}")
    found = load_model(spec, CheckpointSpec(path=path), lean=lean, dtype=dtype)
    built = {"build": torch.float32, "half": torch.float16, "double": torch.float64}[factory]
    wanted = dtype or built
    for name, value in found.model.state_dict().items():
        right = state[name] if name == "calls" else state[name].to(wanted)
        assert torch.equal(value, right) and value.dtype == right.dtype
    notes = [note for note in found.notes if note.startswith(DIGITS)]
    assert len(notes) == (wanted != torch.float64)
    assert found.notes == tuple(notes)
    assert all("dtype float64 keeps all digits." in note for note in notes)


def test_values_too_large_for_a_dtype_are_refused(tmp_path: Path) -> None:
    path, state = precise(tmp_path)
    torch.save(state | {"scale": torch.tensor([1e300, 1.0], dtype=torch.float64)}, path)
    spec, weights = ModelSpec(factory=f"{tmp_path}/net.py:build"), CheckpointSpec(path=path)
    with pytest.raises(CheckpointError, match=r"too large for float32: scale \(1 of 2\)") as caught:
        load_model(spec, weights)
    assert 'dtype="float64"' in str(caught.value)
    found = load_model(spec, weights, dtype=torch.float64).model
    assert float(found.scale[0].detach()) == 1e300


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_whole_model_keeps_its_digits(tmp_path: Path, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2).double()
    torch.nn.init.normal_(model.weight)
    torch.save(model, tmp_path / "whole.pt")
    weights = CheckpointSpec(path=tmp_path / "whole.pt", unsafe_pickle=True)
    found = load_model(ModelSpec(factory="checkpoint"), weights, dtype=dtype)
    assert torch.equal(found.model.weight, model.weight.to(dtype))
    assert any(note.startswith(DIGITS) for note in found.notes) == (dtype == torch.float32)


@pytest.mark.parametrize("dtype", [torch.float64, None])
def test_a_cast_that_was_asked_for_and_keeps_all_digits_is_not_noted(
    tmp_path: Path, dtype: torch.dtype | None
) -> None:
    path, state = precise(tmp_path)
    torch.save({k: v if k == "calls" else v.half() for k, v in state.items()}, path)
    spec = ModelSpec(factory=f"{tmp_path}/net.py:build")
    found = load_model(spec, CheckpointSpec(path=path), dtype=dtype)
    assert torch.equal(found.model.scale, state["scale"].half().to(dtype or torch.float32))
    assert any("float16 -> float32" in note for note in found.notes) == (dtype is None)


@pytest.mark.parametrize("stored", [torch.complex64, torch.complex128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, None])
def test_complex_weights_keep_their_digits(
    tmp_path: Path, stored: torch.dtype, dtype: torch.dtype | None
) -> None:
    (tmp_path / "net.py").write_text(
        "import torch\nfrom torch import nn\nclass Net(nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n"
        "        self.w = nn.Parameter(torch.ones(3, dtype=torch.complex64))\n"
        "build = Net\n"
    )
    value = torch.randn(3, generator=torch.Generator().manual_seed(0), dtype=torch.complex128)
    torch.save({"w": value.to(stored)}, tmp_path / "w.pt")
    spec = ModelSpec(factory=f"{tmp_path}/net.py:build")
    found = load_model(spec, CheckpointSpec(path=tmp_path / "w.pt"), dtype=dtype)
    wanted = torch.complex128 if dtype == torch.float64 else torch.complex64
    assert torch.equal(found.model.w, value.to(stored).to(wanted))
    lost = stored == torch.complex128 and wanted == torch.complex64
    assert any("dtype float64 keeps all digits" in note for note in found.notes) == lost
