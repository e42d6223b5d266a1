"""Scripts whose model takes modules, stored arguments or random numbers, or has a loss within."""

import argparse
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradscope as package
from tests.cli.conftest import Gradscope

CWD = pytest.mark.usefixtures("in_folder")


@pytest.fixture
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run in the test's folder, from which it imports its scripts."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith(f"{tmp_path}"):
            del sys.modules[name]


def drafted(gradscope: Gradscope, *arguments: str) -> dict[str, Any]:
    """Return the run file that init writes; the code of a loss in its comments is in loss.py."""
    done = gradscope("init", *arguments)
    assert done.code == 0, done.err
    text = Path("run.toml").read_text()
    lines = text.partition("# Write this loss in loss.py")[2].splitlines()
    code = [line.removeprefix("#     ") for line in lines if line.startswith("#     ")]
    if code:
        Path("loss.py").write_text("\n".join(code))
    return tomllib.loads(text)


def norms(gradscope: Gradscope) -> Any:
    done = gradscope("compute", "--config", "run.toml", "-t", "norm", "-o", "o.h5", "--overwrite")
    assert done.code == 0, done.err
    with package.open("o.h5") as file:
        return file.samples["norm"][:]


def looped(model: nn.Module, loss: Any, inputs: Tensor, targets: Tensor) -> list[float]:
    """Return the norm of each sample's gradient, from one backward pass for each sample."""
    parameters = list(model.parameters())
    found = []
    for x, y in zip(inputs, targets, strict=True):
        rows = torch.autograd.grad(loss(model, x[None], y[None]), parameters, allow_unused=True)
        found.append(float(sum(g.square().sum() for g in rows if g is not None)) ** 0.5)
    return found


NOISY = """
import torch
from torch import nn
from inner import Net
class Denoiser(nn.Module):
    def __init__(self, net, steps, device, keep=0.5):
        super().__init__()
        self.net = net.to(device)
        self.device, self.keep = device, keep
        for k, v in {"level": torch.zeros(steps)}.items():
            self.register_buffer(k, v)
        self.criterion = nn.MSELoss()
    def forward(self, x, c):
        t = torch.randint(0, len(self.level), (len(x),)).to(self.device)
        noise = self.level[t, None] * torch.randn_like(x)
        return self.criterion(x, self.net(x + noise, c))
def main():
    device, steps, width = "cuda:0", 7, 6
    model = Denoiser(net=Net(width=width, kinds=3).to(device), steps=steps, device=device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for x, c in []:
        loss = model(x, c)
        loss.backward()
if __name__ == "__main__":
    main()
"""
INNER = """
from torch import nn
class Net(nn.Module):
    def __init__(self, width, kinds):
        super().__init__()
        self.first, self.kind = nn.Linear(4, width), nn.Embedding(kinds, width)
        self.last = nn.Linear(width, 4)
    def forward(self, x, c):
        return self.last((self.first(x) + self.kind(c)).tanh())
"""


@CWD
def test_a_model_that_takes_a_module_and_returns_its_loss(
    gradscope: Gradscope,
) -> None:
    Path("noisy.py").write_text(NOISY)
    Path("inner.py").write_text(INNER)
    from inner import Net  # type: ignore[import-not-found]
    from noisy import Denoiser  # type: ignore[import-not-found]

    torch.manual_seed(0)
    model = Denoiser(Net(6, 3), 7, "cpu")
    inputs, kinds = torch.randn(8, 4), torch.arange(8) % 3
    torch.save(model.state_dict(), "noisy.pt")
    torch.save((inputs, kinds), "data.pt")
    found = drafted(gradscope, "noisy.pt", "data.pt")
    inner = {"factory": "inner.py:Net", "width": 6, "kinds": 3}
    assert found["model"]["kwargs"] == {"steps": 7, "device": "cpu", "net": inner}
    assert found["compute"]["randomness"] == "fixed" and "dtype" not in found["dataset"]
    expected = looped(model, lambda model, x, c: model(x, c), inputs, kinds)
    assert norms(gradscope) == pytest.approx(expected, rel=1e-4)


@CWD
def test_a_nested_factory_is_code_of_the_model(gradscope: Gradscope) -> None:
    """Its file is relative to the run file, and its digest belongs to the result."""
    Path("parts").mkdir()
    Path("parts/head.py").write_text("from torch import nn\nclass Head(nn.Linear): pass\n")
    Path("net.py").write_text(
        "from torch import nn\nclass Net(nn.Module):\n    def __init__(self, heads):\n"
        "        super().__init__()\n        self.head = heads.first\n"
        "    def forward(self, x): return self.head(x)\n"
    )
    head = nn.Linear(3, 2)
    torch.save({"head.weight": head.weight.detach(), "head.bias": head.bias.detach()}, "w.pt")
    torch.save((torch.randn(5, 3), torch.zeros(5, 2)), "data.pt")
    Path("run.toml").write_text(
        'version = 1\n[model]\nfactory = "net.py:Net"\n[model.kwargs.heads.first]\n'
        'factory = "parts/head.py:Head"\nin_features = 3\nout_features = 2\n'
        '[checkpoint]\npath = "w.pt"\n[dataset]\npath = "data.pt"\n[loss]\nname = "mse"\n'
    )
    assert len(norms(gradscope)) == 5
    with package.open("o.h5") as file:
        assert {"net.py", "head.py"} <= file.run["digests"]["model"].keys()
    text = Path("run.toml").read_text().replace("in_features", "wide")
    Path("run.toml").write_text(text)
    done = gradscope("check", "--config", "run.toml")
    assert done.code == 3 and "head.py:Head: the arguments do not fit" in done.err


CALLED = """
import argparse, torch
from torch import nn
import torch.nn.functional as F
class Attention(nn.Module):
    def __init__(self, n, width, pad, heads=8, tied=False):
        super().__init__()
        self.pad = pad
        self.word = nn.Embedding(n, width)
        self.mix = nn.MultiheadAttention(width, heads, batch_first=True)
        self.out = nn.Linear(width, n, bias=False)
        if tied:
            self.out.weight = self.word.weight
    def forward(self, tokens):
        x = self.word(tokens)
        return self.out(self.mix(x, x, x)[0]).view(-1, self.out.out_features)
def token_loss(pred, gold, smooth):
    logs = F.log_softmax(pred, 1)
    return -(logs.gather(1, gold[:, None]) + smooth * logs.mean(1, keepdim=True)).sum(), len(gold)
def load(opt, device):
    content = torch.load(opt.model)
    return Attention(content["settings"].vocab, opt.d, 0).to(device)
def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("-n_head", type=int, default=8)
    opt = parser.parse_args()
    model = Attention(opt.vocab, opt.d, opt.pad_idx, heads=opt.n_head, tied=opt.share_weight)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for tokens, gold in []:
        loss, count = token_loss(model(tokens), gold.view(-1), smooth=opt.smooth)
        loss.backward()
if __name__ == "__main__":
    main()
"""


@CWD
def test_arguments_that_a_script_takes_from_parsed_options(gradscope: Gradscope) -> None:
    Path("called.py").write_text(CALLED)
    from called import Attention, token_loss  # type: ignore[import-not-found]

    torch.manual_seed(0)
    model = Attention(11, 8, 3, heads=2, tied=True)
    options = argparse.Namespace(
        vocab=11, d=8, pad_idx=3, n_head=2, share_weight=True, smooth=0.1, output=None
    )
    torch.save({"epoch": 1, "settings": options, "model": model.state_dict()}, "model.chkpt")
    tokens, gold = torch.randint(11, (6, 5)), torch.randint(11, (6, 5))
    torch.save((tokens, gold), "tokens.pt")
    found = drafted(gradscope, "model.chkpt", "tokens.pt")
    assert found["model"]["factory"] == "called.py:Attention"
    expected = {"n": 11, "width": 8, "pad": 3, "heads": 2, "tied": True}
    assert found["model"]["kwargs"] == expected
    assert found["loss"]["name"] == "loss.py:loss"

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Any:
        return token_loss(model(x), y.view(-1), 0.1)[0]

    assert norms(gradscope) == pytest.approx(looped(model, loss, tokens, gold), rel=1e-4)


PICKLED = """
import torch
from torch import nn
class Wrap(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer
    def forward(self, x): return self.layer(x).tanh()
class Stack(nn.Module):
    def __init__(self, width, n, wrap=True):
        super().__init__()
        if n:
            self.layers = [nn.Linear(width, width) for _ in range(n)]
            if wrap:
                self.layers = [Wrap(layer) for layer in self.layers]
        self.layers = nn.ModuleList(self.layers)
        self.decoder = nn.Linear(width, 3)
    def forward(self, x):
        for layer in self.layers: x = layer(x)
        return x
class Split(nn.Module):
    def forward(self, weight, hidden, y):
        return nn.functional.cross_entropy(hidden @ weight.T, y)
def train():
    criterion = None
    model = Stack(4, 2)
    if not criterion:
        criterion = SplitCriterion()
    criterion = criterion.cuda()
    optimizer = torch.optim.SGD([*model.parameters(), *criterion.parameters()], 0.1)
    for x, y in []:
        raw = criterion(model.decoder.weight, model(x), y)
        loss = raw
        loss = loss + 0.1 * model(x).square().mean()
        loss.backward()
class SplitCriterion(Split):
    def forward(self, weight, hidden, y):
        return hidden.sum() * 0 + super().forward(weight, hidden, y)
"""


@CWD
def test_a_pickled_list_with_a_model_and_a_loss(gradscope: Gradscope) -> None:
    Path("pickled.py").write_text(PICKLED)
    from pickled import SplitCriterion, Stack  # type: ignore[import-not-found]

    torch.manual_seed(0)
    model = Stack(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    torch.save([model, SplitCriterion(), optimizer], "all.pt")
    torch.save(model.state_dict(), "state.pt")
    inputs, targets = torch.randn(7, 4), torch.arange(7) % 3
    torch.save((inputs, targets), "data.pt")
    assert gradscope("init", "state.pt", "data.pt", "-o", "state.toml").code == 0
    found = drafted(gradscope, "all.pt", "data.pt", "--unsafe-pickle")
    assert found["model"]["factory"] == "checkpoint"
    assert found["loss"]["name"] == "sample_loss.py:loss"  # the first run wrote loss.py

    def loss(model: Any, x: Tensor, y: Tensor) -> Any:
        main = nn.functional.cross_entropy(model(x) @ model.decoder.weight.T, y)
        return main + 0.1 * model(x).square().mean()

    assert norms(gradscope) == pytest.approx(looped(model, loss, inputs, targets), rel=1e-4)


CHOSEN = """
import argparse, torch
from torch import nn
import losses
class Mask(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv = nn.Conv2d(1, width, 3, padding=1)
        self.last = nn.Conv2d(width, 1, 1)
    def forward(self, x): return self.last(self.conv(x).relu())
def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--loss", default="DiceLoss")
    config = vars(parser.parse_args())
    criterion = losses.__dict__[config["loss"]](0.5).cuda()
    model = Mask(2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for x, y in []:
        output = model(x)
        loss = criterion(output, y)
        loss.backward()
if __name__ == "__main__":
    main()
"""
LOSSES = """
from torch import nn
class DiceLoss(nn.Module):
    def __init__(self, smooth):
        super().__init__()
        self.smooth = smooth
    def forward(self, o, t):
        o, n = o.sigmoid().flatten(1), len(o)
        t = t.flatten(1)
        return 1 - ((o * t).sum(1) / (o.sum(1) + t.sum(1) + self.smooth)).sum() / n
"""


@CWD
def test_a_loss_that_is_chosen_by_its_name(gradscope: Gradscope) -> None:
    Path("chosen.py").write_text(CHOSEN)
    Path("losses.py").write_text(LOSSES)
    from chosen import Mask  # type: ignore[import-not-found]
    from losses import DiceLoss  # type: ignore[import-not-found]

    torch.manual_seed(0)
    model = Mask(2)
    inputs, masks = torch.randn(5, 1, 6, 6), (torch.rand(5, 1, 6, 6) > 0.5).float()
    torch.save(model.state_dict(), "mask.pt")
    torch.save((inputs, masks), "data.pt")
    drafted(gradscope, "mask.pt", "data.pt")
    expected = looped(model, lambda m, x, y: DiceLoss(0.5)(m(x), y), inputs, masks)
    assert norms(gradscope) == pytest.approx(expected, rel=1e-4)


ENCODED = """
import torch
from torch import nn
import torch.nn.functional as F
class Coder(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first, self.last = nn.Linear(4, width), nn.Linear(width, 4)
    def encode(self, x): return self.first(x).tanh()
    def forward(self, x): return self.last(self.encode(x))
def main():
    model = Coder(3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for x, y in []:
        loss = F.mse_loss(model.encode(x), y)
        loss.backward()
if __name__ == "__main__":
    main()
"""


@CWD
def test_a_loss_of_torch_of_a_method_of_the_model(gradscope: Gradscope) -> None:
    Path("encoded.py").write_text(ENCODED)
    from encoded import Coder  # type: ignore[import-not-found]

    torch.manual_seed(0)
    model = Coder(3)
    inputs, targets = torch.randn(5, 4), torch.randn(5, 3)
    torch.save(model.state_dict(), "coder.pt")
    torch.save((inputs, targets), "data.pt")
    drafted(gradscope, "coder.pt", "data.pt")

    def loss(model: Any, x: Tensor, y: Tensor) -> Any:
        return nn.functional.mse_loss(model.encode(x), y)

    assert norms(gradscope) == pytest.approx(looped(model, loss, inputs, targets), rel=1e-4)


STORED_NAMES = """
from torch import nn

class Net(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.names = config.factory, config.args
        self.out = nn.Linear(config.width, 2)

    def forward(self, x):
        return self.out(x)
"""


@CWD
def test_a_checkpoint_names_no_code(gradscope: Gradscope) -> None:
    """A stored argument `factory` is not written: in a table it would be called."""
    Path("net.py").write_text(STORED_NAMES)
    state = {f"out.{k}": v for k, v in nn.Linear(4, 2).state_dict().items()}
    stored = {"width": 4, "factory": "os:mkdir", "args": ["made"], "path": "made"}
    torch.save({"model": state, "model_args": stored}, "c.pt")
    torch.save((torch.ones(6, 4), torch.zeros(6, dtype=torch.int64)), "d.pt")
    table = drafted(gradscope, "c.pt", "d.pt", "--loss", "cross_entropy")["model"]["kwargs"]
    assert table == {"config": {"width": 4, "args": ["made"]}}
    assert "# factory =  # not taken from the checkpoint" in Path("run.toml").read_text()
    assert gradscope("check", "--config", "run.toml").code != 0
    assert not Path("made").exists()
