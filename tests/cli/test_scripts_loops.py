"""Losses that are the lines of a training loop: FILE.py:FUNCTION.loss."""

import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import gradscope as package
from gradscope.errors import ModelError
from gradscope.sources.code import load_function
from tests.cli.conftest import Gradscope
from tests.cli.test_scripts_parts import CWD, drafted, in_folder, norms

__all__ = ["in_folder"]  # a fixture

N = 12
HEAD = """
import argparse
import os
import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

class Net(nn.Module):
    def __init__(self, classes=3):
        super().__init__()
        self.classes = classes
        self.body, self.head = nn.Linear(4, 6), nn.Linear(6, classes)
    def forward(self, x):
        hidden = torch.tanh(self.body(x))
        return self.head(hidden), hidden

def data():
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(12, 4, generator=generator)
    return TensorDataset(x, torch.randint(3, (12,), generator=generator))
"""
# a dict as batch, a criterion that depends on the model, a sum over two statements, mixed precision
DICTS = """
class Pairs(Dataset):
    def __init__(self): self.data = data()
    def __len__(self): return len(self.data)
    def __getitem__(self, k):
        x, y = self.data[k]
        return {"image": x, "mask": y, "weight": 0.5 + x[0] ** 2, "name": f"sample {k}"}

def extra(logits, onehot):
    return 1 - (2 * (logits.softmax(1) * onehot).sum() + 1) / (2 * onehot.sum() + 1)

def train_model(model, device, epochs=1, amp=False, share=0.25):
    loader = DataLoader(Pairs(), batch_size=4, shuffle=True)
    criterion = nn.CrossEntropyLoss(label_smoothing=share) if model.classes > 1 else nn.BCELoss()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", enabled=amp)
    for epoch in range(epochs):
        model.train()
        total = 0
        for step, batch in enumerate(loader):
            images, masks = batch["image"], batch["mask"]
            images = images.to(device=device, dtype=torch.float32) * 2
            with torch.autocast("cpu", enabled=amp):
                out, _ = model(images)
                loss = criterion(out, masks)
                loss += extra(out, F.one_hot(masks, model.classes)) * batch["weight"].mean()
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            total += loss.item()
    torch.save(model.state_dict(), "net.pt")

def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--share", type=float, default=0.125)
    parser.add_argument("--lr", type=float, default=0.1)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    net = Net()
    train_model(net, device, share=args.share)

if __name__ == "__main__":
    main()
"""


def _of_dicts(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    out = model(x * 2)[0]
    overlap = (out.softmax(1) * F.one_hot(y, 3)).sum()
    dice = (1 - (2 * overlap + 1) / 3) * (0.5 + x[0, 0] ** 2)
    return F.cross_entropy(out, y, label_smoothing=0.125) + dice


# a loop at the top level, several outputs, changed targets, an option with a regulariser
TOP = """
parser = argparse.ArgumentParser()
parser.add_argument("--sparse", type=float, default=0.5)
parser.add_argument("--rounds", type=int, default=1)
opt = parser.parse_args()
loader = DataLoader(data(), batch_size=4)
net = Net()
optimizer = optim.Adam(net.parameters(), lr=0.01)
net.cuda()
for epoch in range(opt.rounds):
    for i, sample in enumerate(loader, 0):
        points, target = sample
        target = (target[:] + 1) % 3
        points = points.flip(1)
        points, target = points.cuda(), target.cuda()
        optimizer.zero_grad()
        net = net.train()
        pred, hidden = net(points)
        loss = F.nll_loss(pred.log_softmax(1), target)
        if opt.sparse:
            loss += hidden.abs().sum() * opt.sparse
        loss.backward()
        optimizer.step()
    torch.save({"net": net.state_dict(), "epoch": epoch}, "net.pt")
"""


def _of_top(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    out, hidden = model(x.flip(1))
    return F.cross_entropy(out, (y + 1) % 3) + hidden.abs().sum() * 0.5


# a trainer with attributes, whose batches come from an iterator
TRAINER = """
class Trainer:
    def __init__(self, model, data, weight, steps=2):
        self.model, self.data, self.steps = model, data, steps
        self.criterion = nn.CrossEntropyLoss(weight=weight)
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.optimizer = optim.SGD(self.model.parameters(), lr=0.1)
        self.loss = None
    def run(self):
        model = self.model
        batches = iter(DataLoader(self.data, batch_size=4))
        for _ in range(self.steps):
            try:
                batch = next(batches)
            except StopIteration:
                batches = iter(DataLoader(self.data, batch_size=4))
                batch = next(batches)
            batch = [t.to(self.device) for t in batch]
            x, y = batch
            out, hidden = model(x)
            self.loss = self.criterion(out, y) / 2 + hidden.square().mean()
            self.optimizer.zero_grad()
            self.loss.backward()
            self.optimizer.step()

def main():
    weights = torch.tensor([1.0, 2.0, 3.0])
    trainer = Trainer(Net(), data(), weights)
    trainer.run()
    torch.save(trainer.model.state_dict(), "net.pt")

if __name__ == "__main__":
    main()
"""


def _of_trainer(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    out, hidden = model(x)  # the weighted mean over one sample is its loss without a weight
    return F.cross_entropy(out, y) / 2 + hidden.square().mean()


# self.model is used by name, and a helper method of the trainer computes the loss
METHOD = TRAINER.replace("model = self.model\n        batches", "batches").replace(
    "model(x)", "self.model(x)"
)

# the block if __name__ == "__main__" has the variables, which functions read as globals
BLOCK = """
def penalty(hidden):
    return scale * hidden.square().sum()

def train(epoch):
    for batch_idx, (x, y) in enumerate(loader):
        if len(x) < 4:  # the last batch
            mean_of_last = mean
            continue
        x = (x - mean) / 2
        optimizer.zero_grad()
        out, hidden = net(x)
        loss = criterion(out, y) + penalty(hidden) + 0 * epoch
        loss.backward()
        optimizer.step()

if __name__ == "__main__":
    mean, scale = torch.full((4,), 0.5), 0.25
    loader = DataLoader(data(), batch_size=4)
    net = Net()
    criterion = nn.CrossEntropyLoss()
    optimizer = optim.SGD(net.parameters(), lr=0.1)
    for epoch in range(2):
        train(epoch)
    torch.save(net.state_dict(), "net.pt")
"""


def _of_block(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    out, hidden = model((x - 0.5) / 2)
    return F.cross_entropy(out, y) + 0.25 * hidden.square().sum()


# the loop is in another file
ENGINE = """
import torch
from tqdm import tqdm
ALPHA = 0.3
def train_one_epoch(model, criterion, loader, optimizer, device, max_norm=0):
    model.train()
    criterion.train()
    for inputs, labels in tqdm(loader):
        inputs, labels = inputs.to(device), labels.to(device)
        outputs, hidden = model(inputs + 1)
        losses = {"ce": criterion(outputs, labels), "size": ALPHA * hidden.square().mean()}
        loss = sum(losses[k] for k in losses.keys())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""
ENGINE += """
def fit(batches, net, loss_fn, optimizer, device, epochs):
    for epoch in range(epochs):
        train_one_epoch(net, loss_fn, batches, optimizer, device, max_norm=1)
"""
IMPORTED = """
from engine import train_one_epoch

def main(args):
    device = torch.device(args.device)
    criterion = nn.CrossEntropyLoss(label_smoothing=args.smoothing)
    loader = DataLoader(data(), batch_size=4)
    model = Net().to(device)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(1):
        train_one_epoch(model, criterion, loader, optimizer, device)
    torch.save(model.state_dict(), "net.pt")

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--smoothing", type=float, default=0.2)
    main(parser.parse_args())
"""


# an array whose axes are turned before the model, with an attribute of a parameter
TURNED = """
def main(args):
    args.width = 0
    x, y = data().tensors
    args.rows, args.width = x.shape
    model = Net()
    criterion = nn.CrossEntropyLoss()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(x.view(-1, 2, 2), y), batch_size=4)
    for images, labels in loader:
        images = images.transpose(1, 2).flatten(1) * (args.width / 2)
        out, _ = model(images)
        loss = criterion(out, labels)
        loss.backward()
        optimizer.step()
    torch.save(model.state_dict(), "net.pt")

if __name__ == "__main__":
    main(argparse.Namespace())
"""


def _of_turned(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x.view(-1, 2, 2).transpose(1, 2).flatten(1) * 2)[0], y)


# the loop is in a function that the imported function calls
FITTED = (
    IMPORTED.replace("from engine import train_one_epoch", "from engine import fit")
    .replace(
        "train_one_epoch(model, criterion, loader, optimizer, device)",
        "fit(loader, model, criterion, optimizer, device, epochs=1)",
    )
    .replace("    for epoch in range(1):\n        fit", "    fit")
)


def _of_engine(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    out, hidden = model(x + 1)
    return F.cross_entropy(out, y, label_smoothing=0.2) + 0.3 * hidden.square().mean()


# a frozen teacher, whose weights the script reads from a file
TEACHER = """
def main():
    loader = DataLoader(data(), batch_size=4)
    teacher = Net()
    teacher.load_state_dict(torch.load("teacher.pt"))
    teacher.eval()
    student = Net()
    optimizer = optim.SGD(student.parameters(), lr=0.1)
    for x, y in loader:
        with torch.no_grad():
            wanted, _ = teacher(x)
        out, _ = student(x)
        loss = F.kl_div(out.log_softmax(1), wanted.softmax(1), reduction="batchmean")
        loss = loss + F.cross_entropy(out, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    torch.save(student.state_dict(), "net.pt")

if __name__ == "__main__":
    main()
"""


def _of_teacher(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    import script  # type: ignore[import-not-found]

    teacher = script.Net().double()
    teacher.load_state_dict(torch.load("teacher.pt"))
    out, wanted = model(x)[0], teacher(x)[0].detach().softmax(1)
    return (wanted * (wanted.log() - out.log_softmax(1))).sum() + F.cross_entropy(out, y)


# samples without targets, in a list
ALONE = """
def main():
    model = Net()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(data().tensors[0]), batch_size=4)
    for batch in loader:
        x = batch[0]
        out, hidden = model(x)
        loss = (hidden[:, :4] - x).square().sum(1).mean() + out.logsumexp(1).mean()
        loss.backward()
        optimizer.step()
    torch.save(model.state_dict(), "net.pt")

if __name__ == "__main__":
    main()
"""


def _of_alone(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    out, hidden = model(x)
    return (hidden[:, :4] - x).square().sum() + out.logsumexp(1).sum()


# rows of arrays, selected by positions
ROWS = """
X, Y = data().tensors

def main(batch=5):
    model, criterion = Net(), nn.CrossEntropyLoss()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    order = torch.randperm(len(X))
    for epoch in range(2):
        for i in range(0, len(X), batch):
            idx = order[i : i + batch]
            y = Y[idx]
            x = X[idx]
            out, hidden = model(x * 3)
            loss = criterion(out, y) + hidden.abs().mean()
            loss.backward()
            optimizer.step()
    torch.save(model.state_dict(), "net.pt")

if __name__ == "__main__":
    main()
"""


def _of_rows(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    out, hidden = model(x * 3)
    return F.cross_entropy(out, y) + hidden.abs().mean()


# a function that returns a batch, in a loop without an end; accumulated gradients
GETS = """
X, Y = data().tensors
accumulation_steps = 4

def get_batch(split):
    chosen = torch.randint(len(X), (5,))
    return X[chosen], Y[chosen]

def train(model, optimizer, steps):
    count = 0
    while True:
        x, y = get_batch("train")
        out, hidden = model(x)
        loss = F.cross_entropy(out, y) + (hidden * x.sum(1, keepdim=True)).square().mean()
        loss = loss / accumulation_steps
        loss.backward()
        optimizer.step()
        count += 1
        if count == steps:
            break

if __name__ == "__main__":
    model = Net()
    train(model, optim.SGD(model.parameters(), lr=0.1), 3)
    torch.save(model.state_dict(), "net.pt")
"""


def _of_gets(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    out, hidden = model(x)
    return F.cross_entropy(out, y) + (hidden * x.sum()).square().mean()


# functions that train on one batch: passed by a loop, drawn in the function, or unpacked
PASSED = """
def train_batch(net, images, labels, optimizer, scale=2.0):
    optimizer.zero_grad()
    out, hidden = net(images * scale)
    loss = F.cross_entropy(out, labels) + hidden.square().mean()
    loss.backward()
    optimizer.step()
    return loss.item()

def main():
    model = Net()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(data(), batch_size=4)
    for epoch in range(2):
        for i, (a, b) in enumerate(loader):
            total = train_batch(model, a.to("cuda" if torch.cuda.is_available() else "cpu"), b,
                                optimizer)
    torch.save(model.state_dict(), "net.pt")

if __name__ == "__main__":
    main()
"""
DRAWN = (
    PASSED.replace("net, images, labels, optimizer", "net, optimizer, batches")
    .replace("optimizer.zero_grad()", "images, labels = next(batches)")
    .replace(
        """        for i, (a, b) in enumerate(loader):
            total = train_batch(model, a.to("cuda" if torch.cuda.is_available() else "cpu"), b,
                                optimizer)
""",
        "        train_batch(model, optimizer, iter(loader))\n",
    )
)
STARRED = """
def chosen():
    k = torch.randint(12, (5,))
    return [t[k] for t in data().tensors]

net = Net()
optimizer = optim.SGD(net.parameters(), lr=0.1)

def train(images, labels):
    optimizer.zero_grad()
    total = 0
    for k in (1, 3):
        out, hidden = net(images * k)
        total += F.cross_entropy(out, labels) + hidden.square().mean()
    total.backward()
    optimizer.step()

for step in range(4):
    train(*chosen())
torch.save(net.state_dict(), "net.pt")
"""


def _of_passed(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    out, hidden = model(x * 2)
    return F.cross_entropy(out, y) + hidden.square().mean()


def _of_starred(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return _of_passed(model, x / 2, y) + _of_passed(model, x * 1.5, y)


NUMBERED = GETS.replace(
    '    while True:\n        x, y = get_batch("train")',
    """
    for number in batches:
        x, y = get_batch(number)""",
).replace(
    "accumulation_steps = 4",
    """accumulation_steps = 4
batches = [*range(8)]""",
)


# Lightning's form
STEP = """
class Lit(Net):
    def training_step(self, batch, batch_idx):
        x, y = batch
        out, hidden = self(x.abs())
        loss = F.cross_entropy(out, y)
        for part in (out, hidden):
            loss = loss + 0.1 * part.square().mean()
        return {"loss": loss, "step": batch_idx}

loader = DataLoader(data(), batch_size=4)

if __name__ == "__main__":
    torch.save(Lit().state_dict(), "net.pt")
"""


def _of_step(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    out, hidden = model(x.abs())
    return F.cross_entropy(out, y) + 0.1 * (out.square().mean() + hidden.square().mean())


def train(script: str) -> None:
    """Write script.py, and train with it; this machine may have no CUDA device."""
    torch.manual_seed(0)
    torch.save(_net().state_dict(), "teacher.pt")
    Path("engine.py").write_text(ENGINE)
    Path("script.py").write_text(HEAD + script.replace("cuda()", "cpu()"))
    torch.manual_seed(1)
    runpy.run_path("script.py", run_name="__main__")
    Path("script.py").write_text(HEAD + script)


def _net() -> nn.Module:
    names: dict[str, Any] = {}
    exec(HEAD, names)
    made: nn.Module = names["Net"]()
    return made


def expected(loss: Callable[[nn.Module, Tensor, Tensor], Tensor], key: str = "") -> list[float]:
    """Return the norms of gradients in float64, one backward pass for each sample."""
    names: dict[str, Any] = {}
    exec(HEAD, names)
    stored = torch.load("net.pt")
    model = names["Net"]()
    model.load_state_dict(stored[key] if key else stored)
    model.double()
    found = []
    for x, y in names["data"]():
        rows = torch.autograd.grad(
            loss(model, x[None].double(), y[None]), list(model.parameters()), allow_unused=True
        )
        found.append(float(sum(g.square().sum() for g in rows if g is not None)) ** 0.5)
    return found


@CWD
@pytest.mark.parametrize(
    ("script", "data", "name", "loss", "key"),
    [
        (DICTS, "script.py:loader", "script.py:train_model.loss", _of_dicts, ""),
        (TOP, "script.py:loader", "script.py:loss", _of_top, "net"),
        (TRAINER, "script.py:data", "script.py:Trainer.run.loss", _of_trainer, ""),
        (METHOD, "script.py:data", "script.py:Trainer.run.loss", _of_trainer, ""),
        (BLOCK, "script.py:loader", "script.py:train.loss", _of_block, ""),
        (IMPORTED, "script.py:loader", "script.py:train_one_epoch.loss", _of_engine, ""),
        (FITTED, "script.py:loader", "script.py:train_one_epoch.loss", _of_engine, ""),
        (TURNED, "script.py:loader", "script.py:main.loss", _of_turned, ""),
        (TEACHER, "script.py:loader", "script.py:main.loss", _of_teacher, ""),
        (ALONE, "script.py:loader", "script.py:main.loss", _of_alone, ""),
        (ROWS, "script.py:X,Y", "script.py:main.loss", _of_rows, ""),
        (GETS, "script.py:X,Y", "script.py:train.loss", _of_gets, ""),
        (NUMBERED, "script.py:X,Y", "script.py:train.loss", _of_gets, ""),
        (PASSED, "script.py:loader", "script.py:train_batch.loss", _of_passed, ""),
        (DRAWN, "script.py:loader", "script.py:train_batch.loss", _of_passed, ""),
        (STARRED, "script.py:data", "script.py:train.total", _of_starred, ""),
        (STEP, "script.py:loader", "script.py:Lit.training_step.loss", _of_step, ""),
    ],
    ids=[
        "dicts",
        "top",
        "trainer",
        "method",
        "block",
        "imported",
        "fitted",
        "turned",
        "teacher",
        "alone",
        "rows",
        "gets",
        "numbered",
        "passed",
        "drawn",
        "starred",
        "step",
    ],
)
def test_the_loss_of_a_training_loop(
    gradscope: Gradscope,
    monkeypatch: pytest.MonkeyPatch,
    script: str,
    data: str,
    name: str,
    loss: Callable[[nn.Module, Tensor, Tensor], Tensor],
    key: str,
) -> None:
    monkeypatch.setattr("sys.argv", ["script.py"])
    train(script)
    before = Path("net.pt").read_bytes()
    found = drafted(gradscope, "net.pt", data)
    assert found["loss"]["name"] == name
    assert norms(gradscope) == pytest.approx(expected(loss, key), rel=1e-4)
    assert Path("net.pt").read_bytes() == before


NOISE = """
def train(model, loader, optimizer, steps=20):
    levels = torch.cumprod(1 - torch.linspace(1e-3, 0.2, steps), 0)
    for x, _ in loader:
        t = torch.randint(0, steps, (len(x),))
        noise = torch.randn_like(x)
        noisy = levels[t].sqrt()[:, None] * x + (1 - levels[t]).sqrt()[:, None] * noise
        out, hidden = model(noisy)
        loss = F.mse_loss(hidden[:, :4], noise)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

def main():
    model = Net()
    loader = DataLoader(data(), batch_size=4)
    train(model, loader, optim.SGD(model.parameters(), lr=0.1))
    torch.save(model.state_dict(), "net.pt")

if __name__ == "__main__":
    main()
"""


@package.model_loss
def _of_noise(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """The loss of NOISE, for all samples at once."""
    levels = torch.cumprod(1 - torch.linspace(1e-3, 0.2, 20), 0)
    t = torch.randint(0, 20, (len(inputs),))
    noise = torch.randn_like(inputs)
    noisy = levels[t].sqrt()[:, None] * inputs + (1 - levels[t]).sqrt()[:, None] * noise
    return (model(noisy)[1][:, :4] - noise).square().mean(1)


@CWD
def test_random_numbers_of_a_loop_belong_to_samples(
    gradscope: Gradscope, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The numbers are those that a loss of all samples at once draws."""
    monkeypatch.setattr("sys.argv", ["script.py"])
    train(NOISE)
    found = drafted(gradscope, "net.pt", "script.py:loader")
    assert found["loss"]["name"] == "script.py:train.loss"
    assert found["compute"]["randomness"] == "fixed"
    model = _net()
    model.load_state_dict(torch.load("net.pt"))
    names: dict[str, Any] = {}
    exec(HEAD, names)
    x, y = names["data"]().tensors
    with package.Scope(model.eval(), _of_noise, randomness="fixed") as scope:
        together = scope.norms(x, y)
    assert norms(gradscope) == pytest.approx(together.tolist(), rel=1e-4)


@CWD
def test_numbers_that_the_training_changes_are_named(gradscope: Gradscope) -> None:
    """The weight of a term grows with the epoch: the loss is that of the first epoch."""
    changed = "F.cross_entropy(out, y) + (epoch + 1) * hidden.square().sum()"
    script = BLOCK.replace("criterion(out, y) + penalty(hidden) + 0 * epoch", changed)
    Path("script.py").write_text(HEAD + script)
    torch.save(_net().state_dict(), "net.pt")
    done = gradscope("init", "net.pt", "script.py:loader")
    assert "with epoch of the first round" in " ".join(done.out.split())

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        out, hidden = model((x - 0.5) / 2)
        return F.cross_entropy(out, y) + hidden.square().sum()

    assert norms(gradscope) == pytest.approx(expected(loss), rel=1e-4)
    done = gradscope("check", "--config", "run.toml")
    assert "with epoch of the first round" in " ".join(done.out.split())


@CWD
def test_lines_with_another_trained_model_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights of the encoder are not in the checkpoint of the decoder."""
    others = '    loader.sizes = torch.load("other.pt")\n'  # it loads something else
    script = TEACHER.replace('    teacher.load_state_dict(torch.load("teacher.pt"))\n', others)
    torch.save([1], "other.pt")
    Path("script.py").write_text(HEAD + script)
    with pytest.raises(ModelError, match="another trained model, 'teacher'"):
        load_function("script.py:main.loss", "loss")


@CWD
@pytest.mark.parametrize(
    "change",
    [
        # an object that is made of the script's own model
        ("criterion = nn.CrossEntropyLoss()", "criterion = lambda o, y: net(o[:, :1]) + y"),
        # a function that reads the script's own model
        ("return scale * hidden", "return net.head.weight.sum() + scale * hidden"),
    ],
)
def test_a_loss_of_the_scripts_own_model_is_not_a_loss_of_another(change: tuple[str, str]) -> None:
    Path("script.py").write_text(HEAD + BLOCK.replace(*change))
    with pytest.raises(ModelError, match=r"there is no 'train\.loss' in it"):
        load_function("script.py:train.loss", "loss")


PICKLED = """
import torch
from torch import nn
class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 3)
    def forward(self, x): return self.fc(x)
if __name__ == "__main__":
    torch.manual_seed(3)
    x, y = torch.randn(6, 4), torch.arange(6) % 3
    torch.save(Own(), "own.pt")
    torch.save((x, y), "d.pt")
    open("runs", "a").write("ran ")
"""


@CWD
def test_a_pickled_model_of_a_script_that_ran_as_main(gradscope: Gradscope) -> None:
    """The pickle names __main__; the class is in a script of the folder, which is not run."""
    Path("own.py").write_text(PICKLED)
    subprocess.run([sys.executable, "own.py"], check=True)
    arguments = ["own.pt", "d.pt", "--unsafe-pickle", "--loss", "cross_entropy"]
    found = drafted(gradscope, *arguments)
    assert found["model"]["factory"] == "checkpoint"
    rows = norms(gradscope)
    import own  # type: ignore[import-not-found]

    torch.manual_seed(3)
    x, y = torch.randn(6, 4), torch.arange(6) % 3
    model = own.Own().double()
    each = [
        torch.autograd.grad(F.cross_entropy(model(a[None].double()), b[None]), model.parameters())
        for a, b in zip(x, y, strict=True)
    ]
    want = [float(sum(g.square().sum() for g in grads)) ** 0.5 for grads in each]
    assert rows == pytest.approx(want, rel=1e-5)
    assert Path("runs").read_text() == "ran "


EXPERIMENT = """
import torch
from torch import nn
class Basic:
    def __init__(self, width):
        self.model = nn.Linear(4, width)
class Experiment(Basic):
    def train(self, name):
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        for x, y in loader:
            loss = nn.functional.cross_entropy(self.model(x), y) + x.square().sum()
            loss.backward()
            optimizer.step()
        torch.save(self.model.state_dict(), name)
loader = [(torch.ones(2, 4), torch.zeros(2, dtype=torch.long))]
"""
RUNNER = """
import torch
from experiment import Experiment
Kind = Experiment
exp = Kind(3)
data = torch.utils.data.TensorDataset(torch.ones(5, 4), torch.arange(5) % 3)
CALL
"""


@CWD
@pytest.mark.parametrize(
    ("call", "saves"),
    [
        ('exp.train("net.pt")', False),  # the training is recognised, and is not run
        ('for k in range(2):\n    now = Kind(3)\n    now.train("net.pt")', False),
        ('getattr(exp, "tr" + "ain")("net.pt")', True),  # it is not: the save is refused
        ('import pathlib; exec(pathlib.Path("more.py").read_text())', True),
    ],
)
def test_a_script_that_trains_by_a_method_of_an_imported_class(
    gradscope: Gradscope, call: str, saves: bool
) -> None:
    """The checkpoint is never overwritten."""
    Path("experiment.py").write_text(EXPERIMENT)
    Path("main.py").write_text(RUNNER.replace("CALL", call))
    Path("more.py").write_text("exp.train('net.pt')")
    torch.manual_seed(0)
    torch.save(nn.Linear(4, 3).state_dict(), "net.pt")
    before = Path("net.pt").read_bytes()
    made = "now" if "now" in call else "exp"  # an object that is made in the loop that trains
    run = ["net.pt", "main.py:data", "--model", f"main.py:{made}.model", "--loss", "cross_entropy"]
    done = gradscope("compute", *run, "-t", "norm", "-o", "o.h5")
    assert Path("net.pt").read_bytes() == before
    assert (done.code, Path("o.h5").exists()) == ((3, False) if saves else (0, True)), done.err
    if saves:
        assert "your code saves this checkpoint while it is imported" in " ".join(done.err.split())
