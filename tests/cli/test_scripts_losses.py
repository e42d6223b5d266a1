"""Losses that training scripts compute in their own words: the rows are those of the script."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import gradscope as package
from tests.cli.conftest import Gradscope
from tests.cli.test_scripts_parts import CWD, in_folder, looped, norms

__all__ = ["in_folder"]  # a fixture

SCRIPT = """
import argparse
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 3), nn.Linear(4, 3)
    def forward(self, x{also}):
        code = self.a(x).tanh()
        return {returned}
{defined}
generator = torch.Generator().manual_seed(0)
x = torch.rand(6, 4, generator=generator)
train_loader = DataLoader(TensorDataset(x, {targets}), batch_size=3)
def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--beta", type=float, default=0.5)
    parser.add_argument("--batch_size", type=int, default=3)
    args = parser.parse_args()
    device = torch.device("cuda")
    model = Net().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
{before}
    for epoch in range(2):
        for i, (x, y) in enumerate(train_loader):
            x, y = x.to(device), y.to(device)
            optimizer.zero_grad()
{step}
            loss.backward()
            optimizer.step()
if __name__ == "__main__":
    main()
"""
CLASSES = "torch.arange(6) % 3"
REALS = "torch.rand(6, 3, generator=generator)"
VAE = """
def loss_function(recon_x, x, mu, logvar):
    BCE = F.binary_cross_entropy(recon_x, x, reduction='sum')
    KLD = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
    return BCE + KLD
"""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Any:
        return (code := self.a(x).tanh()), self.b(code), self.c(code)


def _kl(mu: Tensor, logvar: Tensor) -> Tensor:
    return -0.5 * (1 + logvar - mu**2 - logvar.exp()).sum()


def _dice(p: Tensor, t: Tensor) -> Tensor:
    return 1 - (2 * (p * t).sum() + 1) / (p.sum() + t.sum() + 1)


ALL = "code, self.b(code), self.c(code)"
# what forward returns, definitions, targets, lines before the loop, lines of the step, the loss of
# the outputs (code, b, c), x and y; "" or the name of gradscope's loss
KINDS: dict[str, tuple[str, str, str, str, str, Any, str]] = {
    "a sum of results of a nested function": (
        ALL,
        "",
        CLASSES,
        "def loss_fn(logp, target, mean, logv, step):\n"
        "    NLL = F.nll_loss(F.log_softmax(logp, -1), target, reduction='sum')\n"
        "    KL = -0.5 * torch.sum(1 + logv - mean.pow(2) - logv.exp())\n"
        "    return NLL, KL, 1 / (1 + step)",
        "code, logp, mean = model(x)\nbatch_size = x.size(0)\n"
        "NLL_loss, KL_loss, KL_weight = loss_fn(logp, y, mean, mean, 3)\n"
        "loss = (NLL_loss + KL_weight * KL_loss) / batch_size",
        lambda o, x, y: F.cross_entropy(o[1], y) + _kl(o[2], o[2]) / 4,
        "",
    ),
    "an entry of a dict that a function returns": (
        ALL,
        "def loss_function(*args, **kwargs):\n    recons, mu, log_var = args\n"
        "    fit = recons.square().mean()\n"
        "    return {'loss': fit + kwargs['M_N'] * log_var.square().sum(), 'fit': fit.detach()}\n",
        CLASSES,
        "",
        "results = model(x)\ntrain_loss = loss_function(*results, M_N=0.25)\n"
        "loss = train_loss['loss']",
        lambda o, x, y: o[0].square().mean() + 0.25 * o[2].square().sum(),
        "",
    ),
    "a dict of losses that a loop adds": (
        ALL,
        "def losses_of(out, y):\n    return {'a': F.cross_entropy(out, y), 'b': out.square()}\n",
        CLASSES,
        "",
        "_, out, _ = model(x)\nlosses = losses_of(out, y)\nloss = 0.0\n"
        "for name, value in losses.items():\n    loss += value.mean()",
        lambda o, x, y: F.cross_entropy(o[1], y) + o[1].square().mean(),
        "",
    ),
    "a variational autoencoder": (
        "code.sigmoid(), self.b(code), self.c(code)",
        VAE,
        CLASSES,
        "",
        "recon_batch, mu, logvar = model(x)\nloss = loss_function(recon_batch, x, mu, logvar)",
        lambda o, x, y: (
            F.binary_cross_entropy(o[0].sigmoid(), x, reduction="sum") + _kl(o[1], o[2])
        ),
        "",
    ),
    "one of several outputs, and the input and the target": (
        ALL,
        "",
        CLASSES,
        "mse, ce = nn.MSELoss(), nn.CrossEntropyLoss()",
        "code, *rest = model(x)\nout = model(x)[1]\nloss = ce(out, y) + args.beta * mse(code, x)",
        lambda o, x, y: F.cross_entropy(o[1], y) + 0.5 * F.mse_loss(o[0], x),
        "",
    ),
    "an output and a hidden state": (
        "self.b(code), code[None].expand(2, -1, -1)",
        "",
        CLASSES,
        "hidden = None\ncriterion = nn.CrossEntropyLoss()",
        "out, hidden = model(x)\nloss = criterion(out, y)",
        lambda o, x, y: F.cross_entropy(o[1], y),
        "",
    ),
    "an attribute of the outputs": (
        "argparse.Namespace(code=code, logits=self.b(code))",
        "",
        CLASSES,
        "",
        "outputs = model(x)\nlogits = outputs.logits\nloss = F.cross_entropy(logits, y)",
        lambda o, x, y: F.cross_entropy(o[1], y),
        "",
    ),
    "mixup": (
        "self.b(code)",
        "def mixup_data(x, y, alpha=1.0):\n    lam = 0.3\n    index = torch.randperm(len(x))\n"
        "    return lam * x + (1 - lam) * x[index, :], y, y[index], lam\n"
        "def mixup_criterion(criterion, pred, y_a, y_b, lam):\n"
        "    return lam * criterion(pred, y_a) + (1 - lam) * criterion(pred, y_b)\n",
        CLASSES,
        "criterion = nn.CrossEntropyLoss()",
        "inputs, targets_a, targets_b, lam = mixup_data(x, y)\nout = model(inputs)\n"
        "loss = mixup_criterion(criterion, out, targets_a, targets_b, lam)",
        lambda o, x, y: F.cross_entropy(o[1], y),
        "cross_entropy",
    ),
    "cutmix": (
        "self.b(code)",
        "",
        CLASSES,
        "criterion = nn.CrossEntropyLoss()",
        "r = torch.rand(1)\nif r < 0.5:\n    index = torch.randperm(x.size(0))\n"
        "    lam, target_a, target_b = 0.3, y, y[index]\n    x[:, :2] = x[index, :2]\n"
        "    out = model(x)\n"
        "    loss = criterion(out, target_a) * lam + criterion(out, target_b) * (1. - lam)\n"
        "else:\n    out = model(x)\n    loss = criterion(out, y)",
        lambda o, x, y: F.cross_entropy(o[1], y),
        "cross_entropy",
    ),
    "a sum over the entries and a mean over the batch": (
        "self.b(code)",
        "",
        REALS,
        "criterion = nn.MSELoss(reduction='sum')",
        "loss = criterion(model(x), y) / x.size(0)",
        lambda o, x, y: F.mse_loss(o[1], y, reduction="sum"),
        "mse:per_sample=sum",
    ),
    "a loss of two parts, one of a class of the script": (
        "self.b(code)",
        "class DiceLoss(nn.Module):\n    def __init__(self, smooth=1):\n"
        "        super().__init__()\n        self.smooth = smooth\n"
        "    def forward(self, logits, t):\n        p = torch.sigmoid(logits).view(-1)\n"
        "        t = t.view(-1)\n        both = (p * t).sum()\n"
        "        return 1 - (2 * both + self.smooth) / (p.sum() + t.sum() + self.smooth)\n",
        REALS,
        "bce = nn.BCEWithLogitsLoss().cuda()\ndice = DiceLoss().to(device)",
        "out = model(x)\nloss = bce(out, y) + dice(out, y)",
        lambda o, x, y: F.binary_cross_entropy_with_logits(o[1], y) + _dice(o[1].sigmoid(), y),
        "",
    ),
    "positions on one axis": (
        "self.a(code)[:, :, None] * self.c.weight.T[:, :2].flatten()[:3].view(1, 1, 3)"
        " + self.b(code)[:, None]",
        "",
        "torch.stack([torch.arange(6) % 3] * 4, 1) + torch.tensor([0, 0, 0, -1])",
        "criterion = nn.CrossEntropyLoss(ignore_index=-1)",
        "output = model(x)\nloss = criterion(output.view(-1, 3), y.view(-1))",
        None,
        "",
    ),
    "an auxiliary output": (
        "self.b(code), self.c(code)",
        "",
        CLASSES,
        "criterion = nn.CrossEntropyLoss(label_smoothing=0.1)",
        "outputs, aux = model(x)\nloss1 = criterion(outputs, y)\nloss2 = criterion(aux, y)\n"
        "loss = loss1 + 0.4 * loss2",
        lambda o, x, y: (
            F.cross_entropy(o[1], y, label_smoothing=0.1)
            + 0.4 * F.cross_entropy(o[2], y, label_smoothing=0.1)
        ),
        "",
    ),
    "a target that the step makes": (
        "self.b(code)[:, :1].sigmoid()",
        "",
        CLASSES,
        "adversarial_loss = torch.nn.BCELoss()",
        "valid = torch.ones(x.size(0), 1, device=device)\nloss = adversarial_loss(model(x), valid)",
        lambda o, x, y: F.binary_cross_entropy(o[1][:, :1].sigmoid(), torch.ones(1, 1).double()),
        "",
    ),
    "a loss of reinforcement learning": (
        "self.b(code)",
        "",
        CLASSES,
        "",
        "probs = F.softmax(model(x), dim=-1)\n"
        "dist = torch.distributions.Categorical(probs)\n"
        "loss = (-dist.log_prob(y) * x.sum(1)).sum() - 0.01 * dist.entropy().mean()",
        lambda o, x, y: (
            F.cross_entropy(o[1], y) * x.sum()
            - 0.01 * torch.distributions.Categorical(logits=o[1]).entropy().mean()
        ),
        "",
    ),
    "mixed precision and accumulation": (
        "self.b(code)",
        "",
        REALS,
        "scaler = torch.cuda.amp.GradScaler()\naccumulation_steps = 4\n"
        "criterion = nn.SmoothL1Loss()",
        "with torch.autocast('cuda'):\n    out = model(x)\n"
        "    loss = criterion(out, y) / accumulation_steps\nloss = scaler.scale(loss)",
        lambda o, x, y: F.smooth_l1_loss(o[1], y),
        "huber",
    ),
    "a model that returns its loss": (
        "self.b(code), F.cross_entropy(self.b(code), y) + code.square().sum()",
        "",
        CLASSES,
        "",
        "logits, loss = model(x, y)",
        lambda o, x, y: F.cross_entropy(o[1], y) + o[0].square().sum(),
        "",
    ),
    "a method of the model": (
        "self.b(code)\n    def compute_loss(self, x, y):\n"
        "        return {'loss': F.cross_entropy(self(x), y) * 2}",
        "",
        CLASSES,
        "",
        "loss = model.compute_loss(x, y)['loss']",
        lambda o, x, y: F.cross_entropy(o[1], y) * 2,
        "",
    ),
    "a function that gets the model": (
        "self.b(code)",
        "def compute(net, data, criterion, scale=2.0):\n    inputs, labels = data\n"
        "    out = net(inputs)\n    loss = criterion(out, labels) * scale\n    return loss, out\n",
        CLASSES,
        "criterion = F.cross_entropy",
        "loss, out = compute(model, (x, y), criterion)",
        lambda o, x, y: F.cross_entropy(o[1], y) * 2,
        "",
    ),
}


KINDS["a target that is also an input"] = (
    "self.b(code + F.one_hot(y, 4))",
    "",
    CLASSES,
    "criterion = nn.CrossEntropyLoss()",
    "out = model(x, y)\nloss = criterion(out, y) + out.mean()",
    None,
    "",
)


def _of(kind: str) -> str:
    returned, defined, targets, before, step, _, _ = KINDS[kind]
    indented = [
        "\n".join(" " * width + line for line in text.splitlines())
        for width, text in ((4, before), (12, step))
    ]
    also = ", y=None" if "model(x, y)" in step else ""
    return SCRIPT.format(
        returned=returned,
        defined=defined,
        targets=targets,
        before=indented[0],
        step=indented[1],
        also=also,
    )


@CWD
@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_of_a_training_step(gradscope: Gradscope, kind: str) -> None:
    """init writes it without an edit; the rows are those of the script for one sample."""
    Path("train.py").write_text(_of(kind))
    torch.manual_seed(0)
    net = Net()
    torch.save(net.state_dict(), "net.pt")
    done = gradscope("init", "net.pt", "train.py:train_loader", "--json")
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert [key for key in found["missing"] if key != "dataset"] == []
    name = KINDS[kind][6]
    assert f'\nname = "{name or "train.py:main.loss"}"' in Path("run.toml").read_text()
    rows = norms(gradscope)
    import train  # type: ignore[import-not-found]

    made = train.Net().double()
    made.load_state_dict(net.state_dict())
    x, y = train.train_loader.dataset.tensors
    y = y.double() if y.is_floating_point() else y

    def loss(model: Any, x: Tensor, y: Tensor) -> Any:
        if kind == "a target that is also an input":
            out = model(x, y)
            return F.cross_entropy(out, y) + out.mean()
        if KINDS[kind][5] is None:
            return F.cross_entropy(model(x).view(-1, 3), y.view(-1), ignore_index=-1)
        return KINDS[kind][5](Net.forward(model, x), x, y)

    assert rows == pytest.approx(looped(made, loss, x.double(), y), rel=1e-4)


GAN = """
import torch
import torch.nn as nn
class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(2, 4)
    def forward(self, z): return self.l(z)
class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = nn.Linear(4, 1)
    def forward(self, x): return self.f(x).sigmoid()
data = [(torch.arange(4.0) * k, k % 2) for k in range(5)]
generator, discriminator = Generator(), Discriminator()
generator = Generator()
discriminator = Discriminator()
optimizer_G = torch.optim.Adam(generator.parameters())
optimizer_D = torch.optim.Adam(discriminator.parameters())
criterion = nn.BCELoss()
def main():
    for epoch in range(2):
        for imgs, _ in torch.utils.data.DataLoader(data, 2):
            valid, fake = torch.ones(len(imgs), 1), torch.zeros(len(imgs), 1)
            gen_imgs = generator(torch.randn(len(imgs), 2))
            g_loss = criterion(discriminator(gen_imgs), valid)
            g_loss.backward()
            real_loss = criterion(discriminator(imgs), valid)
            fake_loss = criterion(discriminator(gen_imgs.detach()), fake)
            d_loss = (real_loss + fake_loss) / 2
            d_loss.backward()
"""


@CWD
def test_a_loss_that_needs_a_second_model_is_shown(gradscope: Gradscope) -> None:
    """Its name is given, and no file is written: the weights of the second model are not known."""
    Path("gan.py").write_text(GAN)
    torch.save({"f.weight": torch.ones(1, 4), "f.bias": torch.ones(1)}, "d.pt")
    found = json.loads(gradscope("init", "d.pt", "gan.py:data", "--json").out)
    assert found["missing"] == ["loss.name"] and found["files"] == []
    text = Path("run.toml").read_text()
    assert "# gan.py: d_loss = (real_loss + fake_loss) / 2. Not found: generator\n" in text


RANDOM = """
import torch
import torch.nn as nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.mean, self.scale, self.back = nn.Linear(4, 3), nn.Linear(4, 3), nn.Linear(3, 4)
    def forward(self, x):
        mu, scale = self.mean(x), self.scale(x)
        return self.back(mu + torch.randn_like(mu) * scale), mu
    def loss(self, x):
        recon, mu = self(x)
        return (recon - x).square().sum() + mu.square().mean()
data = [torch.arange(4.0) * k / 9 for k in range(6)]
net = Net()
optimizer = torch.optim.Adam(net.parameters())
for x in torch.utils.data.DataLoader(data, 2):
    LINES
    loss.backward()
"""


SIZES = {"mean": (4, 3), "scale": (4, 3), "back": (3, 4)}


class Noise(nn.Module):
    """Its gradient is the noise of each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.randn_like(x) * self.p


@CWD
@pytest.mark.parametrize(
    "lines",
    ["recon, mu = net(x)\n    loss = (recon - x).square().sum() + mu.square().mean()",
     "loss = net.loss(x)"],
)  # fmt: skip
def test_a_loss_of_a_random_model(gradscope: Gradscope, lines: str) -> None:
    """A sample has the same numbers if its loss calls the model once for each sample."""
    Path("vae.py").write_text(RANDOM.replace("LINES", lines))
    torch.manual_seed(0)
    parts = {name: nn.Linear(*sizes) for name, sizes in SIZES.items()}
    net = nn.ModuleDict(parts)
    torch.save(net.state_dict(), "net.pt")
    found = json.loads(gradscope("init", "net.pt", "vae.py:data", "--json").out)
    assert found["missing"] == [] and found["files"] == []
    assert '\nrandomness = "fixed"' in Path("run.toml").read_text()
    rows = norms(gradscope)
    zeros = torch.zeros(6, 3)
    noise = package.per_sample_gradients(
        Noise(), lambda o, _: o.sum(1), zeros, torch.zeros(6), randomness="fixed"
    )["p"]
    x = torch.stack([torch.arange(4.0) * k / 9 for k in range(6)]).double()

    def loss(model: Any, x: Tensor, eps: Tensor) -> Any:
        mu = model["mean"](x)
        recon = model["back"](mu + eps.double() * model["scale"](x))
        return (recon - x).square().sum() + mu.square().mean()

    assert rows == pytest.approx(looped(net.double(), loss, x, noise), rel=1e-4)
