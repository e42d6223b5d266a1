"""Convolution blocks, by all their variants, against autograd one sample at a time."""

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from gradscope.blocks import ConvolutionBlock, Geometry, Tuner, base, convolution

CONVOLUTIONS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}

# spatial sizes, channels in and out, kernel, options
TABLE = {
    "plain": ((7, 6), 2, 3, (3, 2), {}),
    "strided": ((9, 8), 2, 4, (3, 2), {"stride": (2, 3), "padding": (1, 0)}),
    "dilated": ((9, 8), 2, 3, (2, 3), {"dilation": (3, 2), "padding": (2, 1)}),
    "grouped": ((6, 5), 4, 6, (3, 3), {"groups": 2, "padding": (1, 1)}),
    "depthwise": ((6, 5), 3, 6, (3, 2), {"groups": 3}),
    "few positions": ((2, 2), 3, 9, (3, 3), {"padding": (1, 1)}),
    "few positions, grouped": ((2, 2), 4, 18, (3, 3), {"groups": 2, "padding": (1, 1)}),
    "one axis": ((11,), 2, 3, (4,), {"stride": (2,), "padding": (3,)}),
    "three axes": ((5, 4, 6), 2, 3, (2, 3, 2), {"padding": (1, 1, 0)}),
    "transposed": ((5, 4), 4, 3, (3, 2), {"transposed": True, "stride": (2, 2), "padding": (1, 0)}),
    "transposed, grouped": (
        (5, 4), 4, 3, (3, 3),
        {"transposed": True, "groups": 2, "stride": (3, 2), "output_padding": (2, 1)},
    ),
    "few pixels": ((2, 2), 3, 12, (3, 3), {"padding": (1, 1)}),
    "few pixels, dilated": (
        (5,), 2, 12, (3,), {"stride": (2,), "dilation": (2,), "padding": (1,)},
    ),
    "few pixels, transposed": ((3,), 6, 10, (3,), {"transposed": True, "groups": 2}),
    "transposed, dilated": ((6,), 2, 3, (3,), {"transposed": True, "dilation": (2,)}),
}  # fmt: skip


VARIANTS = {
    "by kernels": ("a kernel a sample", "dense"),
    "by one grouped kernel": ("grouped kernel", "dense"),
    "by patches": ("patches", "gram of patches", "gram"),
    "by pixels": ("gram of pixels",),
    "by few patches at a time": ("patches", "dense"),
}


@pytest.fixture(params=VARIANTS)
def variant(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    small = request.param == "by few patches at a time"
    for size in ("PATCH_BYTES", "TILE_BYTES"):
        monkeypatch.setattr(convolution, size, 1 if small else 10**9)
    if small:
        monkeypatch.setattr(base, "TILE_BYTES", 1)
    with Tuner(preferred=frozenset(VARIANTS[request.param])).active():
        yield


FRAMES = [*((name, 1) for name in TABLE), ("strided", 2), ("few positions", 2)]
FRAMES.append(("transposed, grouped", 2))


def made(name: str, frames: int) -> tuple[ConvolutionBlock, torch.Tensor]:
    """A block, and its dense form by autograd."""
    space, c, o, kernel, options = TABLE[name]
    axes, transposed = len(space), options.get("transposed", False)
    groups = options.get("groups", 1)
    ones = (1,) * axes
    walk = {"stride": ones, "padding": (0,) * axes, "dilation": ones} | {
        k: v for k, v in options.items() if k not in ("transposed", "groups", "output_padding")
    }
    extra = {"output_padding": options.get("output_padding", (0,) * axes)} if transposed else {}
    shape = (c, o, *kernel) if transposed else (o, c // groups, *kernel)
    torch.manual_seed(1)
    weight = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    inputs = torch.randn(3, frames, c, *space, dtype=torch.float64)
    call = (TRANSPOSED if transposed else CONVOLUTIONS)[axes]
    rows, gradients = [], []
    for sample in inputs:
        out = call(sample, weight, groups=groups, **walk, **extra)
        upstream = torch.randn_like(out)
        rows.append(torch.autograd.grad(out, weight, upstream)[0])
        gradients.append(upstream)
    geometry = Geometry(
        output_padding=options.get("output_padding", (0,) * axes),
        groups=groups,
        transposed=transposed,
        **walk,
    )
    block = ConvolutionBlock(inputs, torch.stack(gradients), tuple(weight.shape), geometry)
    return block, torch.stack(rows)


@pytest.mark.parametrize(("name", "frames"), FRAMES)
def test_every_operation_equals_the_dense_one(variant: None, name: str, frames: int) -> None:
    block, rows = made(name, frames)
    flat, weights = rows.flatten(1), torch.tensor([0.5, -2.0, 3.0], dtype=torch.float64)
    vector = torch.randn(block.shape, dtype=torch.float64)
    close = torch.testing.assert_close
    close(block.dense(), rows)
    buffer = torch.full_like(rows, torch.nan)
    assert block.dense(buffer).data_ptr() == buffer.data_ptr()
    close(buffer, rows)
    close(block.squared_norms(), flat.square().sum(1))
    close(block.weighted_sum(), rows.sum(0))
    close(block.weighted_sum(weights), torch.tensordot(weights, rows, 1))
    close(block.squared_sum(weights), torch.tensordot(weights, rows**2, 1))
    for found, right in zip(block.sums(weights, weights**2), (rows, rows**2), strict=True):
        close(found, torch.tensordot(weights if right is rows else weights**2, right, 1))
    tiles = [(part, tile) for part, tile in block.tiles()]
    close(torch.cat([tile for _, tile in tiles]), rows)
    assert [i for part, _ in tiles for i in range(part.start, part.stop)] == [0, 1, 2]
    close(block.dot(vector), flat @ vector.flatten())
    close(block.gram(), flat @ flat.T)
    close(block.scale(weights).dense(), rows * weights.reshape(-1, *[1] * (rows.dim() - 1)))
    close(block.select(slice(1, 3)).dense(), rows[1:3])
    close(block.outer.dense(), rows)
    assert float(block.norm_bound()) >= float(flat.norm(dim=1).max())
    factors = block.factors()
    assert factors is not None
    assert block.factored_size == sum(t[0].numel() for t in factors.tensors.values())


def test_what_is_formed_for_norms_and_a_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many positions: the kernel would cost more than to read the dense gradients again."""
    torch.manual_seed(2)
    geometry = Geometry((1, 1), (1, 1), (1, 1), (0, 0), 1, False)
    inputs, gradients = torch.randn(4, 1, 8, 32, 32), torch.randn(4, 1, 9, 32, 32)
    block = ConvolutionBlock(inputs, gradients, (9, 8, 3, 3), geometry)
    formed = block.densify()
    assert formed.dense_if_formed is not None
    exact, weights = block.to(torch.float64), torch.rand(4)
    for found, right in (
        (formed.squared_norms(), exact.squared_norms()),
        (formed.weighted_sum(weights), exact.weighted_sum(weights.double())),
    ):
        torch.testing.assert_close(found.double(), right, rtol=1e-4, atol=1e-3)
    half = block.to(torch.bfloat16)
    assert half.densify() is half
    few = ConvolutionBlock(inputs[..., :2, :2], gradients[..., :2, :2], (9, 8, 3, 3), geometry)
    assert few.densify() is few
    monkeypatch.setattr(convolution, "KEPT", 1)
    assert block.densify() is block


@pytest.mark.parametrize("size", [1, 10**9])
@pytest.mark.parametrize(("name", "frames"), FRAMES)
def test_pieces(name: str, frames: int, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever their size they make up the gradients; with few positions all samples together."""
    for module in (base, convolution):
        monkeypatch.setattr(module, "PIECE_BYTES", size)
    block, rows = made(name, frames)
    found = torch.zeros_like(rows.flatten(1))
    for samples, entries, part in block.pieces():
        found[samples, entries] += part
    torch.testing.assert_close(found, rows.flatten(1))
    _, t, r, _ = block.sizes
    together = all(samples == slice(0, 3) for samples, _, _ in block.pieces())
    assert together is (size > 1 or t <= r)


@pytest.mark.parametrize("way", ["projected windows", "dense"])
@pytest.mark.parametrize(("name", "frames"), FRAMES)
def test_both_sides(name: str, frames: int, way: str) -> None:
    """With fewer or more rows than the kernel has."""
    block, rows = made(name, frames)
    matrices = rows.flatten(2)
    for count in (1, 2, 40):
        left, right = (torch.randn(count, size).double() for size in matrices.shape[1:])
        expected = left @ matrices @ right.mT
        with Tuner(preferred=frozenset([way])).active():
            torch.testing.assert_close(block.two_sided(left, right), expected)


def test_half_precision_is_summed_in_float32() -> None:
    block, rows = made("plain", 2)
    summed = block.to(torch.bfloat16).weighted_sum()
    assert summed.dtype == torch.float32
    torch.testing.assert_close(summed.double(), rows.sum(0), rtol=0.05, atol=0.1)
