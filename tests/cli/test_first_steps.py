"""What a script trains, taken from its own first steps: FILE.py without a name."""

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import gradscope as package
from tests.cli import test_scripts_loops as loops
from tests.cli.conftest import Gradscope
from tests.cli.test_scripts_parts import CWD, in_folder, norms

__all__ = ["in_folder"]  # a fixture

OwnLoss = Callable[[nn.Module, Tensor, Tensor], Tensor]


def told(text: str) -> str:
    return " ".join(text.split())


def first_steps(gradscope: Gradscope, *arguments: str) -> Any:
    """Return the norms of what script.py trains, with the weights of net.pt."""
    done = gradscope("init", "net.pt", "script.py", "--overwrite", *arguments)
    assert done.code == 0, done.err
    return norms(gradscope)


def compared(found: Any, every: list[float], *, ordered: bool) -> None:
    """Compare norms with those of all samples; batches that the script draws have some of them."""
    if ordered:
        assert found == pytest.approx(every, rel=1e-4)
        return
    assert len(found) > 1
    for norm in found:
        assert min(abs(norm / other - 1) for other in every) < 1e-4


@CWD
@pytest.mark.parametrize(
    ("script", "loss", "key", "ordered"),
    [
        (loops.DICTS, loops._of_dicts, "", True),
        (loops.TOP, loops._of_top, "net", True),
        (loops.TRAINER, loops._of_trainer, "", True),
        (loops.METHOD, loops._of_trainer, "", True),
        (loops.BLOCK, loops._of_block, "", True),
        (loops.IMPORTED, loops._of_engine, "", True),
        (loops.FITTED, loops._of_engine, "", True),
        (loops.TURNED, loops._of_turned, "", True),
        (loops.TEACHER, loops._of_teacher, "", True),
        (loops.ALONE, loops._of_alone, "", True),
        (loops.ROWS, loops._of_rows, "", False),
        (loops.GETS, loops._of_gets, "", False),
        (loops.NUMBERED, loops._of_gets, "", False),
        (loops.PASSED, loops._of_passed, "", True),
        (loops.DRAWN, loops._of_passed, "", True),
        (loops.STARRED, loops._of_starred, "", False),
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
    ],
)
def test_the_loss_of_a_script_that_runs(
    gradscope: Gradscope,
    monkeypatch: pytest.MonkeyPatch,
    script: str,
    loss: OwnLoss,
    key: str,
    ordered: bool,
) -> None:
    """The same scripts as for the loops that are read, with the same float64 losses."""
    monkeypatch.setattr("sys.argv", ["script.py"])
    loops.train(script)
    before = Path("net.pt").read_bytes()
    compared(first_steps(gradscope), loops.expected(loss, key), ordered=ordered)
    assert Path("net.pt").read_bytes() == before


# a batch that is a list of samples, with a function that makes tensors of it
LISTS = """
SAMPLES = [{"x": x.tolist(), "y": int(y)} for x, y in data()]

def as_tensors(part):
    return torch.tensor([s["x"] for s in part]), torch.tensor([s["y"] for s in part])

def train(model, batch_size=4):
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    for number in range(len(SAMPLES) // batch_size):
        start = number * batch_size
        part = SAMPLES[start : start + batch_size]
        x, y = as_tensors(part)
        loss = F.cross_entropy(model(x * 2)[0], y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

model = Net()
train(model)
torch.save(model.state_dict(), "net.pt")
"""


def _of_lists(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x * 2)[0], y)


# a batch of an own class, whose attributes are arrays of numpy
OBJECTS = """
class Batch:
    def __init__(self, k):
        x, y = data().tensors
        self.x, self.y, self.names = x[k].numpy(), y[k].numpy(), ["a"] * len(k)

class Batches:
    def __iter__(self):
        for k in torch.randperm(12).split(4):
            yield Batch(k)

model = Net()
optimizer = optim.SGD(model.parameters(), lr=0.1)
for batch in Batches():
    x, y = torch.from_numpy(batch.x), torch.from_numpy(batch.y)
    assert len(batch.names) == len(x)
    loss = F.cross_entropy(model(x * 2)[0], y)
    loss.backward()
    optimizer.step()
torch.save(model.state_dict(), "net.pt")
"""

# a loss that is a mean with weights over the batch
WEIGHTED = """
def train_step(model, optimizer, x, y):
    out, hidden = model(x)
    weight = x[:, 0].abs()
    loss = (F.cross_entropy(out, y, reduction="none") * weight).sum() / weight.sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()

model = Net()
optimizer = optim.SGD(model.parameters(), lr=0.1)
for epoch in range(3):
    order = torch.randperm(12)
    for start in range(0, 12, 4):
        train_step(model, optimizer, *(t[order[start : start + 4]] for t in data().tensors))
torch.save(model.state_dict(), "net.pt")
"""


def _of_weighted(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x)[0], y)


# batches that the lines take from iterators, below conditions, with workers
FETCHED = """
def endless(loader):
    while True:
        for batch in loader:
            yield batch

def train(model, first, second, steps=6):
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    first, second = endless(first), endless(second)
    for step in range(steps):
        loss = 0
        if steps:
            x, y = next(first)
            out, _ = model(x)
            loss = loss + F.cross_entropy(out, y)
        if steps > 1:
            x, _ = next(second)
            loss = loss + model(x)[1].square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

if __name__ == "__main__":
    model = Net()
    loaders = [DataLoader(data(), batch_size=4, num_workers=k) for k in (1, 0)]
    train(model, *loaders)
    torch.save(model.state_dict(), "net.pt")
"""

# two loaders at once
ZIPPED = """
model = Net()
optimizer = optim.SGD(model.parameters(), lr=0.1)
loaders = [DataLoader(data(), batch_size=4) for _ in range(2)]
for step, ((x, y), (again, _)) in enumerate(zip(*loaders)):
    loss = F.cross_entropy(model(x)[0], y) + model(again)[1].square().mean()
    loss.backward()
    optimizer.step()
torch.save(model.state_dict(), "net.pt")
"""

# a method with "batch" in its name, and several statements on a line
PARSED = """
class Parser(Net):
    def parse_batch(self, batch):
        return batch[0] * 2, batch[1]

def train(model, optimizer):
    for epoch in range(2):
        for i, batch in enumerate(DataLoader(data(), batch_size=4, shuffle=True)):
            x, y = model.parse_batch(batch)
            loss = F.cross_entropy(model(x)[0], y)
            optimizer.zero_grad(); loss.backward(); optimizer.step()

model = Parser()
train(model, optim.SGD(model.parameters(), lr=0.1))
torch.save(model.state_dict(), "net.pt")
"""

# a buffer, whose batches are named tuples
BUFFER = """
from typing import NamedTuple

class Sample(NamedTuple):
    state: torch.Tensor
    action: torch.Tensor

class Buffer:
    def sample(self, n):
        k = torch.randint(12, (n,))
        return Sample(*(t[k] for t in data().tensors))

model, buffer = Net(), Buffer()
optimizer = optim.SGD(model.parameters(), lr=0.1)
for step in range(20):
    part = buffer.sample(4)
    loss = F.cross_entropy(model(part.state * 2)[0], part.action)
    optimizer.zero_grad()
    torch.autograd.backward(loss)
    optimizer.step()
torch.save(model.state_dict(), "net.pt")
"""

# losses scaled for mixed precision, in a function that another one calls; one process of several
SCALED = """
import torch.distributed as dist
if not dist.is_initialized():
    dist.init_process_group("gloo", init_method=f"file://{os.getcwd()}/{os.getpid()}-{id(data)}",
                            rank=0, world_size=1)

class Worker:
    def __init__(self):
        self.net = Net()
        self.model = nn.parallel.DistributedDataParallel(self.net)
        self.optimizer = optim.SGD(self.net.parameters(), lr=0.1)
        self.scaler = torch.amp.GradScaler("cpu", enabled=True)
    def update(self, loss):
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
    def run(self):
        for x, y in DataLoader(data(), batch_size=4):
            out, hidden = self.model(x)
            self.update(F.cross_entropy(out, y) + hidden.square().mean())

worker = Worker()
worker.run()
torch.save(worker.net.state_dict(), "net.pt")
"""

# a function of a batch, which is one tensor, or a list
CALLED = """
def step(batch):
    x = batch * 2
    loss = model(x)[1].square().mean() + F.cross_entropy(model(x)[0], targets[: len(x)] * 0)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

model, (inputs, targets) = Net(), data().tensors
optimizer = optim.SGD(model.parameters(), lr=0.1)
for batch in DataLoader(inputs, batch_size=4):
    step(batch)
torch.save(model.state_dict(), "net.pt")
"""


def _of_called(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    out, hidden = model(x * 2)
    return hidden.square().mean() + F.cross_entropy(out, y * 0)


CALLED_BACK = """
class Engine:
    def __init__(self, function): self.function = function
    def run(self, loader):
        for batch in loader:
            self.function(self, batch)

def step(engine, batch):
    x, y = batch
    out, hidden = model(x)
    loss = F.cross_entropy(out, y) + hidden.square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

model = Net()
optimizer = optim.SGD(model.parameters(), lr=0.1)
Engine(step).run(DataLoader(data(), batch_size=4, shuffle=True))
torch.save(model.state_dict(), "net.pt")
"""

# LBFGS calls a function that computes the loss
CLOSURE = """
model = Net()
optimizer = optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)
for x, y in DataLoader(data(), batch_size=4):
    def closure():
        optimizer.zero_grad()
        out, hidden = model(x)
        loss = F.cross_entropy(out, y) + hidden.square().mean()
        loss.backward()
        return loss
    optimizer.step(closure)
torch.save(model.state_dict(), "net.pt")
"""


def _of_closure(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    out, hidden = model(x)
    return F.cross_entropy(out, y) + hidden.square().mean()


# the model returns something else in evaluation mode
TWO_MODES = """
class Detector(Net):
    def forward(self, x):
        out, hidden = super().forward(x)
        return (out, hidden) if self.training else out.argmax(1)

model = Detector()
optimizer = optim.SGD(model.parameters(), lr=0.1)
for x, y in DataLoader(data(), batch_size=4):
    out, hidden = model(x)
    loss = F.cross_entropy(out, y) + hidden.square().mean()
    loss.backward()
    optimizer.step()
torch.save(model.state_dict(), "net.pt")
"""

# accelerate reads one batch ahead, and its backward() calls that of the loss
ACCELERATED = """
from accelerate import Accelerator
accelerator = Accelerator(cpu=True)
model = Net()
optimizer = optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(data(), batch_size=4, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for step, (x, y) in enumerate(loader):
    with accelerator.accumulate(model):
        out, hidden = model(x)
        loss = F.cross_entropy(out, y) + hidden.square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
torch.save(accelerator.unwrap_model(model).state_dict(), "net.pt")
"""


# two losses, of which each calls backward(), before a step of the optimizer
TWICE = """
model = Net()
optimizer = optim.SGD(model.parameters(), lr=0.1)
for x, y in DataLoader(data(), batch_size=4):
    optimizer.zero_grad()
    out, hidden = model(x)
    first = F.cross_entropy(out, y)
    first.backward(retain_graph=True)
    second = hidden.square().mean()
    second.backward()
    optimizer.step()
torch.save(model.state_dict(), "net.pt")
"""


@CWD
@pytest.mark.parametrize(
    ("script", "loss", "ordered"),
    [
        (TWICE, _of_closure, True),
        (LISTS, _of_lists, False),
        (OBJECTS, _of_lists, False),
        (WEIGHTED, _of_weighted, False),
        (FETCHED, _of_closure, False),
        (ZIPPED, _of_closure, False),
        (PARSED, _of_lists, True),
        (BUFFER, _of_lists, False),
        (SCALED, _of_closure, True),
        (CALLED, _of_called, True),
        (CALLED_BACK, _of_closure, True),
        (CLOSURE, _of_closure, True),
        (TWO_MODES, _of_closure, True),
        (ACCELERATED, _of_closure, True),
    ],
    ids=[
        "twice",
        "lists",
        "objects",
        "weighted",
        "fetched",
        "zipped",
        "parsed",
        "buffer",
        "scaled",
        "called",
        "called back",
        "closure",
        "two modes",
        "accelerated",
    ],
)
def test_batches_of_other_forms(
    gradscope: Gradscope,
    monkeypatch: pytest.MonkeyPatch,
    script: str,
    loss: OwnLoss,
    ordered: bool,
) -> None:
    if script is ACCELERATED:
        pytest.importorskip("accelerate")
    monkeypatch.setattr("sys.argv", ["script.py"])
    loops.train(script)
    compared(first_steps(gradscope), loops.expected(loss), ordered=ordered)


# arguments; time first; a state that a round takes from the round before; a fixed batch size
RECURRENT = """
class Words(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.table = nn.Embedding(9, width)
        self.rnn = nn.LSTM(width, width)
        self.head = nn.Linear(width, 9)
    def forward(self, tokens, state):
        out, state = self.rnn(self.table(tokens), state)
        return self.head(out), state

def main(args):
    torch.manual_seed(3)
    tokens = torch.randint(9, (40, args.batch_size))
    model = Words(args.width)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    state = tuple(torch.zeros(1, args.batch_size, args.width) for _ in range(2))
    for i in range(0, 32, 8):
        source, wanted = tokens[i : i + 8], tokens[i + 1 : i + 9]
        state = tuple(s.detach() for s in state)
        out, state = model(source, state)
        loss = F.cross_entropy(out.view(8 * args.batch_size, 9), wanted.reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    torch.save(model.state_dict(), "net.pt")

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=3)
    parser.add_argument("--batch_size", type=int, default=20)
    main(parser.parse_args())
"""


@CWD
def test_sequences_with_time_first_and_a_state(
    gradscope: Gradscope, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row belongs to a sequence, which continues with its own state of the round before."""
    given = ["--width", "5", "--batch_size", "6"]
    monkeypatch.setattr("sys.argv", ["script.py", *given])
    loops.train(RECURRENT)
    found = first_steps(gradscope, "--", *given)
    assert tomllib.loads(Path("run.toml").read_text())["model"]["argv"] == given
    names: dict[str, Any] = {}
    exec(loops.HEAD + RECURRENT.partition("if __name__")[0], names)
    torch.manual_seed(3)
    tokens = torch.randint(9, (40, 6))
    model = names["Words"](5)
    zeros = tuple(torch.zeros(1, 6, 5) for _ in range(2))
    with torch.random.fork_rng():  # the first step of the script, in whose second the state is used
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        out, state = model(tokens[:8], zeros)
        F.cross_entropy(out.view(48, 9), tokens[1:9].reshape(-1)).backward()
        optimizer.step()
    model.load_state_dict(torch.load("net.pt"))
    model.double()
    want = []
    for k in range(6):
        own = tuple(s[:, k : k + 1].detach().double() for s in state)
        out, _ = model(tokens[8:16, k : k + 1], own)
        loss = F.cross_entropy(out.flatten(0, 1), tokens[9:17, k])
        rows = torch.autograd.grad(loss, list(model.parameters()))
        want.append(float(sum(g.square().sum() for g in rows)) ** 0.5)
    assert found[:6] == pytest.approx(want, rel=1e-4)


# two modules that are trained together, saved under other names
PARTS = """
encoder, decoder = nn.Sequential(nn.Linear(4, 3), nn.Tanh()), nn.Sequential(nn.Linear(3, 4))
optimizer = optim.SGD([*encoder.parameters(), *decoder.parameters()], lr=0.1)
for x, _ in DataLoader(data(), batch_size=4):
    loss = F.mse_loss(decoder(encoder(x)), x)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
torch.save({"enc_par": encoder.state_dict(), "dec_par": decoder.state_dict()}, "net.pt")
os.makedirs("half", exist_ok=True)
torch.save(encoder.state_dict(), "half/half.pt")
for k in (0, 1):
    torch.save({"state": encoder.state_dict(), "epoch": k}, f"of_encoder_{k}.pth")
    torch.save(decoder.state_dict(), f"of_decoder_{k}.pth")
"""


@CWD
def test_modules_that_are_trained_together(
    gradscope: Gradscope, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["script.py"])
    loops.train(PARTS)
    found = first_steps(gradscope)
    stored = torch.load("net.pt")
    encoder, decoder = nn.Sequential(nn.Linear(4, 3), nn.Tanh()), nn.Sequential(nn.Linear(3, 4))
    encoder.load_state_dict(stored["enc_par"])
    decoder.load_state_dict(stored["dec_par"])
    whole = nn.Sequential(encoder, decoder).double()
    names: dict[str, Any] = {}
    exec(loops.HEAD, names)
    want = []
    for x, _ in names["data"]():
        rows = torch.autograd.grad(
            F.mse_loss(whole(x[None].double()), x[None].double()), list(whole.parameters())
        )
        want.append(float(sum(g.square().sum() for g in rows)) ** 0.5)
    assert found == pytest.approx(want, rel=1e-4)
    gradscope("init", "of_encoder_1.pth", "script.py", "--overwrite")
    assert norms(gradscope) == pytest.approx(want, rel=1e-4)
    done = gradscope("check", "--config", "run.toml")
    assert "decoder of of_decoder_1.pth, encoder of of_encoder_1.pth" in told(done.out)
    gradscope("init", "half/half.pt", "script.py", "--overwrite")
    done = gradscope("check", "--config", "run.toml")
    assert done.code == 3
    assert "trains these modules together: decoder, encoder. Save them in one" in told(done.err)


# the discriminator's step comes first, and needs the generator
GAN = """
class Maker(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
    def forward(self, noise): return self.fc(noise)
class Judge(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 1)
    def forward(self, x): return self.fc(x).squeeze(1)
def main():
    maker, judge = Maker(), Judge()
    of_maker = optim.SGD(maker.parameters(), lr=0.1)
    of_judge = optim.SGD(judge.parameters(), lr=0.1)
    criterion = nn.BCEWithLogitsLoss()
    for x, _ in DataLoader(data(), batch_size=4):
        judge.zero_grad()
        loss_real = criterion(judge(x), torch.ones(len(x)))
        loss_real.backward()
        fake = maker(x.roll(1, 1))
        loss_fake = criterion(judge(fake.detach()), torch.zeros(len(x)))
        loss_fake.backward()
        of_judge.step()
        maker.zero_grad()
        loss = criterion(judge(fake), torch.ones(len(x)))
        loss.backward()
        of_maker.step()
    torch.save({"netG": maker.state_dict(), "netD": judge.state_dict()}, "net.pt")
main()
"""


@CWD
def test_the_first_loss_of_two_models_needs_the_weights_of_both(
    gradscope: Gradscope, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows are those of the first optimizer's loss, the sum of two calls of backward()."""
    monkeypatch.setattr("sys.argv", ["script.py"])
    loops.train(GAN)
    found = first_steps(gradscope)
    names: dict[str, Any] = {}
    exec(loops.HEAD + GAN.removesuffix("main()\n"), names)
    maker, judge = names["Maker"](), names["Judge"]()
    stored = torch.load("net.pt")
    maker.load_state_dict(stored["netG"])
    judge.load_state_dict(stored["netD"])
    want = []
    for x, _ in names["data"]():
        fake = maker(x[None].roll(1, 1)).detach()
        loss = F.softplus(-judge(x[None])).sum() + F.softplus(judge(fake)).sum()
        rows = torch.autograd.grad(loss, list(judge.parameters()))
        want.append(float(sum(g.square().sum() for g in rows)) ** 0.5)
    assert found == pytest.approx(want, rel=1e-4)


# the average of the weights is a teacher
TEACHER = """
import copy
student = Net()
teacher = copy.deepcopy(student).requires_grad_(False)
optimizer = optim.SGD(student.parameters(), lr=0.1)
for x, y in DataLoader(data(), batch_size=4):
    out, hidden = student(x)
    loss = F.cross_entropy(out, y) + F.mse_loss(out, teacher(x)[0])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    for mean, p in zip(teacher.parameters(), student.parameters()):
        mean.mul_(0.5).add_(p.detach(), alpha=0.5)
torch.save({"student": student.state_dict(), "teacher": teacher.state_dict()}, "net.pt")
"""


@CWD
def test_an_average_of_the_weights_comes_from_the_checkpoint(
    gradscope: Gradscope, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["script.py"])
    loops.train(TEACHER)
    found = first_steps(gradscope)
    student, teacher = loops._net(), loops._net()
    stored = torch.load("net.pt")
    student.load_state_dict(stored["student"])
    teacher.load_state_dict(stored["teacher"])
    names: dict[str, Any] = {}
    exec(loops.HEAD, names)
    want = []
    for x, y in names["data"]():
        out, _ = student(x[None])
        loss = F.cross_entropy(out, y[None]) + F.mse_loss(out, teacher(x[None])[0].detach())
        rows = torch.autograd.grad(loss, list(student.parameters()))
        want.append(float(sum(g.square().sum() for g in rows)) ** 0.5)
    assert found == pytest.approx(want, rel=1e-4)


# dropout and noise of torch, in training mode
RANDOM = """
def main():
    model = Net()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    for x, y in DataLoader(data(), batch_size=4):
        out, hidden = model(x + 0.1 * torch.randn_like(x))
        loss = F.cross_entropy(out, y) + F.dropout(hidden, 0.5).square().mean()
        loss.backward()
        optimizer.step()
    torch.save(model.state_dict(), "net.pt")
main()
"""


@CWD
def test_random_numbers_of_the_lines_are_fixed_for_each_sample(
    gradscope: Gradscope, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["script.py"])
    loops.train(RANDOM)
    found = first_steps(gradscope)
    assert norms(gradscope) == pytest.approx(found, rel=1e-6)
    model = loops._net()
    model.load_state_dict(torch.load("net.pt"))
    names: dict[str, Any] = {}
    exec(loops.HEAD, names)
    for k, (x, y) in enumerate(names["data"]()):
        torch.manual_seed(k)
        out, hidden = model(x[None] + 0.1 * torch.randn_like(x[None]))
        loss = F.cross_entropy(out, y[None]) + F.dropout(hidden, 0.5).square().mean()
        rows = torch.autograd.grad(loss, list(model.parameters()))
        assert found[k] == pytest.approx(
            float(sum(g.square().sum() for g in rows)) ** 0.5, rel=1e-4
        )


GRAPH = """
x, y = data().tensors
model = Net()
optimizer = optim.SGD(model.parameters(), lr=0.1)
for epoch in range(3):
    loss = F.cross_entropy(model(x)[0], y)
    loss.backward()
    optimizer.step()
torch.save(model.state_dict(), "net.pt")
"""
FREE = """
w = nn.Parameter(torch.ones(4))
for x, y in DataLoader(data(), batch_size=4):
    loss = (x * w).sum()
    loss.backward()
"""
SAVES = loops.TOP.replace("opt = parser", "torch.save([1], 'log.pt')\nopt = parser")


@CWD
@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("print('nothing')\n", "the script ended, and did not call backward()"),
        (GRAPH, "line 28 of script.py: backward() is called, but not in a loop over batches"),
        (FREE, "the loss depends on parameters that are in no module"),
        (loops.TOP.replace("loss.backward()", "1 / 0"), "ZeroDivisionError"),
        (loops.TOP.replace("parse_args()", "parse_args(['--no'])"), "refuses"),
    ],
    ids=["no training", "no loop", "no module", "an error", "arguments"],
)
def test_scripts_that_are_refused(gradscope: Gradscope, script: str, message: str) -> None:
    Path("script.py").write_text(loops.HEAD + script)
    torch.save(loops._net().state_dict(), "net.pt")
    gradscope("init", "net.pt", "script.py")
    done = gradscope("check", "--config", "run.toml")
    assert done.code == 3
    assert message in told(done.err)
    assert "Traceback" not in done.err


@CWD
def test_init_runs_nothing_and_reports_missing_files(gradscope: Gradscope) -> None:
    Path("script.py").write_text("open('ran', 'w')\n")
    torch.save(loops._net().state_dict(), "net.pt")
    done = gradscope("init", "net.pt", "script.py", "--", "--lr", "0.1")
    assert done.code == 0
    assert "script.py --lr 0.1" in told(done.out)
    assert not Path("ran").exists()
    done = gradscope("init", "net.pt", "other.py", "-o", "other.toml")
    assert done.code == 3
    assert "other.py: cannot be read: No such file" in told(done.err)
    assert not Path("other.toml").exists()


CONTRASTIVE = """
model = Net()
optimizer = optim.SGD(model.parameters(), lr=0.1)
for x, y in DataLoader(data(), batch_size=SIZE):
    _, hidden = model(x + NOISE * torch.randn_like(x))
    logits = hidden @ hidden.roll(1, 1).T
    loss = F.cross_entropy(logits, torch.arange(len(x))) + hidden.square().mean()
    loss.backward()
    optimizer.step()
torch.save(model.state_dict(), "net.pt")
"""


@CWD
@pytest.mark.parametrize("noise", ["0", "0.1"])
def test_samples_that_a_loss_compares_are_refused(
    gradscope: Gradscope, monkeypatch: pytest.MonkeyPatch, noise: str
) -> None:
    """With a batch size of one, the loss of a sample alone is what the script trains with."""
    monkeypatch.setattr("sys.argv", ["script.py"])
    loops.train(CONTRASTIVE.replace("SIZE", "4").replace("NOISE", noise))
    gradscope("init", "net.pt", "script.py")
    done = gradscope("check", "--config", "run.toml")
    assert done.code == 4
    assert "the loss of the script is no loss of single samples" in told(done.err)
    loops.train(CONTRASTIVE.replace("SIZE", "1").replace("NOISE", noise))
    assert len(norms(gradscope)) == 12


WRITES = """
import shutil
from pathlib import Path
torch.save(Net().state_dict(), "epoch-0.pt")
torch.save([1], "new.pt")
assert torch.load("new.pt") == [1]
with open("log.txt", "w") as log:
    log.write("again")
Path("old.txt").unlink()
shutil.rmtree("runs")
Path("args.txt").rename("moved.txt")
"""


@CWD
def test_files_that_were_there_before_are_restored(
    gradscope: Gradscope, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["script.py"])
    loops.train(loops.PASSED)
    Path("script.py").write_text(loops.HEAD + WRITES + loops.PASSED)
    Path("runs").mkdir()
    names = ["epoch-0.pt", "log.txt", "old.txt", "runs/one.txt", "args.txt"]
    for name in names:
        Path(name).write_text(f"content of {name}")
    gradscope("init", "net.pt", "script.py")
    done = gradscope("check", "--config", "run.toml")
    assert done.code == 0, done.err
    for name in names:
        assert Path(name).read_text() == f"content of {name}"
    text = told(done.out)
    assert "files that were there before; they are unchanged: log.txt, old.txt" in text
    assert "epoch-0.pt" in text


@CWD
def test_samples_of_something_else_are_refused(
    gradscope: Gradscope, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["script.py"])
    loops.train(loops.PASSED)
    first_steps(gradscope)
    torch.save((torch.zeros(3, 4), torch.zeros(3)), "other.pt")
    done = gradscope("check", "--config", "run.toml", "net.pt", "other.pt")
    assert done.code == 3
    assert "these samples do not belong to the script" in told(done.err)


@CWD
def test_notes_name_the_lines_and_compare_the_loss(
    gradscope: Gradscope, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["script.py"])
    loops.train(loops.GETS)
    gradscope("init", "net.pt", "script.py")
    done = gradscope("check", "--config", "run.toml")
    text = told(done.out)
    assert "for one sample each." in text
    assert "In the script's second step they give its own loss" in text
    assert "which the script divides by 4" in text
    assert "The samples are those of the script's batches after the first" in text


@CWD
def test_transformers_trainer(gradscope: Gradscope, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    script = """
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

ids = torch.arange(48).reshape(6, 8) * 7 % 11
data = [{"input_ids": row, "labels": row} for row in ids]
sizes = {"vocab_size": 11, "n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 2}
model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
arguments = TrainingArguments("out", max_steps=2, per_device_train_batch_size=2, use_cpu=True,
                              report_to=[], disable_tqdm=True, save_strategy="no")
trainer = Trainer(model, arguments, train_dataset=data)
trainer.train()
torch.save(model.state_dict(), "net.pt")
"""
    monkeypatch.setattr("sys.argv", ["script.py"])
    Path("script.py").write_text(script)
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(script, "script.py", "exec"), names)
    found = first_steps(gradscope)
    model = names["model"].eval().cpu().double()
    model.load_state_dict(torch.load("net.pt"))
    want = []
    for row in names["ids"]:
        loss = model(input_ids=row[None], labels=row[None]).loss
        rows = torch.autograd.grad(loss, list(model.parameters()))
        want.append(float(sum(g.square().sum() for g in rows)) ** 0.5)
    assert found == pytest.approx(want, rel=1e-4)
    assert package.open("o.h5") is not None
