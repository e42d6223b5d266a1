"""Data of training scripts: variables, files of arguments, keys of checkpoints."""

import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gradscope as package
from gradscope.config import DatasetSpec
from gradscope.errors import CheckpointError, DatasetError
from gradscope.sources.data import open_dataset
from gradscope.sources.weights import load_into
from tests.cli.conftest import Gradscope
from tests.cli.test_scripts_parts import CWD, drafted, in_folder, looped, norms

__all__ = ["in_folder"]  # a fixture


def error_of(model: Any, x: Any, y: Any) -> Any:
    """Return the cross entropy of a sample."""
    return nn.functional.cross_entropy(model(x), y)


TOP = """
import torch
from torch import nn
from torch.autograd import Variable
x = torch.linspace(-1, 1, 40).reshape(10, 4)
labels = torch.arange(10) % 3
if torch.cuda.is_available():
    x = x.cuda()
net = nn.Sequential(nn.Linear(4, 3))
optimizer = torch.optim.SGD(net.parameters(), 0.1)
criterion = nn.CrossEntropyLoss()
for epoch in range(2):
    open('trained', 'w').close()
    BATCH
    loss = criterion(net(a), b)
    loss.backward()
"""


@CWD
@pytest.mark.parametrize("name", ["x", "labels", "x,labels"])
@pytest.mark.parametrize(
    "batch",
    [
        "a, b = Variable(x[3:6]), labels[3:6]",
        "p = torch.randperm(10)\n    a = x[p]\n    b = labels[p]",
    ],
)
def test_inputs_and_targets_that_are_two_variables(
    gradscope: Gradscope, name: str, batch: str
) -> None:
    Path("train.py").write_text(TOP.replace("BATCH", batch))
    net = nn.Sequential(nn.Linear(4, 3))
    torch.save(net.state_dict(), "net.pt")
    found = drafted(gradscope, "net.pt", f"train.py:{name}")
    assert found["dataset"]["path"] == "train.py:x,labels"
    x = torch.linspace(-1, 1, 40).reshape(10, 4).double()
    expected = looped(net.double(), error_of, x, torch.arange(10) % 3)
    assert norms(gradscope) == pytest.approx(expected, rel=1e-5)
    assert not Path("trained").exists()


NET = """
import random, torch
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(words, 4), nn.Linear(4, classes())
    def forward(self, a, b):
        return self.out(self.embed(a).mean(1) - self.embed(b).mean(1))
def classes(): return kinds
"""
LINES = """
    random.seed(3)
    left = [[random.randrange(words) for _ in range(4)] for _ in range(12)]
    right = [[random.randrange(words) for _ in range(k % 3 + 1)] for k in range(12)]
    labels = [k % kinds for k in range(12)]
    net = Net()
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for epoch in range(3):
        for k, (a, b, c) in enumerate(zip(left, right, labels)):
            out = net(torch.LongTensor([a]), torch.LongTensor([b]))
            loss = criterion(out, torch.tensor([c]))
            loss.backward()
"""
SIZES = "words, kinds = 9, 2\n"


@CWD
def test_lists_of_a_function_with_different_lengths(gradscope: Gradscope) -> None:
    Path("seq.py").write_text(f"{NET}{SIZES}def main():{LINES}")
    net = nn.ModuleDict({"embed": nn.Embedding(9, 4), "out": nn.Linear(4, 2)})
    torch.save(net.state_dict(), "net.pt")
    found = drafted(gradscope, "net.pt", "seq.py:left", "--loss", "cross_entropy")
    assert found["dataset"]["path"] == "seq.py:main.left,right,labels"
    assert found["model"]["factory"] == "seq.py:Net"
    done = gradscope("check", "--config", "run.toml")
    assert done.code == 3 and "write batch_size = 1 under [compute]" in done.err
    text = Path("run.toml").read_text()
    Path("run.toml").write_text(text.replace("[compute]", "[compute]\nbatch_size = 1"))
    random.seed(3)
    left = [[random.randrange(9) for _ in range(4)] for _ in range(12)]
    right = [[random.randrange(9) for _ in range(k % 3 + 1)] for k in range(12)]
    net, expected = net.double(), []
    for k, (a, b) in enumerate(zip(left, right, strict=True)):
        mean = net["embed"](torch.tensor(a)).mean(0) - net["embed"](torch.tensor(b)).mean(0)
        error = nn.functional.cross_entropy(net["out"](mean), torch.tensor(k % 2))
        rows = torch.autograd.grad(error, [*net.parameters()])
        expected.append(float(sum(g.square().sum() for g in rows)) ** 0.5)
    assert norms(gradscope) == pytest.approx(expected, rel=1e-5)


@CWD
def test_a_class_that_reads_variables_of_the_main_block(gradscope: Gradscope) -> None:
    """Its variable is the factory, not the class."""
    Path("seq.py").write_text(f"{NET}if __name__ == '__main__':\n    {SIZES}{LINES}")
    net = nn.ModuleDict({"embed": nn.Embedding(9, 4), "out": nn.Linear(4, 2)})
    torch.save(net.state_dict(), "net.pt")
    found = drafted(gradscope, "net.pt", "seq.py:labels", "--loss", "cross_entropy")
    assert found["dataset"]["path"] == "seq.py:__main__.left,right,labels"
    assert found["model"]["factory"] == "seq.py:__main__.net"
    assert gradscope("check", "--config", "run.toml", "--batch-size", "1").code == 0


@CWD
def test_variables_without_one_entry_a_sample() -> None:
    Path("data.py").write_text(
        "import torch\nx, y, z = torch.zeros(3, 2), [1, 2], {1, 2}\n"
        "def data():\n    a, b = x.numpy(), [[1.0], [2.0, 3.0], []]\n    return a, b\n"
    )
    for names in ("x,y", "x,z"):
        with pytest.raises(DatasetError, match=r"one entry a sample each: x \(3, 2\)"):
            open_dataset(DatasetSpec(path=f"data.py:{names}"))
    found = open_dataset(DatasetSpec(path="data.py:data.a,b"))
    torch.testing.assert_close(found.batch([1]).targets, torch.tensor([[2.0, 3.0]]))


SIZED = """
import torch
from torch import nn
class Net(nn.Module):
    def __init__(self, width, power, act="relu", scale=None):
        super().__init__()
        self.inner, self.out = nn.Linear(3, width), nn.Linear(width, 2)
        self.power, self.act, self.scale = power, act, scale
    def forward(self, x):
        h = self.inner(x)
        h = h if self.act is None else getattr(torch, self.act)(h)
        return self.out(h**self.power / (self.scale or 1))
def rows():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(7, 3, generator=generator), torch.arange(7) % 2
"""
FILES = {
    "model_params.json": '{"width": 4, "power": 3, "act": null, "lr": 0.1}',
    "hparams.yaml": "width: 4\npower: 3\nact: null\n",
    "args.txt": "Namespace(width=4, power=3, act=None, resume='')",
    ".hydra/config.yaml": "data: {power: 5, n: 9}\nmodel: {width: 4, power: 3, act: null}\n",
    "config.yaml": "wandb_version: 1\nwidth: {desc: null, value: 4}\npower: {value: 3}\n"
    "act: {value: null}\n",
}


def cubed(model: Any, x: Any, y: Any) -> Any:
    return nn.functional.cross_entropy(model["out"](model["inner"](x) ** 3), y)


@CWD
@pytest.mark.parametrize("name", [*FILES, "the checkpoint"])
def test_arguments_in_a_file_near_the_checkpoint(gradscope: Gradscope, name: str) -> None:
    Path("net.py").write_text(SIZED)
    net = nn.ModuleDict({"inner": nn.Linear(3, 4), "out": nn.Linear(4, 2)})
    stored = {"state": net.state_dict(), "epoch": 3}
    if name in FILES:
        pytest.importorskip("yaml")
        (Path("run") / name).parent.mkdir(parents=True)
        (Path("run") / name).write_text(FILES[name])
        Path("run/log.json").write_text('{"power": 7}')  # not a name for arguments
    else:
        Path("run").mkdir()
        stored |= {"power": 3, "config": {"act": None}}
    torch.save(stored, "run/net.pt")
    found = drafted(gradscope, "run/net.pt", "net.py:rows", "--loss", "cross_entropy")
    kwargs = {"width": 4, "power": 3, "act": {"none": True}}
    assert found["model"]["kwargs"] == kwargs
    assert f"stored in {'run/' if name in FILES else ''}{name}" in Path("run.toml").read_text()
    x = torch.randn(7, 3, generator=torch.Generator().manual_seed(0)).double()
    expected = looped(net.double(), cubed, x, torch.arange(7) % 2)
    assert norms(gradscope) == pytest.approx(expected, rel=1e-5)


@CWD
def test_files_near_the_checkpoint_that_say_nothing(
    gradscope: Gradscope, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files that differ, and files that are not tables."""
    Path("net.py").write_text(SIZED)
    net = nn.ModuleDict({"inner": nn.Linear(3, 4), "out": nn.Linear(4, 2)})
    torch.save(net.state_dict(), "net.pt")
    Path("a_config.json").write_text('{"power": 2, "width": 5}')
    Path("b_config.json").write_text('{"power": 3, "width": 5}')
    Path("args.txt").write_text("[1, 2]")
    Path("config.json.txt").write_text("__import__('os').remove('net.pt')")
    Path("hparams.yaml").write_text("power: !!python/object/apply:os.remove ['net.pt']\n")
    done = gradscope("init", "net.pt", "net.py:rows", "--loss", "cross_entropy")
    text = Path("run.toml").read_text()
    assert "# power =  # fill in" in text and "width = 4" in text and Path("net.pt").exists()
    assert "hparams.yaml: it is not plain YAML" in " ".join(done.out.split())
    monkeypatch.setitem(sys.modules, "yaml", None)
    done = gradscope("init", "net.pt", "net.py:rows", "--overwrite")
    assert "hparams.yaml: YAML: pip install pyyaml" in " ".join(done.out.split())


KEYS = """
import torch
from torch import nn
class Encoder(nn.Module):
    def __init__(self, h):
        super().__init__()
        self.l1, self.l2 = nn.Linear(4, h), nn.Linear(h, 2)
    def forward(self, x): return self.l2(self.l1(x).tanh())
class Coder(nn.Module):
    def __init__(self, h):
        super().__init__()
        self.encoder, self.head = Encoder(h), nn.Linear(2, 3)
    def forward(self, x): return self.head(self.encoder(x))
class Score(nn.Module):
    def __init__(self, h):
        super().__init__()
        self.l1, self.l2, self.l3 = nn.Linear(4, h), nn.Linear(h, h), nn.Linear(h, 3)
    def forward(self, x): return self.l3(self.l2(self.l1(x)))
def rows():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(7, 4, generator=generator), torch.arange(7) % 3
"""


@CWD
@pytest.mark.parametrize("nested", [False, True])
def test_state_dicts_under_several_keys(gradscope: Gradscope, nested: bool) -> None:
    """Parts of one model are joined; of several models, the given class says which is meant."""
    Path("nets.py").write_text(KEYS)
    net = nn.ModuleDict({"l1": nn.Linear(4, 5), "l2": nn.Linear(5, 2)})
    head = nn.Linear(2, 3)
    parts = {"encoder": net.state_dict(), "head": head.state_dict()}
    torch.save({"nets": parts, "epoch": 2} if nested else parts, "net.pt")
    found = drafted(gradscope, "net.pt", "nets.py:rows", "--loss", "cross_entropy")
    assert "key" not in found["checkpoint"] and found["model"]["factory"] == "nets.py:Coder"
    x = torch.randn(7, 4, generator=torch.Generator().manual_seed(0)).double()
    whole = nn.Sequential(net["l1"], nn.Tanh(), net["l2"], head).double()
    expected = looped(whole, error_of, x, torch.arange(7) % 3)
    assert norms(gradscope) == pytest.approx(expected, rel=1e-5)
    done = gradscope("check", "--config", "run.toml")
    assert "read from several keys of the checkpoint: encoder, head" in " ".join(done.out.split())


@CWD
def test_a_checkpoint_of_two_models(gradscope: Gradscope) -> None:
    Path("nets.py").write_text(KEYS)
    net = nn.ModuleDict({"l1": nn.Linear(4, 5), "l2": nn.Linear(5, 2)})
    score = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 3))
    renamed = {f"l{int(k[0]) + 1}.{k[2:]}": v for k, v in score.state_dict().items()}
    other = {"unknown.weight": torch.zeros(2, 2), **{f"x{k}": torch.zeros(1) for k in range(9)}}
    average = {f"module.{k}": v for k, v in renamed.items()} | {"n_averaged": torch.tensor(3)}
    models = {"average_ema": average, "other": other, "enc": net.state_dict(), "score": renamed}
    torch.save(models, "net.pt")
    options = ["--model", "nets.py:Score", "--loss", "cross_entropy"]
    found = drafted(gradscope, "net.pt", "nets.py:rows", *options)
    assert found["checkpoint"]["key"] == "score" and found["model"]["kwargs"] == {"h": 6}
    x = torch.randn(7, 4, generator=torch.Generator().manual_seed(0)).double()
    expected = looped(score.double(), error_of, x, torch.arange(7) % 3)
    assert norms(gradscope) == pytest.approx(expected, rel=1e-5)
    Path("run.toml").unlink()
    found = drafted(
        gradscope, "net.pt", "nets.py:rows", "--model", "nets.py:Encoder", "--loss", "mse"
    )
    assert found["checkpoint"]["key"] == "enc" and found["model"]["kwargs"] == {"h": 5}
    Path("run.toml").unlink()
    assert drafted(gradscope, "net.pt", "nets.py:rows")["checkpoint"]["key"] in ("enc", "score")


def test_models_with_equal_names_and_different_shapes(tmp_path: Path) -> None:
    """The shapes say which is meant."""
    first, second = nn.Linear(3, 2), nn.Linear(3, 4)
    torch.save({"a": first.state_dict(), "b": second.state_dict()}, tmp_path / "w.pt")
    made = nn.Linear(3, 4)
    assert load_into(made, tmp_path / "w.pt").key == "b"
    torch.testing.assert_close(made.weight, second.weight)
    torch.save({"a": first.state_dict(), "b": nn.Linear(3, 2).state_dict()}, tmp_path / "w.pt")
    with pytest.raises(CheckpointError, match="several state dicts fit, under the keys a, b"):
        load_into(nn.Linear(3, 2), tmp_path / "w.pt")


BATCHES = """
import torch
from torch import nn
class Rows(torch.utils.data.Dataset):
    def __len__(self): return 7
    def __getitem__(self, k):
        x = torch.randn(4, generator=torch.Generator().manual_seed(k))
        return {"x": x, "scale": 1 + k / 9, "name": f"{k}", "kind": k % 3}
class Pairs(Rows):
    def __getitem__(self, k):
        found = super().__getitem__(k)
        return {"x": found["x"], "scale": found["scale"]}, found["kind"]
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 3)
    def forward(self, batch, unused=None):
        return self.fc(batch["x"]) * batch["scale"][:, None].float()
net = Net()
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for batch in torch.utils.data.DataLoader(Rows(), 2):
    out = net(batch)
    loss = nn.functional.cross_entropy(out, batch["kind"])
    loss.backward()
"""


@CWD
@pytest.mark.parametrize("name", ["Rows", "Pairs"])
def test_a_model_of_one_mapping(gradscope: Gradscope, name: str) -> None:
    Path("train.py").write_text(BATCHES)
    net = nn.ModuleDict({"fc": nn.Linear(4, 3)})
    torch.save(net.state_dict(), "net.pt")
    found = drafted(gradscope, "net.pt", f"train.py:{name}", "--model", "train.py:Net")["dataset"]
    assert found["inputs"] == {"x": "x", "scale": "scale"} and found["targets"] == ["kind"]
    if name == "Pairs":  # the inputs of a sample are a mapping
        text = Path("run.toml").read_text().splitlines()
        lines = [line for line in text if not line.startswith(("inputs =", "targets ="))]
        Path("run.toml").write_text("\n".join(lines))
    x = [torch.randn(4, generator=torch.Generator().manual_seed(k)).double() for k in range(7)]
    scales = torch.tensor([1 + k / 9 for k in range(7)]).float().double()

    def loss(model: Any, pair: Any, y: Any) -> Any:
        return nn.functional.cross_entropy(model["fc"](pair[:, :4]) * pair[:, 4:], y)

    pairs = torch.cat([torch.stack(x), scales[:, None]], 1)
    expected = looped(net.double(), loss, pairs, torch.arange(7) % 3)
    assert norms(gradscope) == pytest.approx(expected, rel=1e-5)
    done = gradscope("check", "--config", "run.toml")
    assert "the model takes the inputs as one mapping: x, scale" in " ".join(done.out.split())
    options = ["--previews", "40", "-o", "p.h5", "-t", "norm"]
    assert gradscope("compute", "--config", "run.toml", *options).code == 0


@CWD
def test_a_dict_of_data_is_no_autoencoder(gradscope: Gradscope) -> None:
    """The target has a key of the batch that the model gets."""
    Path("train.py").write_text(BATCHES.replace("batch)\n", "batch['x'])\n"))
    torch.save(nn.ModuleDict({"fc": nn.Linear(4, 3)}).state_dict(), "net.pt")
    found = drafted(gradscope, "net.pt", "train.py:Rows")["dataset"]
    assert (found["inputs"], found["targets"]) == (["x"], ["kind"])


DEEP = """
import torch
from torch import nn
class Net(nn.Module):
    def __init__(self, config, depth, widen=10, ratio=0.5, bias=False, seed=3):
        super().__init__()
        assert (depth - 4) % 6 == 0
        print("built")
        wide = 2 * widen
        self.first = nn.Linear(4, wide, bias=bias)
        layers = [nn.Linear(wide, wide) for _ in range((depth - 4) // 6)]
        self.layers = nn.ModuleList(layers)
        self.last = nn.Linear(wide, int(wide * ratio))
        self.heads = nn.ModuleList([nn.Linear(int(wide * ratio), 3) for _ in range(config.heads)])
    def forward(self, x):
        h = self.first(x)
        for layer in self.layers:
            h = layer(h)
        return sum(head(self.last(h)) for head in self.heads)
def rows():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(6, 4, generator=generator), torch.arange(6) % 3
"""


@CWD
def test_arguments_with_which_all_tensors_fit(gradscope: Gradscope) -> None:
    """The error names the values of numbers, truth values and entries of tables."""
    Path("deep.py").write_text(DEEP)
    tables = {"heads": 1}, {"heads": 2}
    made = {"depth": 16, "widen": 3, "ratio": 0.7, "bias": True}
    layers = {f"layers.{k}": nn.Linear(6, 6) for k in range(2)}
    heads = {f"heads.{k}": nn.Linear(4, 3) for k in range(2)}
    parts = {"first": nn.Linear(4, 6), **layers, "last": nn.Linear(6, 4), **heads}
    state = {f"{k}.{n}": v for k, part in parts.items() for n, v in part.state_dict().items()}
    torch.save(state, "net.pt")
    lines = 'version = 1\n[model]\nfactory = "deep.py:Net"\n[model.kwargs]\n'
    rest = '[checkpoint]\npath = "net.pt"\n[dataset]\npath = "deep.py:rows"\n'
    rest += '[loss]\nname = "cross_entropy"\n'
    config = "config = {{ heads = {heads} }}\n".format
    given = "depth = 28\nwiden = 10\nratio = 0.5\nbias = false\nseed = 3\n"
    Path("run.toml").write_text(lines + config(**tables[0]) + given + rest)
    done = gradscope("check", "--config", "run.toml")
    assert done.code == 3 and done.err.count("built") == 1
    told = (
        "config.heads = 2 (not 1), depth = 16 (not 28), widen = 3 (not 10), ratio = 0.7 (not 0.5)"
    )
    for part in (*told.split(", "), "bias = true (not false)"):
        assert part in done.err
    assert "seed" not in done.err
    own = "".join(f"{k} = {str(v).lower()}\n" for k, v in made.items())
    Path("run.toml").write_text(lines + config(**tables[1]) + own + rest)

    def loss(parts: Any, x: Any, y: Any) -> Any:
        h = parts["layers.1"](parts["layers.0"](parts["first"](x)))
        h = parts["last"](h)
        return nn.functional.cross_entropy(parts["heads.0"](h) + parts["heads.1"](h), y)

    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.held = nn.ModuleList(parts.values())
            self.names = [*parts]

        def __getitem__(self, name: str) -> nn.Module:
            return self.held[self.names.index(name)]

    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)).double()
    expected = looped(Parts().double(), loss, x, torch.arange(6) % 3)
    assert norms(gradscope) == pytest.approx(expected, rel=1e-5)


CONFIG = """
from dataclasses import dataclass
import json, torch
from torch import nn
from rows import loaders
class Easy(dict):
    __getattr__ = dict.__getitem__
@dataclass
class Config:
    batch: int = 5
    depth: int = 2
    shards: int = 0
class Net(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.fc = nn.Sequential(*[nn.Linear(4, 4) for _ in range(cfg.depth)], nn.Linear(4, 3))
    def forward(self, x): return self.fc(x)
def train(cfg):
    train_loader, test_loader = loaders(cfg)
    model = nn.DataParallel(Net(cfg))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    criterion = nn.CrossEntropyLoss()
    for x, y in train_loader:
        loss = criterion(model(x), y)
        loss.backward()
    open("trained", "w").close()
"""
ROWS = """
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
def loaders(cfg):
    x = torch.randn(9, 4, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x, torch.arange(9) % 3)
    sampler = DistributedSampler(data, cfg.shards, 0) if cfg.shards else None
    return DataLoader(data, cfg.batch, sampler=sampler), DataLoader(data, cfg.batch)
"""
CALLS = [
    "def main(path='conf.json'):\n    with open(path) as file:\n"
    "        cfg = Easy(json.load(file))\n    train(cfg)\nif __name__ == '__main__':\n    main()\n",
    "if __name__ == '__main__':\n    cfg = Config(depth=1)\n    train(cfg)\n",
    "def main():\n    import argparse\n    parser = argparse.ArgumentParser()\n"
    "    parser.add_argument('--depth', type=int, default=1)\n"
    "    parser.add_argument('--batch', default=4)\n"
    "    parser.add_argument('--shards', default=0)\n"
    "    args = parser.parse_args()\n    train(args)\nif __name__ == '__main__':\n    main()\n",
]


@CWD
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("prefix", ["", "module."])
def test_data_and_models_of_a_function_with_a_config(
    gradscope: Gradscope, call: str, prefix: str
) -> None:
    """The loaders come from another module, and the model is wrapped for several GPUs."""
    Path("rows.py").write_text(ROWS)
    Path("train.py").write_text(CONFIG + call)
    Path("conf.json").write_text('{"batch": 4, "depth": 1, "shards": 1}')
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    torch.save({f"{prefix}fc.{k}": v for k, v in net.state_dict().items()}, "net.pt")
    found = drafted(gradscope, "net.pt", "train.py:train_loader")
    assert found["dataset"]["path"] == "train.py:train.train_loader"
    assert found["model"]["factory"] == "train.py:train.model"
    x = torch.randn(9, 4, generator=torch.Generator().manual_seed(0)).double()
    expected = looped(net.double(), error_of, x, torch.arange(9) % 3)
    assert norms(gradscope) == pytest.approx(expected, rel=1e-5)
    with package.open("o.h5") as file:
        assert "fc.0.weight" in file.parameters
    assert not Path("trained").exists()


@CWD
def test_the_script_of_the_data_builds_the_model(gradscope: Gradscope) -> None:
    """Two scripts build the same class in main(); only the arguments of one fit the data."""
    script = (
        "import torch\nfrom net import Net\nfrom torch import nn\ndef main():\n"
        "    size = max(1, 3)\n    net = Net(size * SCALE)\n"
        "    rows = [(torch.arange(3.0) * k, k % 2) for k in range(5)]\n    TRAIN\n"
    )
    Path("net.py").write_text(
        "from torch import nn\nclass Net(nn.Module):\n    def __init__(self, scale):\n"
        "        super().__init__()\n        self.fc, self.scale = nn.Linear(3, 2), scale\n"
        "    def forward(self, x): return self.fc(x) * self.scale\n"
    )
    train = "opt = torch.optim.SGD(net.parameters(), 1)\n    for x, y in rows:\n        loss = "
    train += "nn.functional.cross_entropy(net(x[None]), torch.tensor([y]))\n        loss.backward()"
    Path("a_test.py").write_text(script.replace("SCALE", "1").replace("TRAIN", "print(net)"))
    Path("b_train.py").write_text(script.replace("SCALE", "2").replace("TRAIN", train))
    Path("c_train.py").write_text(script.replace("SCALE", "3").replace("TRAIN", train))
    Path("rows.py").write_text("rows = [([1.0, 2.0, 3.0], 1)]\n")
    torch.save({f"fc.{k}": v for k, v in nn.Linear(3, 2).state_dict().items()}, "net.pt")
    for data, factory in (("c_train", "c_train"), ("a_test", "a_test"), ("rows", "b_train")):
        found = drafted(gradscope, "net.pt", f"{data}.py:rows", "--overwrite")
        assert found["model"]["factory"] == f"{factory}.py:main.net"


@CWD
def test_keys_for_a_loss_of_several_terms(gradscope: Gradscope) -> None:
    """The loss is a sum of variables, which a function of the batch returns."""
    text = BATCHES.replace("out = net(batch)", "out = net(batch['x'])").replace(
        'loss = nn.functional.cross_entropy(out, batch["kind"])',
        'one, two = terms(out, batch["kind"], batch["scale"].cuda())\n    loss = one + two / 2',
    )
    Path("train.py").write_text(text)
    torch.save(nn.ModuleDict({"fc": nn.Linear(4, 3)}).state_dict(), "net.pt")
    found = drafted(gradscope, "net.pt", "train.py:Rows", "--loss", "mse")["dataset"]
    assert (found["inputs"], found["targets"]) == (["x"], ["kind", "scale"])


@CWD
def test_a_vocabulary_of_a_set(gradscope: Gradscope, monkeypatch: pytest.MonkeyPatch) -> None:
    """A note names the line with the set."""
    Path("words.py").write_text(
        "import torch\nfrom torch import nn\ntexts = ['b a', 'a c']\n"
        "def build(): return nn.Linear(3, 2)\n"
        "def main():\n    words = list(set(' '.join(texts).split()))\n"
        "    rows = [(torch.eye(3)[words.index(t[0])], k) for k, t in enumerate(texts)]\n"
    )
    torch.save(nn.Linear(3, 2).state_dict(), "net.pt")
    Path("run.toml").write_text(
        'version = 1\n[model]\nfactory = "torch.nn:Linear"\n[model.kwargs]\nin_features = 3\n'
        'out_features = 2\n[checkpoint]\npath = "net.pt"\n[dataset]\npath = "words.py:main.rows"\n'
        '[loss]\nname = "cross_entropy"\n'
    )
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    done = gradscope("check", "--config", "run.toml")
    told = " ".join(done.out.split())
    assert "words.py, line 6: words = list(set(" in told and "sort the set" in told
    Path("words.py").write_text(Path("words.py").read_text() + "\n# with a hash seed\n")
    monkeypatch.setenv("PYTHONHASHSEED", "3")
    assert "sort the set" not in " ".join(gradscope("check", "--config", "run.toml").out.split())


@CWD
def test_data_relative_to_the_folder_of_the_script(
    gradscope: Gradscope, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names the folder in which the script runs."""
    Path("deep/data").mkdir(parents=True)
    Path("deep/data/rows.txt").write_text("1 2 3\n4 5 6\n")
    Path("deep/train.py").write_text(
        "import torch\nclass Rows(torch.utils.data.Dataset):\n    def __init__(self):\n"
        "        with open('data/rows.txt') as file:\n"
        "            self.rows = [[float(x) for x in line.split()] for line in file]\n"
        "    def __len__(self): return len(self.rows)\n"
        "    def __getitem__(self, k): return torch.tensor(self.rows[k]), k\n"
    )
    torch.save(nn.Linear(3, 2).state_dict(), "deep/net.pt")
    Path("deep/run.toml").write_text(
        'version = 1\n[model]\nfactory = "torch.nn:Linear"\n[model.kwargs]\nin_features = 3\n'
        'out_features = 2\n[checkpoint]\npath = "net.pt"\n[dataset]\npath = "train.py:Rows"\n'
        '[loss]\nname = "cross_entropy"\n'
    )
    done = gradscope("check", "--config", "deep/run.toml")
    assert done.code == 3 and f"below {Path.cwd() / 'deep'}: run the command there" in done.err
    monkeypatch.chdir("deep")
    assert gradscope("check", "--config", "run.toml").code == 0


@CWD
def test_a_function_that_nothing_calls_leaves_the_class(gradscope: Gradscope) -> None:
    """The defaults of its parameters may not be the arguments of the training."""
    Path("rows.py").write_text(ROWS)
    script = CONFIG.replace("def train(cfg):", "def train(path='conf.json'):\n    cfg = read(path)")
    read = "def read(path): return Easy(json.load(open(path)))\n"
    Path("train.py").write_text(f"{script}{read}fire = print\nfire.Fire = fire\n")
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    torch.save({f"fc.{k}": v for k, v in net.state_dict().items()}, "net.pt")
    found = drafted(gradscope, "net.pt", "train.py:train_loader")
    assert found["model"]["factory"] == "train.py:Net"
    assert "depth" in found["model"]["kwargs"]["cfg"]


@CWD
def test_classes_with_one_name_in_several_scripts(gradscope: Gradscope) -> None:
    """A script that builds another class with this name is not asked."""
    made = "class Model(nn.Module):\n    def __init__(self, NAME):\n        super().__init__()\n"
    use = "import torch\nfrom NAME import Model\ndef main(n=3):\n    net = Model(n + 1)\n"
    use += (
        "    opt = torch.optim.SGD(net.parameters(), 1)\n    loss = net(1)\n    loss.backward()\n"
    )
    for name, layer in (("a_first", "self.conv = nn.Conv2d(size, 2, 3)"), ("b_second", "")):
        layer = layer or "self.fc, self.power = nn.Linear(4, 3), power"
        text = made.replace("NAME", "power" if "power" in layer else "size")
        Path(f"{name}.py").write_text(f"from torch import nn\n{text}        {layer}\n")
        if name == "a_first":
            Path("a_train.py").write_text(use.replace("NAME", name))
    Path("rows.py").write_text("rows = [([1.0, 2.0, 3.0, 4.0], 1)]\n")
    torch.save({f"fc.{k}": v for k, v in nn.Linear(4, 3).state_dict().items()}, "net.pt")
    found = drafted(gradscope, "net.pt", "rows.py:rows", "--loss", "mse")
    assert found["model"]["factory"] == "b_second.py:Model"
    Path("b_train.py").write_text(use.replace("NAME", "b_second"))
    found = drafted(gradscope, "net.pt", "rows.py:rows", "--loss", "mse", "--overwrite")
    assert found["model"]["factory"] == "b_train.py:main.net"
