"""Where torch's own kernels are wrong or missing, against formulas that call none of them."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import gradscope
from gradscope.model.kernels import patched_kernels, takes_layouts_for_others
from tests.backends.hooks.test_experts import GROUPED
from tests.oracle import cross_entropy, per_sample_gradients


class Pixels(nn.Module):
    """Channels that are normalised, then positions by their channels: their order in memory."""

    def __init__(self, norm: nn.Module, head: str) -> None:
        super().__init__()
        self.convolution, self.norm, self.out = nn.Conv2d(2, 6, (3, 4)), norm, nn.Linear(6, 3)
        self.head, self.plain = head, False

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (n, 3) of pictures (n, 2, h, w)."""
        maps = self.convolution(x)
        rows = (self.by_hand(maps) if self.plain else self.norm(maps)).flatten(2).transpose(1, 2)
        if self.head == "mean":
            return self.out(rows.mean(1)).cos()
        if self.head == "first":
            return self.out(torch.cat([rows[:, :1], rows.square()], 1))[:, 0]
        return self.out(F.layer_norm(rows, (6,))).cos().mean(1)

    def by_hand(self, maps: Tensor) -> Tensor:
        """Return what the normalisation is."""
        own = isinstance(self.norm, nn.InstanceNorm2d)
        mean = maps.mean((2, 3)) if own else self.norm.running_mean
        var = maps.var((2, 3), correction=0) if own else self.norm.running_var
        mean, var, weight, bias = (
            t.reshape(-1, 6, 1, 1) for t in (mean, var, self.norm.weight, self.norm.bias)
        )
        return (maps - mean) / (var + self.norm.eps).sqrt() * weight + bias


def right(model: Pixels, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """Return the gradients of batches of one without torch's normalisation."""
    model.plain = True
    _, rows = per_sample_gradients(model, cross_entropy, x, y)
    model.plain = False
    return {name: g.to(x.dtype) for name, g in rows.items()}


@pytest.mark.sampled
@pytest.mark.parametrize("width", [8, 4])  # of which 5 and 1 are left
@pytest.mark.parametrize(
    ("kind", "head"),
    [
        *((nn.BatchNorm2d, head) for head in ("mean", "first", "layer")),
        *((nn.InstanceNorm2d, head) for head in ("first", "layer")),  # its mean is constant
    ],
)
def test_normalised_channels_whatever_the_layout(kind: type, head: str, width: int) -> None:
    """Of a batch of one, and of maps one pixel wide, torch alone gives no function's gradient."""
    torch.manual_seed(0)
    own = torch.batch_norm
    model = Pixels(kind(6, affine=True), head).double().eval()
    for t in (*model.norm.parameters(), *model.norm.buffers()):
        if t.is_floating_point():
            nn.init.uniform_(t, 0.5, 2.0)
    for n in (1, 5):
        x, y = torch.randn(n, 2, 7, width, dtype=torch.float64), torch.arange(n) % 3
        for given in (x, x.contiguous(memory_format=torch.channels_last)):
            wanted = right(model, x, y)
            for backend in ("hooks", "vmap", "expand", "loop"):
                found = gradscope.per_sample_gradients(
                    model, "cross_entropy", given, y, backend=backend
                )
                for name, gradient in wanted.items():
                    torch.testing.assert_close(found[name], gradient, rtol=1e-8, atol=1e-10)
    assert torch.batch_norm is own


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("width", [8, 4])
@pytest.mark.parametrize(
    ("kind", "head"),
    [
        *((nn.BatchNorm2d, head) for head in ("mean", "first", "layer")),
        *((nn.InstanceNorm2d, head) for head in ("first", "layer")),
    ],
)
def test_it_is_said_where_a_loop_of_torch_alone_is_wrong(kind, head, width, dtype) -> None:
    """And nowhere else."""
    torch.manual_seed(0)
    model = Pixels(kind(6, affine=True), head).to(dtype).eval()
    nn.init.uniform_(model.norm.weight, 0.5, 2.0)
    x, y = torch.randn(3, 2, 7, width, dtype=dtype), torch.arange(3) % 3
    wanted = right(model, x, y)
    losses = [F.cross_entropy(model(x[i : i + 1]), y[i : i + 1]) for i in range(3)]
    rows = [torch.autograd.grad(loss, list(model.parameters())) for loss in losses]
    pairs = zip(wanted.values(), map(torch.stack, zip(*rows, strict=True)), strict=True)
    wrong = any(bool((a - b).norm() > 1e-3 * a.norm().clamp_min(1e-3)) for a, b in pairs)
    for backend in ("auto", "hooks", "loop"):
        with gradscope.Scope(model, "cross_entropy", backend=backend) as scope:
            found = scope.per_sample_gradients(x, y)
            said = [note for note in scope.notes if "batch normalisation on a CPU" in note]
        assert len(said) == wrong
        for name, gradient in wanted.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-5)


def test_whether_torch_alone_is_wrong_is_known() -> None:
    """Positions by their channels, of a batch of one."""
    torch.manual_seed(0)
    x = torch.randn(1, 4, 3, 3, dtype=torch.float64)
    gradient = torch.randn(1, 9, 4, dtype=torch.float64).transpose(1, 2).unflatten(2, (3, 3))
    weight = torch.ones(4, dtype=torch.float64, requires_grad=True)
    statistics = torch.zeros(4).double(), torch.ones(4).double()
    out = F.batch_norm(x, *statistics, weight, torch.zeros(4).double())
    (found,) = torch.autograd.grad(out, weight, gradient)
    wanted = (x * gradient).sum((0, 2, 3)) / (1 + 1e-5) ** 0.5
    assert takes_layouts_for_others() == (not torch.allclose(found, wanted, rtol=1e-2))


@pytest.mark.skipif(not GROUPED, reason="this torch has no grouped products on the CPU")
def test_grouped_products_in_float64() -> None:
    """As torch has them in float32; of rows behind the last group torch does not say."""
    torch.manual_seed(0)
    ends = torch.tensor([4, 4, 12], dtype=torch.int32)
    rows, columns, stack = torch.randn(16, 8), torch.randn(8, 16), torch.randn(3, 8, 8)
    last = slice(None, 12)
    for a, b, offs, counted in (
        (rows, stack, ends, (last,)),
        (stack, columns, ends, (slice(None), last)),
        (columns, rows, ends, ()),
        (stack, stack.mT, None, ()),
    ):
        with patched_kernels():
            found = torch._grouped_mm(a.double(), b.double(), offs=offs)
        wanted = torch._grouped_mm(a, b, offs=offs)
        assert found.dtype == torch.float64 and found.shape == wanted.shape
        torch.testing.assert_close(found[counted].float(), wanted[counted], rtol=1e-5, atol=1e-5)
