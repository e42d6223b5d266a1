"""Later calls of small models with many operations: `python -m benchmarks.later [NAME ...]`.

Prints the CPU time of rows, norms and clipped means of later calls, in plain passes: a forward and
a backward pass of the mean loss. The calls alternate; each figure is the median of the ratios.
"""

import argparse
import math
import statistics
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import gradscope

N = 16  # samples


class Case(NamedTuple):
    """A model, its loss, inputs and targets."""

    model: nn.Module
    loss: Callable[..., Tensor]
    inputs: Any
    targets: Any = None


class _BiLstmCrf(nn.Module):
    """A tagger of sequences (Huang et al. 2015); returns the losses."""

    def __init__(self, words: int = 50, tags: int = 5, h: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, h)
        self.lstm = nn.LSTM(h, h, bidirectional=True, batch_first=True)
        self.emit = nn.Linear(2 * h, tags)
        self.move = nn.Parameter(0.1 * torch.randn(tags, tags))

    def forward(self, words: Tensor) -> Tensor:
        found: Tensor = self.emit(self.lstm(self.embedding(words))[0])
        return found

    def nll(self, scores: Tensor, tags: Tensor) -> Tensor:
        """Return the negative log-likelihood (n,) of tags (n, t), by the forward algorithm."""
        alpha = scores[:, 0]
        for t in range(1, scores.shape[1]):
            alpha = torch.logsumexp(alpha.unsqueeze(2) + self.move, 1) + scores[:, t]
        path = scores.gather(2, tags.unsqueeze(2)).squeeze(2).sum(1)
        path = path + self.move[tags[:, :-1], tags[:, 1:]].sum(1)
        return alpha.logsumexp(1) - path


def _bilstm_crf() -> Case:
    model = _BiLstmCrf()
    words, tags = torch.randint(50, (N, 12)), torch.randint(5, (N, 12))
    return Case(model, model.nll, words, tags)


class _WaveNet(nn.Module):
    """Gated, dilated, causal convolutions (van den Oord et al. 2016)."""

    def __init__(self, c: int = 16, layers: int = 6) -> None:
        super().__init__()
        self.first = nn.Conv1d(1, c, 1)
        self.gates = nn.ModuleList(nn.Conv1d(c, 2 * c, 2, dilation=2**k) for k in range(layers))
        self.back = nn.ModuleList(nn.Conv1d(c, c, 1) for _ in range(layers))
        self.skip = nn.ModuleList(nn.Conv1d(c, c, 1) for _ in range(layers))
        self.last = nn.Conv1d(c, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        x, total = self.first(x), 0
        for k, (gate, back, skip) in enumerate(zip(self.gates, self.back, self.skip, strict=True)):
            a, b = gate(F.pad(x, (2**k, 0))).chunk(2, 1)
            z = torch.tanh(a) * torch.sigmoid(b)
            total = total + skip(z)
            x = x + back(z)
        out: Tensor = self.last(F.relu(total))
        return out


def _wavenet() -> Case:
    return Case(_WaveNet(), _square, torch.randn(N, 1, 64), torch.randn(N, 1, 64))


def _square(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().flatten(1).mean(1)


class _Spectral(nn.Module):
    """A convolution in frequency space."""

    def __init__(self, c: int, modes: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(c, c, modes, dtype=torch.cfloat) / c)

    def forward(self, x: Tensor) -> Tensor:
        modes = self.weight.shape[2]
        f = torch.fft.rfft(x)
        out = torch.zeros(*f.shape, dtype=f.dtype)
        out[..., :modes] = torch.einsum("nim,iom->nom", f[..., :modes], self.weight)
        return torch.fft.irfft(out, n=x.shape[-1])


class _Fno(nn.Module):
    """A Fourier neural operator (Li et al. 2021)."""

    def __init__(self, c: int = 12) -> None:
        super().__init__()
        self.lift, self.out = nn.Conv1d(1, c, 1), nn.Conv1d(c, 1, 1)
        self.spectral = nn.ModuleList(_Spectral(c, 8) for _ in range(4))
        self.local = nn.ModuleList(nn.Conv1d(c, c, 1) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.lift(x)
        for a, b in zip(self.spectral, self.local, strict=True):
            x = F.gelu(a(x) + b(x))
        out: Tensor = self.out(x)
        return out


def _fno() -> Case:
    return Case(_Fno(), _square, torch.randn(N, 1, 64), torch.randn(N, 1, 64))


class _GaussianProcess(nn.Module):
    """The marginal likelihood of a Gaussian process for each data set."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.length = nn.Parameter(torch.zeros(())), nn.Parameter(torch.zeros(3))
        self.noise, self.mean = nn.Parameter(torch.tensor(-1.0)), nn.Parameter(torch.zeros(()))

    def forward(self, points: Tensor, values: Tensor) -> Tensor:
        x = points / self.length.exp()
        gaps = (x.unsqueeze(2) - x.unsqueeze(1)).square().sum(-1)
        eye = torch.eye(points.shape[1])
        k = self.scale.exp() * torch.exp(-0.5 * gaps) + self.noise.exp() * eye
        root = torch.linalg.cholesky(k)
        off = (values - self.mean).unsqueeze(-1)
        half = torch.linalg.solve_triangular(root, off, upper=False).squeeze(-1)
        logdet = torch.diagonal(root, dim1=-2, dim2=-1).log().sum(-1)
        return 0.5 * half.square().sum(-1) + logdet


def _first(outputs: Tensor, targets: Any) -> Tensor:
    return outputs


def _gaussian_process() -> Case:
    return Case(_GaussianProcess(), _first, (torch.randn(N, 10, 3), torch.randn(N, 10)))


class _Kalman(nn.Module):
    """A linear filter; returns the negative log-likelihood of the observations."""

    def __init__(self, d: int = 3, o: int = 2) -> None:
        super().__init__()
        self.step = nn.Parameter(0.9 * torch.eye(d) + 0.05 * torch.randn(d, d))
        self.see = nn.Parameter(torch.randn(o, d))
        self.q, self.r = nn.Parameter(torch.zeros(d)), nn.Parameter(torch.zeros(o))
        self.start = nn.Parameter(torch.zeros(d))

    def forward(self, seen: Tensor) -> Tensor:
        n, t, _ = seen.shape
        d = len(self.q)
        m, p = self.start.expand(n, d), torch.eye(d).expand(n, d, d)
        q, r = torch.diag(self.q.exp()), torch.diag(self.r.exp())
        loss = seen.new_zeros(n)
        for k in range(t):
            m, p = m @ self.step.T, self.step @ p @ self.step.T + q
            off = seen[:, k] - m @ self.see.T
            s = self.see @ p @ self.see.T + r
            gain = torch.linalg.solve(s, self.see @ p).mT
            half = torch.linalg.solve(s, off.unsqueeze(-1)).squeeze(-1)
            loss = loss + 0.5 * ((off * half).sum(-1) + torch.logdet(s))
            m = m + (gain @ off.unsqueeze(-1)).squeeze(-1)
            p = p - gain @ self.see @ p
        return loss


def _kalman() -> Case:
    return Case(_Kalman(), _first, torch.randn(N, 10, 2))


class _Memory(nn.Module):
    """Slots of a memory that each step writes in place."""

    def __init__(self, d: int = 8, slots: int = 6) -> None:
        super().__init__()
        self.write, self.gate, self.read = nn.Linear(d, d), nn.Linear(d, d), nn.Linear(d, d)
        self.first = nn.Parameter(torch.randn(slots, d))
        self.slots = slots

    def forward(self, x: Tensor) -> Tensor:
        memory = self.first.expand(len(x), -1, -1).clone()
        for t in range(x.shape[1]):
            slot = t % self.slots
            value = torch.tanh(self.write(x[:, t]))
            keep = torch.sigmoid(self.gate(x[:, t]))
            memory[:, slot] = keep * memory[:, slot].clone() + (1 - keep) * value
        found: Tensor = self.read(memory.mean(1))
        return found


def _memory() -> Case:
    return Case(_Memory(), _square, torch.randn(N, 12, 8), torch.randn(N, 8))


class _ResidualFlow(nn.Module):
    """Invertible residual blocks with spectral norms; the trace of the log by a power series."""

    def __init__(self, d: int = 2, h: int = 16, blocks: int = 3) -> None:
        super().__init__()
        norm = nn.utils.parametrizations.spectral_norm
        self.blocks = nn.ModuleList(
            nn.ModuleList([norm(nn.Linear(d, h)), norm(nn.Linear(h, d))]) for _ in range(blocks)
        )

    def forward(self, x: Tensor) -> Tensor:
        logdet = x.new_zeros(len(x))
        for a, b in self.blocks:
            z = torch.tanh(a(x))
            jacobian = 0.9 * (b.weight * (1 - z * z).unsqueeze(1)) @ a.weight
            power = jacobian
            for k in range(1, 6):
                logdet = logdet + (-1) ** (k + 1) / k * power.diagonal(dim1=1, dim2=2).sum(1)
                power = power @ jacobian
            x = x + 0.9 * b(z)
        return 0.5 * x.square().sum(1) - logdet


def _residual_flow() -> Case:
    return Case(_ResidualFlow().eval(), _first, torch.randn(N, 2))


class _Masked(nn.Linear):
    """A linear layer with a mask of its weights."""

    def __init__(self, i: int, o: int, mask: Tensor) -> None:
        super().__init__(i, o)
        self.register_buffer("mask", mask)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight * self.mask, self.bias)


class _MaskedFlow(nn.Module):
    """A masked autoregressive flow (Papamakarios et al. 2017)."""

    def __init__(self, d: int = 4, h: int = 24, blocks: int = 4) -> None:
        super().__init__()
        inner = torch.arange(h) % (d - 1)
        into = (inner[:, None] >= torch.arange(d)[None]).float()
        between = (inner[:, None] >= inner[None]).float()
        out = (torch.arange(d)[:, None] > inner[None]).float().repeat(2, 1)

        def block() -> nn.Module:
            return nn.Sequential(
                _Masked(d, h, into), nn.Tanh(), _Masked(h, h, between), nn.Tanh(),
                _Masked(h, 2 * d, out),
            )  # fmt: skip

        self.blocks = nn.ModuleList(block() for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        logdet = x.new_zeros(len(x))
        for block in self.blocks:
            shift, scale = block(x).chunk(2, 1)
            scale = torch.tanh(scale)
            x = (x - shift) * torch.exp(-scale)
            logdet = logdet - scale.sum(1)
            x = x.flip(1)
        return 0.5 * x.square().sum(1) - logdet


def _masked_flow() -> Case:
    return Case(_MaskedFlow(), _first, torch.randn(N, 4))


class _Rk4(nn.Module):
    """A neural differential equation in ten steps of the classical method."""

    def __init__(self, d: int = 4, h: int = 16) -> None:
        super().__init__()
        self.field = nn.Sequential(nn.Linear(d, h), nn.Tanh(), nn.Linear(h, d))

    def forward(self, x: Tensor) -> Tensor:
        f, h = self.field, 0.1
        for _ in range(10):
            a = f(x)
            b = f(x + h / 2 * a)
            c = f(x + h / 2 * b)
            d = f(x + h * c)
            x = x + h / 6 * (a + 2 * b + 2 * c + d)
        return x


def _rk4() -> Case:
    return Case(_Rk4(), _square, torch.randn(N, 4), torch.randn(N, 4))


class _Siren(nn.Module):
    """A network of sines (Sitzmann et al. 2020)."""

    def __init__(self, h: int = 32) -> None:
        super().__init__()
        sizes = [2, h, h, h, h, 1]
        self.layers = nn.ModuleList(map(nn.Linear, sizes, sizes[1:]))

    def forward(self, x: Tensor) -> Tensor:
        *inner, last = self.layers
        for layer in inner:
            x = torch.sin(30.0 * layer(x))
        found: Tensor = last(x)
        return found


def _siren() -> Case:
    return Case(_Siren(), _square, torch.rand(N, 2), torch.randn(N, 1))


def _perceptron_of(*sizes: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for i, o in pairwise(sizes):
        layers += [nn.Linear(i, o), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


class _DeepOnet(nn.Module):
    """An operator network (Lu et al. 2021)."""

    def __init__(self) -> None:
        super().__init__()
        self.branch = _perceptron_of(20, 32, 32, 16)
        self.trunk = _perceptron_of(1, 32, 32, 16)
        self.bias = nn.Parameter(torch.zeros(()))

    def forward(self, u: Tensor, y: Tensor) -> Tensor:
        return torch.einsum("nk,nmk->nm", self.branch(u), self.trunk(y)) + self.bias


def _deeponet() -> Case:
    return Case(
        _DeepOnet(), _square, (torch.randn(N, 20), torch.rand(N, 10, 1)), torch.randn(N, 10)
    )


class _RealNvp(nn.Module):
    """Affine coupling layers (Dinh et al. 2017)."""

    def __init__(self, d: int = 4, layers: int = 6) -> None:
        super().__init__()
        self.half = d // 2
        self.nets = nn.ModuleList(_perceptron_of(d // 2, 24, 24, d) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        logdet = x.new_zeros(len(x))
        for net in self.nets:
            a, b = x[:, : self.half], x[:, self.half :]
            scale, shift = net(a).chunk(2, 1)
            scale = torch.tanh(scale)
            x = torch.cat([b * torch.exp(scale) + shift, a], 1)
            logdet = logdet + scale.sum(1)
        return 0.5 * x.square().sum(1) - logdet


def _realnvp() -> Case:
    return Case(_RealNvp(), _first, torch.randn(N, 4))


class _TabTransformer(nn.Module):
    """A transformer over the columns of a table (Huang et al. 2020)."""

    def __init__(self, d: int = 16, columns: int = 6, numbers: int = 4) -> None:
        super().__init__()
        self.columns = nn.ModuleList(nn.Embedding(10, d) for _ in range(columns))
        layer = nn.TransformerEncoderLayer(d, 2, 32, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(numbers)
        self.head = _perceptron_of(columns * d + numbers, 32, 2)

    def forward(self, kinds: Tensor, numbers: Tensor) -> Tensor:
        x = torch.stack([e(kinds[:, k]) for k, e in enumerate(self.columns)], 1)
        found: Tensor = self.head(torch.cat([self.encoder(x).flatten(1), self.norm(numbers)], 1))
        return found


def _entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction="none")


def _tabtransformer() -> Case:
    inputs = (torch.randint(10, (N, 6)), torch.randn(N, 4))
    return Case(_TabTransformer(), _entropy, inputs, torch.randint(2, (N,)))


class _Translator(nn.Module):
    """torch's own nn.Transformer."""

    def __init__(self, d: int = 32, words: int = 40) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, d)
        self.core = nn.Transformer(d, 4, 2, 2, 64, dropout=0.0, batch_first=True)
        self.head = nn.Linear(d, words)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        x = self.core(self.embedding(source), self.embedding(target), tgt_mask=mask)
        found: Tensor = self.head(x)
        return found


def _transformer() -> Case:
    words = torch.randint(40, (N, 10))
    inputs = (torch.randint(40, (N, 12)), words)
    return Case(_Translator(), lambda o, t: _entropy(o.mT, t).mean(1), inputs, words)


def _perceptron() -> Case:
    model = _perceptron_of(32, 64, 64, 10)
    return Case(model, _entropy, torch.randn(64, 32), torch.randint(10, (64,)))


CASES: dict[str, Callable[[], Case]] = {
    make.__name__.removeprefix("_"): make
    for make in (
        *(_bilstm_crf, _wavenet, _fno, _gaussian_process, _kalman, _memory, _residual_flow),
        *(_masked_flow, _rk4, _siren, _deeponet, _realnvp, _tabtransformer, _transformer),
        _perceptron,
    )
}


def plain(case: Case) -> Callable[[], object]:
    """Return a forward and backward pass of the mean loss."""
    parameters = [p for p in case.model.parameters() if p.requires_grad]
    inputs = case.inputs if isinstance(case.inputs, tuple) else (case.inputs,)

    def run() -> object:
        losses = case.loss(case.model(*inputs), case.targets)
        return torch.autograd.grad(losses.mean(), parameters, allow_unused=True)

    return run


def _calls(case: Case, scope: gradscope.Scope) -> dict[str, Callable[[], object]]:
    """Return the calls that are compared with a plain pass."""
    given = case.inputs, case.targets
    return {
        "rows": lambda: scope.per_sample_gradients(*given),
        "norms": lambda: scope.norms(*given),
        "clipped": lambda: scope.expectation("clip:max_norm=1.0 | mean", *given),
    }


def measured_seconds(run: Callable[[], object]) -> float:
    """Return the CPU time of a call."""
    start = time.process_time()
    run()
    return time.process_time() - start


def measure(case: Case, repeats: int, verify: Any = "never") -> tuple[float, dict[str, float]]:
    """Return the seconds of a plain pass, and the median ratio of each call."""
    alone = plain(case)
    with gradscope.Scope(case.model, case.loss, backend="hooks", verify=verify) as scope:
        every = _calls(case, scope)
        for run in (alone, *every.values()) * 3:
            run()
        times: dict[str, list[float]] = {name: [] for name in ("plain", *every)}
        for _ in range(repeats):
            for name, run in {"plain": alone, **every}.items():
                times[name].append(measured_seconds(run))
    base = statistics.median(times["plain"])
    return base, {name: statistics.median(times[name]) / base for name in every}


def parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    made = argparse.ArgumentParser(description=__doc__)
    made.add_argument("names", nargs="*", default=[], help=f"some of {', '.join(CASES)}")
    made.add_argument("--repeats", type=int, default=30)
    made.add_argument("--verify", default="never")
    return made


def main(argv: Sequence[str] | None = None) -> None:
    """Print a table."""
    given = parser().parse_args(argv)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        _print_table([*(given.names or CASES)], given.repeats, given.verify)
    finally:
        torch.set_num_threads(threads)


def _print_table(names: Sequence[str], repeats: int, verify: str) -> None:
    print(f"{'':18}{'plain ms':>9}{'rows':>7}{'norms':>7}{'clipped':>8}")
    every: list[float] = []
    for name in names:
        torch.manual_seed(0)
        base, ratios = measure(CASES[name](), repeats, verify)
        every += [ratios["rows"], ratios["norms"]] if name != "perceptron" else []
        found = "".join(f"{ratio:7.2f}" for ratio in ratios.values())
        print(f"{name:18}{1e3 * base:9.2f}{found}", flush=True)
    if every:
        middle = math.prod(every) ** (1 / len(every))
        print(f"rows and norms: median {statistics.median(every):.2f}, mean {middle:.2f}")


if __name__ == "__main__":
    main()
