"""Scripts that build their data and their model in functions, and scripts that train on import."""

import argparse
import json
import random
import sys
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from gradscope.config import DatasetSpec
from gradscope.errors import ModelError
from gradscope.model.randomness import seeded
from gradscope.sources.code import give_arguments, load_value
from gradscope.sources.data import open_dataset
from gradscope.sources.variables import Variables
from tests.cli.conftest import Gradscope
from tests.cli.test_scripts_parts import CWD, drafted, in_folder, looped, norms

__all__ = ["in_folder"]  # a fixture

MAIN = """
import argparse
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.nn import functional as F

class Net(nn.Module):
    def __init__(self, inputs, hidden, act):
        super().__init__()
        self.first, self.act = nn.Linear(inputs, hidden), getattr(torch, act)
        self.last = nn.Linear(hidden, 3)
    def forward(self, x):
        return self.last(self.act(self.first(x)))

def train(model, loader, criterion, optimizer):
    for x, y in loader:
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()

def splits(n, seed):
    generator = torch.Generator().manual_seed(seed)
    data = TensorDataset(
        torch.randn(n, 4, generator=generator), torch.randint(3, (n,), generator=generator)
    )
    return torch.utils.data.random_split(data, [n - 6, 6], generator)

def main(args):
    torch.manual_seed(args.seed)
    trainset, testset = splits(args.n, args.seed)
    test_loader = DataLoader(testset, 4)
    options = {"batch_size": 5}
    options["shuffle"] = True
    train_loader = DataLoader(trainset, **options)
    model = Net(4, args.hidden, args.act).to("cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    criterion = nn.CrossEntropyLoss(label_smoothing=args.smooth).cuda()
    for epoch in range(2):
        train(model, train_loader, criterion, optimizer)
    open("trained", "w").close()
    torch.save({"state": model.state_dict(), "args": vars(args)}, "net.pt")

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--hidden", type=int, default=5)
    parser.add_argument("--act", default="relu")
    parser.add_argument("--n", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--smooth", type=float, default=0.0)
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    main(args)
"""
STORED = {"hidden": 6, "act": "tanh", "n": 16, "seed": 3, "smooth": 0.2, "quick": True}


def store(state: Any = None, arguments: Any = STORED) -> nn.Module:
    """Write main.py and the checkpoint net.pt of its model; return the model in float64."""
    Path("main.py").write_text(MAIN)
    import main  # type: ignore[import-not-found]

    torch.manual_seed(1)
    model: nn.Module = main.Net(4, 6, "tanh")
    torch.save({"state": model.state_dict(), "args": arguments}, "net.pt")
    return model.double()


@CWD
@pytest.mark.parametrize("kind", [dict, argparse.Namespace])
def test_a_loader_of_main_with_the_arguments_in_the_checkpoint(
    gradscope: Gradscope, kind: Any
) -> None:
    model = store(arguments=kind(**STORED))
    found = drafted(gradscope, "net.pt", "main.py:train_loader", "--unsafe-pickle")
    assert found["dataset"]["path"] == "main.py:main.train_loader"
    assert found["loss"]["name"] == "cross_entropy:label_smoothing=0.2"
    assert found["model"]["kwargs"] == {"inputs": 4, "hidden": 6, "act": "tanh"}
    assert not Path("trained").exists()
    text = Path("run.toml").read_text()
    argv = ["--hidden", "6", "--act", "tanh", "--n", "16", "--seed", "3", "--smooth", "0.2"]
    Path("run.toml").write_text(text.replace("# argv =", f"argv = {argv} #".replace("'", '"')))
    import main

    trainset, _ = main.splits(16, 3)
    x, y = map(torch.stack, zip(*[trainset[k] for k in range(10)], strict=True))
    loss = nn.CrossEntropyLoss(label_smoothing=0.2)
    expected = looped(model, lambda model, x, y: loss(model(x), y), x.double(), y)
    assert norms(gradscope) == pytest.approx(expected, rel=1e-5)
    assert not Path("trained").exists()


@CWD
def test_a_model_whose_arguments_only_main_knows(gradscope: Gradscope) -> None:
    """The variable of main is the model; its lines get the arguments that the checkpoint stores."""
    script = MAIN.replace("hidden, act)", "hidden, kind)").replace("torch, act)", "torch, kind)")
    Path("main.py").write_text(script.replace("args.act)", "str(args.act))"))
    import main

    torch.manual_seed(1)
    model = main.Net(4, 6, "tanh")
    torch.save({"state": model.state_dict(), "args": STORED}, "net.pt")
    found = drafted(gradscope, "net.pt", "main.py:testset")
    assert found["model"]["factory"] == "main.py:main.model"
    argv = ["--hidden", "6", "--act", "tanh", "--n", "16", "--seed", "3", "--smooth", "0.2"]
    assert found["model"]["argv"] == [*argv, "--quick"]
    done = gradscope("check", "--config", "run.toml")
    assert "only the lines for model were run" in " ".join(done.out.split())
    _, testset = main.splits(16, 3)
    x, y = map(torch.stack, zip(*[testset[k] for k in range(6)], strict=True))
    loss = nn.CrossEntropyLoss(label_smoothing=0.2)
    expected = looped(model.double(), lambda model, x, y: loss(model(x), y), x.double(), y)
    assert norms(gradscope) == pytest.approx(expected, rel=1e-5)


@CWD
def test_arguments_that_only_the_defaults_of_options_give(gradscope: Gradscope) -> None:
    """The training may have had others: the variable of main takes them from argv."""
    script = MAIN.replace("nn.Linear(inputs, hidden)", "nn.Linear(inputs, 2 * hidden // 2)")
    store()
    Path("main.py").write_text(script)
    torch.save(torch.load("net.pt")["state"], "net.pt")
    done = gradscope("init", "net.pt", "main.py:testset", "--json")
    assert json.loads(done.out)["missing"] == []
    text = Path("run.toml").read_text()
    assert "argv = []  # guessed: the defaults of --hidden, --act, --seed, --n." in text
    found = tomllib.loads(text)["model"]
    assert found == {"factory": "main.py:main.model", "mode": "eval", "argv": [], "kwargs": {}}


@CWD
def test_what_a_script_does_not_make(gradscope: Gradscope) -> None:
    store()
    done = gradscope("init", "net.pt", "main.py:nothing")
    assert done.code == 3 and "main.py:main.train_loader" in done.err
    Path("data.pkl").write_bytes(b"\x80\x04N.")
    done = gradscope("init", "net.pt", "data.pkl")
    assert done.code == 3 and "main.py:main.train_loader" in done.err


FOLDS = """
import random, torch
from data import load
def main(fold=1, *, width: int = 3):
    import math
    random.seed(fold)
    rows = load()
    if fold > 0:
        rows = rows[fold:]
        rows.append(width)
    else:
        raise ValueError(fold)
    print("never")
    for k, part in enumerate([rows, rows[1:]]):
        chosen = [random.random(), *part, math.pi]
        loss = torch.zeros(1, requires_grad=True).sum()
        loss.backward()
        late = k
    with open("written", "w") as file:
        result = file.write("x")
    return chosen
def needing(path):
    rows = [path]
    return rows
"""


@CWD
def test_the_statements_of_a_variable(capsys: pytest.CaptureFixture[str]) -> None:
    Path("data.py").write_text("def load(): return [5, 6, 7]\n")
    Path("folds.py").write_text(FOLDS)
    random.seed(1)
    expected = [random.random(), 6, 7, 3, np.pi]
    found = load_value("folds.py:main.chosen", "data set", lambda v: isinstance(v, list))
    assert found == expected and "never" not in capsys.readouterr().err
    assert load_value("folds.py:main.rows", "data set", lambda v: True) == [6, 7, 3]
    assert not Path("written").exists()
    import ast

    variables = Variables(ast.parse(FOLDS), Path("folds.py"))
    assert variables.places("chosen") == ["main"] and variables.places("rows") == ["main"]
    assert variables.statements("needing", "rows") is None  # `path` has no value
    with pytest.raises(ModelError, match=r"there is no 'needing.rows' in it"):
        load_value("folds.py:needing.rows", "data set", lambda v: True)


@CWD
def test_arguments_belong_to_all_files_of_a_run(gradscope: Gradscope) -> None:
    Path("net.py").write_text(
        "import sys\nfrom torch import nn\ndef build(): return nn.Linear(int(sys.argv[1]), 2)\n"
    )
    Path("data.py").write_text(
        "import argparse, torch\np = argparse.ArgumentParser()\np.add_argument('width', type=int)\n"
        "args = p.parse_args()\n"
        "def rows(): return [(torch.arange(args.width) + float(k), k % 2) for k in range(4)]\n"
    )
    torch.save(nn.Linear(3, 2).state_dict(), "w.pt")
    Path("run.toml").write_text(
        'version = 1\n[model]\nfactory = "net.py:build"\nargv = ["3"]\n'
        '[checkpoint]\npath = "w.pt"\n[dataset]\npath = "data.py:rows"\n'
        '[loss]\nname = "cross_entropy"\n'
    )
    assert len(norms(gradscope)) == 4
    give_arguments(())


TRAINS = """
import torch
from torch import nn
def load():
    generator = torch.Generator().manual_seed(0)
    return torch.utils.data.TensorDataset(
        torch.randn(8, 4, generator=generator), torch.arange(8) % 3
    )
model = nn.Linear(4, 3)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for x, y in torch.utils.data.DataLoader(load(), 4):
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
torch.save(model.state_dict(), "net.pt")
"""


@CWD
def test_a_script_that_is_imported_does_not_train_again(gradscope: Gradscope) -> None:
    Path("train.py").write_text(TRAINS)
    Path("mine.py").write_text("from train import load\ndef rows(): return load()\n")
    torch.save(nn.Linear(4, 3).state_dict(), "net.pt")
    before = Path("net.pt").read_bytes()
    Path("run.toml").write_text(
        'version = 1\n[model]\nfactory = "torch.nn:Linear"\n[model.kwargs]\nin_features = 4\n'
        'out_features = 3\n[checkpoint]\npath = "net.pt"\n[dataset]\npath = "mine.py:rows"\n'
        '[loss]\nname = "cross_entropy"\n'
    )
    assert len(norms(gradscope)) == 8 and Path("net.pt").read_bytes() == before
    Path("mine.py").write_text(
        "import shutil\nshutil.copy('net.pt', 'net.pt.2')\n"
        "import os\nos.replace('net.pt.2', 'net.pt')\nfrom train import load as rows\n"
    )
    done = gradscope("check", "--config", "run.toml")
    assert done.code == 3 and "written while your code was imported" in done.err


GRAPHS = """
import torch
from torch import nn
class Graphs(torch.utils.data.Dataset):
    def __len__(self):
        return 6
    def __getitem__(self, k):
        generator = torch.Generator().manual_seed(k)
        nodes = torch.randn(2 + k % 4, 5, generator=generator)
        return (nodes, torch.arange(len(nodes)).flip(0)), torch.tensor(k % 3), f"graph {k}"
def collate(samples):
    graphs, labels, names = zip(*samples)
    sizes = torch.tensor([len(nodes) for nodes, _ in graphs])
    nodes = torch.cat([nodes for nodes, _ in graphs])
    return (nodes, torch.cat([order for _, order in graphs]), sizes), torch.stack(labels), names
loader = torch.utils.data.DataLoader(Graphs(), 3, collate_fn=collate)
class Net(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.first, self.last = nn.Linear(5, width), nn.Linear(width, 3)
    def forward(self, nodes, order, sizes):
        hidden = self.first(nodes).tanh()[order].split(sizes.tolist())
        return self.last(torch.stack([part.max(0).values for part in hidden]))
def main():
    net = Net()
    criterion = nn.CrossEntropyLoss()
    for graph, y, _ in loader:
        loss = criterion(net(*graph), y)
        loss.backward()
"""


@CWD
@pytest.mark.parametrize("command", ["check", "compute"])
def test_samples_without_a_common_axis(gradscope: Gradscope, command: str) -> None:
    """A batch of one graph is what the collate function makes of it; its name is not used."""
    Path("graphs.py").write_text(GRAPHS)
    from graphs import Graphs, Net, collate  # type: ignore[import-not-found]

    torch.manual_seed(0)
    net = Net()
    torch.save(net.state_dict(), "net.pt")
    drafted(gradscope, "net.pt", "graphs.py:loader")
    if command == "check":
        done = gradscope("check", "--config", "run.toml")
        assert done.code == 0 and "each batch has one sample" in " ".join(done.out.split())
        return
    net, found = net.double(), []
    for k in range(6):
        (nodes, order, sizes), y, _ = collate([Graphs()[k]])
        loss = nn.functional.cross_entropy(net(nodes.double(), order, sizes), y)
        rows = torch.autograd.grad(loss, list(net.parameters()))
        found.append(float(sum(g.square().sum() for g in rows)) ** 0.5)
    assert norms(gradscope) == pytest.approx(found, rel=1e-5)


CUDA = """
import torch
from torch import nn
class Net(nn.Module):
    def __init__(self, batch_size, width, device="cuda"):
        super().__init__()
        self.batch_size, self.width, self.place = batch_size, width, device
        self.rnn, self.out = nn.GRU(3, width, batch_first=True), nn.Linear(width, 2)
    def forward(self, x):
        state = torch.zeros(1, self.batch_size, self.width).cuda()
        state += torch.ones(1, device="cuda:0")
        return self.out(self.rnn(x.to(self.place), state)[0][:, -1])
def loss(outputs, targets):
    weight = torch.tensor([1.0, 2.0]).cuda()
    return nn.functional.cross_entropy(outputs, targets, weight, reduction="none")
"""


@CWD
@pytest.mark.skipif(torch.cuda.is_available(), reason="cuda is then not the CPU")
def test_code_for_a_gpu_and_one_batch_size(gradscope: Gradscope) -> None:
    Path("net.py").write_text(CUDA)
    from net import Net  # type: ignore[import-not-found]

    torch.manual_seed(0)
    net = Net(8, 4)
    torch.save(net.state_dict(), "net.pt")
    x, y = torch.randn(5, 6, 3), torch.arange(5) % 2
    torch.save((x, y), "data.pt")
    found = drafted(gradscope, "net.pt", "data.pt", "--loss", "net.py:loss")
    assert found["model"]["kwargs"] == {"batch_size": 1, "width": 4}
    assert found["compute"]["batch_size"] == 1

    class Plain(Net):  # type: ignore[misc]
        def forward(self, x: Any) -> Any:
            return self.out(self.rnn(x, torch.ones(1, 1, 4, dtype=x.dtype))[0][:, -1])

    plain = Plain(1, 4)
    plain.load_state_dict(net.state_dict())
    weight = torch.tensor([1.0, 2.0]).double()

    def loss(model: nn.Module, x: Any, y: Any) -> Any:
        return nn.functional.cross_entropy(model(x), y, weight, reduction="none").sum()

    expected = looped(plain.double(), loss, x.double(), y)
    assert norms(gradscope) == pytest.approx(expected, rel=1e-5)


SCRIPT = """
import torch, functools
from torch import nn
from torch.nn import functional as F
def train(args, model, loader, optimizer, weights, scaler):
    {made}
    optimizer.add_param_group(dict(params=model.parameters()))
    for x, y in loader:
        out = model(x)
        {before}
        loss = {loss}
        loss.backward()
"""
MSE, CE = "F.mse_loss(out, y)", "criterion(out, y)"
LOSSES = [
    ("", "", "F.mse_loss(out.squeeze(), y.float().view(-1))", "mse"),
    ("criterion = F.cross_entropy", "", CE, "cross_entropy"),
    ("criterion = functools.partial(F.cross_entropy, label_smoothing=0.3)", "", CE,
     "cross_entropy:label_smoothing=0.3"),
    ("criterion = nn.CrossEntropyLoss(label_smoothing=args.smooth)", "", CE,
     "cross_entropy:label_smoothing=0.1"),
    ("criterion = nn.CrossEntropyLoss().cuda()", "", "criterion(out, y) / args.steps",
     "cross_entropy"),
    ("", "", "F.cross_entropy(out, y, reduction='sum') / len(y)", "cross_entropy:per_sample=sum"),
    ("", "", "0.5 * F.mse_loss(out, y)", ""),
    ("", "", "F.cross_entropy(out / 0.07, y)", ""),
    ("", "", "F.cross_entropy(model(x), y - 1)", ""),
    ("", "", "F.nll_loss(F.log_softmax(out, 1), y)", ""),
    ("", "z = scaler.norm(y)", "F.mse_loss(out, z)", "scaler"),
    ("criterion = nn.CrossEntropyLoss(weight=weights)", "", CE, "weights"),
    ("", "", "(weights * F.cross_entropy(out, y, reduction='none')).mean()", "weights"),
    ("", "", "F.mse_loss(out[:, -3:], y[:, -3:])", ""),
]  # fmt: skip


@CWD
@pytest.mark.parametrize("made, before, loss, expected", LOSSES)
def test_a_loss_is_guessed_only_if_it_is_the_scripts(
    gradscope: Gradscope, made: str, before: str, loss: str, expected: str
) -> None:
    """Otherwise the run file shows the loss of one sample as the script computes it."""
    script = SCRIPT.format(made=made or "pass", before=before or "pass", loss=loss)
    Path("train.py").write_text(script)
    torch.save({"w": nn.Linear(4, 3).state_dict(), "args": {"smooth": 0.1}}, "net.pt")
    torch.save((torch.randn(6, 4), torch.arange(6) % 3), "data.pt")
    found = drafted(gradscope, "net.pt", "data.pt", "--model", "torch.nn:Linear")
    known = expected.partition(":")[0] in {"mse", "cross_entropy"}
    assert found["loss"]["name"] == (expected if known else "loss.py:loss")
    if not known:  # what the script does not say is named
        lost = f". Not found: {expected}\n" in Path("run.toml").read_text()
        assert lost is bool(expected) and loss.replace("model(x)", "out") in Path(
            "loss.py"
        ).read_text().replace("outputs", "out")


CHOSEN = """
import argparse
from torch import nn
parser = argparse.ArgumentParser()
parser.add_argument("--l1", type=bool, default=True)
parser.add_argument("--kind", default="plain")
args = parser.parse_args()
if args.l1:
    criterion = nn.L1Loss(reduction="sum")
else:
    criterion = nn.MSELoss(reduction="sum")
if not args.kind == "plain":
    criterion = nn.HuberLoss()
class Series:
    def __init__(self):
        self.scale, self.train = 2.0, (1.0 * torch.ones(5, 4), torch.zeros(5, 3))
        self.rows = [torch.ones(4, 2, 3), torch.zeros(4, 3)]
def train(model, series):
    for x, y in [series.train]:
        loss = criterion(model(x), y)
        loss.backward()
""".replace("import argparse", "import argparse, torch")


@CWD
def test_a_loss_that_an_option_chooses(gradscope: Gradscope) -> None:
    """The stored arguments decide, or else the defaults of the options."""
    Path("train.py").write_text(CHOSEN)
    torch.save((torch.randn(6, 4), torch.randn(6, 3)), "data.pt")
    options = ["--model", "torch.nn:Linear", "--overwrite"]
    for stored, expected in (
        ({}, "l1:per_sample=sum"),
        ({"l1": False}, "mse:per_sample=sum"),
        ({"l1": False, "kind": "robust"}, "huber"),
    ):
        torch.save({"w": nn.Linear(4, 3).state_dict(), "args": stored}, "net.pt")
        assert drafted(gradscope, "net.pt", "data.pt", *options)["loss"]["name"] == expected
        other = "a different value of the option l1 has: criterion = nn.MSELoss(reduction='sum')"
        assert (other in Path("run.toml").read_text()) is (not stored)


@CWD
def test_arrays_of_all_samples_as_data(gradscope: Gradscope) -> None:
    Path("series.py").write_text(CHOSEN + "\nseries = Series()\n")
    torch.save(nn.Linear(4, 3).state_dict(), "net.pt")
    text = (
        'version = 1\n[model]\nfactory = "torch.nn:Linear"\n[model.kwargs]\nin_features = 4\n'
        'out_features = 3\n[checkpoint]\npath = "net.pt"\n[dataset]\npath = "series.py:series"\n'
        '[loss]\nname = "mse"\n'
    )
    Path("run.toml").write_text(text)
    done = gradscope("check", "--config", "run.toml")
    assert done.code == 3 and "series.py:series.train, " in done.err
    Path("run.toml").write_text(text.replace("series.py:series", "series.py:series.train"))
    assert len(norms(gradscope)) == 5
    found = open_dataset(DatasetSpec(path="series.py:series.rows"))
    assert found.batch([1, 2]).inputs.shape == (2, 2, 3) and len(found) == 4


@CWD
def test_what_a_script_does_to_a_batch_before_the_model(gradscope: Gradscope) -> None:
    plain = SCRIPT.format(made="pass", before="pass", loss=MSE)
    changed = "x = x.to(args.device)\n        x = x / 255 - 0.5\n        out = model(x)"
    torch.save(nn.Linear(4, 3).state_dict(), "net.pt")
    torch.save((torch.randn(6, 4), torch.randn(6, 3)), "data.pt")
    for script in (plain, plain.replace("out = model(x)", changed)):
        Path("train.py").write_text(script)
        options = ["--model", "torch.nn:Linear", "--overwrite"]
        done = gradscope("init", "net.pt", "data.pt", *options)
        told = "do this in the data set: train.py: x = x / 255 - 0.5"
        assert (told in " ".join(done.out.split())) is (script != plain)


@CWD
def test_a_function_that_returns_several_data_sets(gradscope: Gradscope) -> None:
    Path("load.py").write_text(
        "import torch\nfrom torch.utils.data import DataLoader, TensorDataset\n"
        "def load(args, split='train', seed=0):\n    n = args.rows if split == 'train' else 1\n"
        "    data = TensorDataset(torch.ones(n, 2), torch.zeros(n, 2))\n"
        "    return data, 5, DataLoader(data, args.size), DataLoader(data)\n"
        "def main(args):\n    load(args)\n"
    )
    torch.save({"w": nn.Linear(2, 2).state_dict(), "args": {"rows": 7, "size": 2}}, "net.pt")
    options = ["--model", "torch.nn:Linear", "--loss", "mse"]
    found = drafted(gradscope, "net.pt", "load.py:load", *options)
    assert found["dataset"]["kwargs"] == {"args": {"rows": 7, "size": 2}}
    text = Path("run.toml").read_text()
    arguments = "in_features = 2\nout_features = 2\n\n[checkpoint]"
    Path("run.toml").write_text(text.replace("[checkpoint]", arguments, 1))
    assert len(norms(gradscope)) == 7


@CWD
def test_a_checkpoint_in_a_folder_named_checkpoint(gradscope: Gradscope) -> None:
    Path("checkpoint").mkdir()
    torch.save({"net": nn.Linear(2, 2)}, "checkpoint/ckpt.t7")
    torch.save((torch.randn(5, 2), torch.randn(5, 2)), "data.pt")
    found = drafted(gradscope, "checkpoint/ckpt.t7", "data.pt", "--unsafe-pickle")
    assert found["model"]["factory"] == "checkpoint" and len(norms(gradscope)) == 5


@CWD
def test_random_numbers_of_a_script_are_the_same_in_each_run(gradscope: Gradscope) -> None:
    """They are drawn when the file is imported, and when the model and the data are made."""
    code = (
        "import random, torch, numpy as np\n"
        "noise = torch.randn(5, 2) + np.random.rand() + random.random()\n"
        "class Net(torch.nn.Linear):\n    def __init__(self):\n        super().__init__(2, 3)\n"
        "        self.shift = torch.rand(3)\n"
        "    def forward(self, x): return super().forward(x) + self.shift\n"
        "def rows(): return [(x, k % 3) for k, x in enumerate(noise + torch.rand(1))]\n"
    )
    torch.save(nn.Linear(2, 3).state_dict(), "w.pt")
    found = []
    for name in ("first", "second"):
        Path(f"{name}.py").write_text(code)
        Path("run.toml").write_text(
            f'version = 1\n[model]\nfactory = "{name}.py:Net"\n[checkpoint]\npath = "w.pt"\n'
            f'[dataset]\npath = "{name}.py:rows"\n[loss]\nname = "cross_entropy"\n'
        )
        found.append(norms(gradscope))
        torch.manual_seed(len(found))
        np.random.seed(len(found))
        random.seed(len(found))
    np.testing.assert_array_equal(*found)
    before = torch.get_rng_state(), random.getstate()
    with seeded(3):
        assert (torch.rand(1), random.random()) != (torch.rand(1), random.random())
    assert torch.equal(before[0], torch.get_rng_state()) and before[1] == random.getstate()


LISTED = """
import argparse, json, os
import torch
from torch import nn

def options():
    parser = argparse.ArgumentParser()
    parser.add_argument("data")
    parser.add_argument("--width", type=int, default=5)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1])
    return parser.parse_args()

if __name__ == "__main__":
    args = options()
    parts = [nn.Linear(4, args.width), nn.Tanh()]
    parts.append(nn.Linear(args.width, 3))
    model = nn.Sequential(*parts)
    rows = [(args.scale * torch.arange(4.0) / (k + 1), k % 3) for k in range(6)]
    os.makedirs("logs", exist_ok=True)
    with open("logs/args.json", "w") as file:
        json.dump(vars(args), file)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for x, y in rows:
        loss = nn.functional.cross_entropy(model(x[None]), torch.tensor([y]))
        loss.backward()
"""


@CWD
@pytest.mark.parametrize("options", [[], ["--model", "listed.py:model"]])
def test_a_model_of_lists_with_its_arguments_in_a_file(
    gradscope: Gradscope, options: list[str]
) -> None:
    Path("listed.py").write_text(LISTED)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    Path("w").mkdir()
    torch.save(model.state_dict(), "w/model.pt")
    Path("logs").mkdir()
    Path("logs/args.json").write_text('{"data": "d", "width": 6, "scale": 2.0, "sizes": [3, 4]}')
    found = drafted(gradscope, "w/model.pt", "listed.py:rows", *options)
    assert found["model"]["factory"] == "listed.py:__main__.model"
    argv = ["d", "--width", "6", "--scale", "2.0", "--sizes", "3", "4"]
    assert found["model"]["argv"] == argv
    assert "stored in logs/args.json" in Path("run.toml").read_text()
    x = torch.stack([2 * torch.arange(4.0) / (k + 1) for k in range(6)]).double()
    expected = looped(
        model.double(),
        lambda model, x, y: nn.functional.cross_entropy(model(x), y),
        x,
        torch.arange(6) % 3,
    )
    assert norms(gradscope) == pytest.approx(expected, rel=1e-5)
    Path("logs/args.json").write_text('{"data": "d", "width": 6, "scale": 2.0, "sizes": true}')
    done = gradscope("init", "w/model.pt", "listed.py:rows", *options, "-o", "true.toml", "--json")
    assert json.loads(done.out)["missing"] == ["model.argv"]  # how to write true is not known
    done = gradscope("init", "w/model.pt", "listed.py:rows", "--model", "listed.py:no", "-o", "n")
    assert done.code == 3 and "no variable 'no' of a function" in done.err


@CWD
def test_a_module_that_only_an_annotation_names(gradscope: Gradscope) -> None:
    Path("net.py").write_text(
        "from torch import nn\nclass Body(nn.Module):\n    def __init__(self, width, depth=1):\n"
        "        super().__init__()\n"
        "        self.layers = nn.ModuleList([nn.Linear(3, width) for _ in range(depth)])\n"
        "    def forward(self, x): return sum(layer(x) for layer in self.layers)\n"
        "class Net(nn.Module):\n    def __init__(self, body: Body, out):\n"
        "        super().__init__()\n        self.inner, self.last = body, nn.Linear(5, out)\n"
        "    def forward(self, x): return self.last(self.inner(x))\n"
    )
    from net import Body, Net

    torch.save(Net(Body(5, 2), 2).state_dict(), "net.pt")
    torch.save((torch.randn(4, 3), torch.randn(4, 2)), "data.pt")
    found = drafted(gradscope, "net.pt", "data.pt")
    body = {"factory": "net.py:Body", "width": 5, "depth": 2}
    assert found["model"]["kwargs"] == {"out": 2, "body": body} and len(norms(gradscope)) == 4


@CWD
@pytest.mark.parametrize(
    "made",
    [
        "model = Net(kind=opt.model)",
        "inner = Net(kind=inner.model)\nmodel = Net(kind=inner)",
        "model = Net(Other(Net(Other(1))))",
    ],
)
def test_models_that_name_themselves(gradscope: Gradscope, made: str) -> None:
    Path("net.py").write_text(
        "from torch import nn\nclass Net(nn.Module):\n    def __init__(self, kind='sine'):\n"
        "        super().__init__()\n        self.kind, self.body = kind, nn.Linear(3, 2)\n"
        "    def forward(self, x): return self.body(x)\n"
        "class Other(nn.Module):\n    def __init__(self, net: Net):\n        super().__init__()\n"
        f"def main(opt):\n    inner = None\n    {made.replace(chr(10), chr(10) + '    ')}\n"
        "    model.parameters()\n"
    )
    torch.save({"body.weight": torch.ones(2, 3), "body.bias": torch.ones(2)}, "net.pt")
    torch.save((torch.randn(4, 3), torch.randn(4, 2)), "data.pt")
    assert drafted(gradscope, "net.pt", "data.pt")["model"]["factory"].startswith("net.py:")


@CWD
def test_a_model_that_is_passed_to_a_module_of_lightning(gradscope: Gradscope) -> None:
    """Of classes with the same parts, the script's variable says which; its loss has a method."""
    net = (
        "from torch import nn\nclass {name}(nn.Module):\n    def __init__(self, width):\n"
        "        super().__init__()\n        self.body = nn.Linear(3, width)\n"
        "    def forward(self, x): return {sign}self.body(x)\n"
        "    def cost(self, *results, scale): return {{'loss': scale * results[0]}}\n"
    )
    Path("first.py").write_text(net.format(name="First", sign=""))
    Path("second.py").write_text(net.format(name="Second", sign="-"))
    Path("wrap.py").write_text(
        "from torch import nn\nclass Experiment(nn.Module):\n    def __init__(self, model):\n"
        "        super().__init__()\n        self.model = model\n"
        "    def training_step(self, batch, index):\n        results = self.model(batch[0])\n"
        "        found = self.model.cost(*results, scale=2)\n        return found['loss']\n"
        "    def configure_optimizers(self): return self.model.parameters()\n"
    )
    Path("run.py").write_text(
        "from first import First\nfrom second import Second\nfrom wrap import Experiment\n"
        "kinds = {'a': First, 'b': Second}\nmodel = kinds['b'](width=2)\n"
        "experiment = Experiment(model)\n"
    )
    torch.save({"model.body.weight": torch.ones(2, 3), "model.body.bias": torch.ones(2)}, "net.pt")
    torch.save((torch.randn(4, 3), torch.randn(4, 2)), "data.pt")
    found = drafted(gradscope, "net.pt", "data.pt")
    assert found["model"]["factory"] == "run.py:model" and "loss.py" in found["loss"]["name"]
    text = Path("run.toml").read_text()
    assert "# wrap.py: found = self.model.cost(*results, scale=2)" in text
    Path("run.toml").write_text(text.replace('name = "loss.py:loss"', 'name = "mse"'))
    assert len(norms(gradscope)) == 4


@CWD
@pytest.mark.parametrize("call", ["launch(main, 2, args=(args,))", "mp.spawn(run, args=(args,))"])
def test_main_is_passed_to_a_function_that_calls_it(gradscope: Gradscope, call: str) -> None:
    """Another file moves its argument: this ends no search."""
    Path("net.py").write_text(
        "from torch import nn\nclass Net(nn.Linear): pass\n"
        "def ready(x):\n    x = x.cuda()\n    return x\n"
        "def build():\n    net = Net(3, 2)\n    net = net.to('cuda')\n    return net.eval()\n"
        "def main(args):\n    rows = [(args, 1)] * 3\n    return rows\n"
        "def run(rank, args):\n    rows = [(args + rank, 1)] * 3\n    return rows\n"
        f"if __name__ == '__main__':\n    args = 2.0\n    {call}\n"
    )
    torch.save(nn.Linear(3, 2).state_dict(), "net.pt")
    name = call.partition("(")[2].partition(",")[0]
    found = drafted(gradscope, "net.pt", f"net.py:{name}.rows", "--loss", "mse")
    assert found["model"]["factory"] == "net.py:build"
    rows = load_value(f"net.py:{name}.rows", "data set", lambda value: True)
    assert rows == [(2.0, 1)] * 3


@CWD
def test_variables_of_the_main_block_are_global(gradscope: Gradscope) -> None:
    """The model's class reads them."""
    Path("text.py").write_text(
        "import torch\nfrom torch import nn\nclass Net(nn.Module):\n    def __init__(self):\n"
        "        super().__init__()\n        self.embed = nn.Embedding(words, width())\n"
        "        self.out = nn.Linear(width(), classes)\n"
        "    def forward(self, x): return self.out(self.embed(x).sum(1) / length)\n"
        "def width(): return size * 2\n"
        "if __name__ == '__main__':\n    words, size, classes = 7, 2, 3\n    length = 5\n"
        "    unused = open('missing')\n    model = Net()\n    rows = [torch.arange(5) % words]\n"
        "    inputs, targets = torch.stack(rows * 4), torch.arange(4) % 3\n"
        "    data = list(zip(inputs, targets))\n"
        "    optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "    for _ in range(2):\n        loss = nn.CrossEntropyLoss()(model(inputs), targets)\n"
        "        loss.backward()\n"
    )
    net = nn.ModuleDict({"embed": nn.Embedding(7, 4), "out": nn.Linear(4, 3)})
    torch.save(net.state_dict(), "net.pt")
    options = ["--model", "text.py:model"]
    found = drafted(gradscope, "net.pt", "text.py:data", *options)
    assert found["model"]["factory"] == "text.py:__main__.model"
    net, x = net.double(), torch.arange(5)[None] % 7

    def loss(model: Any, x: Any, y: Any) -> Any:
        return nn.functional.cross_entropy(model["out"](model["embed"](x).sum(1) / 5), y)

    expected = looped(net, loss, x.expand(4, 5), torch.arange(4) % 3)
    assert norms(gradscope) == pytest.approx(expected, rel=1e-5)


@CWD
@pytest.mark.parametrize(
    "lines", ["code, out = net(x)", "out = net(x)[1]", "h = net(x)\n    code, out = h"]
)
def test_a_loss_of_one_of_several_outputs(gradscope: Gradscope, lines: str) -> None:
    """Of scripts with equal classes, the script of the data says which is meant."""
    script = (
        "import torch\nfrom torch import nn\nclass Net(nn.Module):\n    def __init__(self):\n"
        "        super().__init__()\n        self.a, self.b = nn.Linear(4, 2), nn.Linear(2, 3)\n"
        "    def forward(self, x):\n        code = self.a(x)\n        return code, self.b(code)\n"
        "net = Net()\noptimizer = torch.optim.SGD(net.parameters(), 0.1)\n"
        "rows = [(torch.arange(4.0) * k, k % 3) for k in range(5)]\n"
        f"for x, y in []:\n    {lines}\n    loss = nn.functional.cross_entropy(out, y)\n"
        "    loss.backward()\n"
    )
    Path("401_second.py").write_text(script)
    Path("301_first.py").write_text(script.replace("cross_entropy", "mse_loss"))
    Path("201_other.py").write_text(
        "import torch\nnet = torch.nn.Linear(1, 1)\noptimizer = torch.optim.SGD(net.parameters())\n"
    )
    net = nn.ModuleDict({"a": nn.Linear(4, 2), "b": nn.Linear(2, 3)})
    torch.save(net.state_dict(), "net.pkl")
    found = drafted(gradscope, "net.pkl", "401_second.py:rows")
    assert found["model"]["factory"] == "401_second.py:Net"
    assert found["loss"]["name"] == "401_second.py:loss"
    net, x = net.double(), torch.stack([torch.arange(4.0) * k for k in range(5)]).double()

    def loss(model: Any, x: Any, y: Any) -> Any:
        return nn.functional.cross_entropy(model["b"](model["a"](x)), y)

    assert norms(gradscope) == pytest.approx(looped(net, loss, x, torch.arange(5) % 3), rel=1e-5)


@CWD
def test_inputs_that_a_script_reshapes_to_constants(gradscope: Gradscope) -> None:
    Path("train.py").write_text(
        "import torch\nfrom torch import nn\nnet = nn.Sequential(nn.Linear(12, 3))\n"
        "optimizer = torch.optim.SGD(net.parameters(), 0.1)\n"
        "rows = [(torch.arange(12.0).reshape(1, 3, 4) + k, k % 3) for k in range(5)]\n"
        "for x, y in []:\n    x = x.view(-1, 3 * 4).cuda()\n"
        "    loss = nn.functional.cross_entropy(net(x), y)\n    loss.backward()\n"
    )
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(12, 3))
    torch.save(net.state_dict(), "net.pt")
    found = drafted(gradscope, "net.pt", "train.py:rows")
    assert found["dataset"]["reshape"] == {"inputs": [12]}
    x = torch.stack([torch.arange(12.0) + k for k in range(5)]).double()

    def loss(model: Any, x: Any, y: Any) -> Any:
        return nn.functional.cross_entropy(model(x), y)

    expected = looped(net.double(), loss, x, torch.arange(5) % 3)
    assert norms(gradscope) == pytest.approx(expected, rel=1e-5)


@CWD
def test_keys_of_a_batch(gradscope: Gradscope) -> None:
    Path("train.py").write_text(
        "import torch\nfrom torch import nn\nclass Net(nn.Module):\n    def __init__(self):\n"
        "        super().__init__()\n        self.a = nn.Linear(4, 3)\n"
        "    def forward(self, x, scale): return self.a(x) * scale[:, None]\n"
        "net = Net()\noptimizer = torch.optim.SGD(net.parameters(), 0.1)\n"
        "rows = [{'name': f'{k}', 'kind': k % 3, 'x': (torch.arange(4.0) + k) / 9,\n"
        "         's': 1.0 + k / 9} for k in range(5)]\n"
        "for batch in []:\n    kind = batch['kind'].to('cuda')\n    x = batch['x'].cuda()\n"
        "    out = net(x, batch['s'])\n    loss = nn.functional.cross_entropy(out, kind)\n"
        "    loss.backward()\n"
    )
    net = nn.ModuleDict({"a": nn.Linear(4, 3)})
    torch.save(net.state_dict(), "net.pt")
    found = drafted(gradscope, "net.pt", "train.py:rows")["dataset"]
    assert (found["inputs"], found["targets"]) == (["x", "s"], ["kind"])
    x = torch.stack([(torch.arange(4.0) + k) / 9 for k in range(5)]).double()

    def loss(model: Any, x: Any, y: Any) -> Any:
        return nn.functional.cross_entropy(model["a"](x) * (1 + x[:, :1]), y)

    expected = looped(net.double(), loss, x, torch.arange(5) % 3)
    assert norms(gradscope) == pytest.approx(expected, rel=1e-5)


@CWD
def test_an_autoencoder_that_reshapes_its_inputs_twice(gradscope: Gradscope) -> None:
    Path("train.py").write_text(
        "import torch\nfrom torch import nn\nclass Coder(nn.Module):\n    def __init__(self):\n"
        "        super().__init__()\n        self.a, self.b = nn.Linear(6, 2), nn.Linear(2, 6)\n"
        "    def forward(self, x): return self.a(x), self.b(self.a(x))\n"
        "coder = Coder()\noptimizer = torch.optim.SGD(coder.parameters(), 0.1)\n"
        "rows = [(torch.arange(6.0).view(1, 2, 3) + k, k) for k in range(4)]\n"
        "loss_func = nn.MSELoss()\nfor x, label in []:\n    b_x = x.view(-1, 2 * 3)\n"
        "    b_y = x.view(-1, 2 * 3)\n    code, out = coder(b_x)\n"
        "    loss = loss_func(out, b_y)\n    loss.backward()\n"
    )
    net = nn.ModuleDict({"a": nn.Linear(6, 2), "b": nn.Linear(2, 6)})
    torch.save(net.state_dict(), "net.pt")
    assert drafted(gradscope, "net.pt", "train.py:rows")["loss"]["name"] == "train.py:loss"
    x = torch.stack([torch.arange(6.0) + k for k in range(4)]).double()

    def loss(model: Any, x: Any, y: Any) -> Any:
        return nn.functional.mse_loss(model["b"](model["a"](x)), y)

    assert norms(gradscope) == pytest.approx(looped(net.double(), loss, x, x), rel=1e-5)


@CWD
def test_code_in_the_folder_of_the_weights(gradscope: Gradscope) -> None:
    """An import writes __pycache__ there: this is no new training."""
    Path("weights").mkdir()
    torch.save(nn.Linear(2, 2).state_dict(), "weights/pytorch_model.bin")
    Path("weights/own_layers.py").write_text("from torch import nn\nLayer = nn.Linear\n")
    Path("weights/net.py").write_text(
        "from own_layers import Layer\ndef build(): return Layer(2, 2)\n"
    )
    torch.save((torch.randn(3, 2), torch.randn(3, 2)), "data.pt")
    Path("run.toml").write_text(
        'version = 1\n[model]\nfactory = "weights/net.py:build"\n[checkpoint]\npath = "weights"\n'
        '[dataset]\npath = "data.pt"\n[loss]\nname = "mse"\n'
    )
    sys.dont_write_bytecode, before = False, sys.dont_write_bytecode
    try:
        assert len(norms(gradscope)) == 3 and Path("weights/__pycache__").exists()
    finally:
        sys.dont_write_bytecode = before


@CWD
def test_texts_that_are_labels_and_arrays_of_objects_are_refused(gradscope: Gradscope) -> None:
    torch.save(nn.Linear(2, 2).state_dict(), "w.pt")
    Path("rows.py").write_text(
        "import numpy as np, torch\n"
        "def pair(): return [(torch.ones(2), 'cat'), (torch.zeros(2), 'dog')]\n"
        "def named(): return [{'x': torch.ones(2), 'label': 'cat'}]\n"
        "def objects(): return np.array([{}, {}]), np.zeros(2)\n"
    )
    for name, told in (("pair", "text: 'cat'"), ("named", "text: 'cat'"), ("objects", "error")):
        Path("run.toml").write_text(
            'version = 1\n[model]\nfactory = "torch.nn:Linear"\n[model.kwargs]\nin_features = 2\n'
            f'out_features = 2\n[checkpoint]\npath = "w.pt"\n[dataset]\npath = "rows.py:{name}"\n'
            '[loss]\nname = "mse"\n'
        )
        done = gradscope("check", "--config", "run.toml")
        assert done.code == 3 and told in done.err, done.err
