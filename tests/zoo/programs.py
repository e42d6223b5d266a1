"""Ways to write a forward pass: in place, by slices and masks, checkpointed, more arguments."""

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.zoo.base import N, Net, Setup, case, param, program, regression


@program(
    lambda: (
        {
            "a": nn.Linear(4, 7),
            "shift": param(7),
            "act": nn.ELU(inplace=True),
            "b": nn.Linear(7, 3),
        },
        torch.randn(N, 6, 4),
    )
)
def in_place_activations_and_additions(net, x):
    h = net.a(x)
    h += net.shift
    h.mul_(1.5).tanh_()
    return net.b(net.act(h.sin()))


@program(
    lambda: ({"scale": param(4), "shift": param(4), "a": nn.Linear(4, 3)}, torch.randn(N, 6, 4))
)
def in_place_on_the_input(net, x):
    x = x.clone()
    x[:, 0] *= net.scale
    x[:, 1:] += net.shift
    return net.a(x).tanh()


@program(lambda: ({"a": nn.Linear(4, 3)}, torch.randn(N, 6, 4)))
def in_place_on_the_given_tensors(net, x):
    x[:, 0] += 1.0
    return net.a(x.mul_(1.5)).tanh()


@program(lambda: ({"a": nn.Linear(4, 7), "b": nn.Linear(4, 3)}, torch.randn(N, 6, 4)))
def slice_assignment(net, x):
    out = x.new_zeros(x.shape[0], x.shape[1], 7)
    out[:, ::2] = net.a(x[:, ::2]).tanh()
    out[:, 1::2, :3] = net.b(x[:, 1::2])
    return out.sin()


@program(lambda: ({"a": nn.Linear(4, 7), "b": nn.Linear(7, 7)}, torch.randn(N, 6, 4)))
def boolean_mask(net, x):
    h = net.a(x)
    h = h.masked_fill(h < -0.5, -0.5)
    out = torch.zeros_like(h)
    mask = x[..., 0] > 0
    out[mask] = net.b(h[mask]).tanh()  # positions of all samples in one list
    return out + h.sin()


@case()
def experts_by_dispatch() -> Setup:
    def forward(net: nn.Module, x):
        gate = net.gate(x).softmax(-1)
        weight, which = gate.max(-1)
        out = x.new_zeros(x.shape[0], 3)
        for k, expert in enumerate(net.experts):
            rows = (which == k).nonzero().squeeze(1)
            out = out.index_add(0, rows, expert(x[rows]).tanh() * weight[rows, None])
        return out

    experts = nn.ModuleList(nn.Linear(4, 3) for _ in range(2))
    return regression(Net(forward, gate=nn.Linear(4, 2), experts=experts), torch.randn(N, 4))


@program(
    lambda: ({"a": nn.Linear(4, 7), "b": nn.Linear(7, 6), "c": nn.Linear(6, 3)}, torch.randn(N, 4))
)
def checkpointed(net, x):
    h = checkpoint(lambda z: net.b(net.a(z).tanh()).sin(), x, use_reentrant=False)
    return net.c(h)


@case()
def keyword_arguments() -> Setup:
    def forward(net: nn.Module, *, x, mask, scale):
        h = net.a(x).tanh() * mask.unsqueeze(-1)
        return net.b(h.sum(1) / mask.sum(1, keepdim=True)) * scale

    model = Net(forward, a=nn.Linear(4, 7), b=nn.Linear(7, 3))
    mask = (torch.arange(6) < torch.tensor([6, 3, 4, 5, 2]).unsqueeze(1)).double()
    inputs = {"scale": torch.rand(N, 1), "x": torch.randn(N, 6, 4), "mask": mask}
    return regression(model, inputs)


@program(lambda: ({"a": nn.Linear(4, 3)}, (torch.randn(N, 6, 4), torch.tensor(0.7))))
def shared_constant_argument(net, x, strength):
    return net.a(x * strength).tanh()


@case()
def nested_arguments() -> Setup:
    def forward(net: nn.Module, pair, options):
        return net.a(pair[0]).tanh() * net.b(pair[1]) + options["bias"].unsqueeze(1)

    inputs = ((torch.randn(N, 4), torch.randn(N, 3)), {"bias": torch.randn(N)})
    return regression(Net(forward, a=nn.Linear(4, 7), b=nn.Linear(3, 7)), inputs)


@program(lambda: ({"scale": torch.tensor(1.7), "a": nn.Linear(4, 3)}, torch.randn(N, 4)))
def buffer_read_with_item(net, x):
    return net.a(x * net.scale.item()).tanh()


@program(lambda: ({"calls": torch.tensor(2.0), "a": nn.Linear(4, 3)}, torch.randn(N, 4)))
def buffer_updated_in_forward(net, x):
    net.calls += 1
    return net.a(x).tanh() / net.calls


@case()
def several_outputs() -> Setup:
    def forward(net: nn.Module, x):
        mean, spread = net.a(x).chunk(2, -1)
        return {"mean": mean, "spread": spread}

    def loss(outputs: dict[str, Tensor], targets: Tensor) -> Tensor:
        spread = outputs["spread"]
        gap = (outputs["mean"] - targets) * (-spread).exp()
        return (0.5 * gap.square() + spread).sum(1)

    model = Net(forward, a=nn.Linear(4, 6))
    return Setup(model, loss, torch.randn(N, 4), torch.randn(N, 3))


class _Swish(torch.autograd.Function):
    """x σ(βx), written by hand."""

    @staticmethod
    def forward(x: Tensor, beta: Tensor) -> Tensor:
        return x * (beta * x).sigmoid()

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, grad):
        x, beta = ctx.saved_tensors
        s = (beta * x).sigmoid()
        slope = x * s * (1 - s)
        over_beta = (grad * x * slope).sum_to_size(beta.shape)
        return grad * (s + beta * slope), over_beta


class _VmappableSwish(_Swish):
    generate_vmap_rule = True


@program(lambda: ({"a": nn.Linear(4, 7), "beta": param(7)}, torch.randn(N, 6, 4)))
def custom_function_with_a_parameter(net, x):
    return _Swish.apply(net.a(x), net.beta)


@program(lambda: ({"a": nn.Linear(4, 7), "beta": param(7)}, torch.randn(N, 6, 4)))
def custom_function_with_a_vmap_rule(net, x):
    return _VmappableSwish.apply(net.a(x), net.beta)


@program(lambda: ({"a": nn.Linear(4, 7), "b": nn.Linear(7, 7)}, torch.randn(N, 4)))
def control_flow_on_the_data(net, x):
    rows = []
    for row in x.unbind(0):  # each sample takes its own path
        h = net.a(row).tanh()
        rows.append(h if row.sum() > 0 else net.b(h).sin())
    return torch.stack(rows)


@case()
def complex_parameters() -> Setup:
    def forward(net: nn.Module, x):
        spectrum = torch.fft.rfft(x, dim=1) * net.filter
        z = (spectrum * net.phase).sum(1)
        return torch.cat([z.real.tanh(), z.imag, z.abs().square()], 1)

    filters = nn.Parameter(torch.randn(4, 3, dtype=torch.complex128))
    model = Net(forward, filter=filters, phase=nn.Parameter(torch.randn(3) + 0.5j))
    return regression(model, torch.randn(N, 6, 3))


@program(
    lambda: (
        {
            "a": nn.Linear(4, 7, dtype=torch.complex128),
            "b": nn.Linear(7, 3, dtype=torch.complex128),
        },
        torch.randn(N, 4),
    )
)
def complex_linear(net, x):
    z = net.b(net.a(torch.complex(x, x.sin())).tanh())
    return torch.view_as_real(z)


@program(lambda: ({"a": nn.Linear(4, 7), "b": nn.Linear(7, 3)}, torch.randn(N, 4)))
def samples_sorted_inside(net, x):
    order = x[:, 0].argsort()
    h = net.a(x[order]).tanh()
    return net.b(h[order.argsort()])


@case()
def gradient_reversed_by_a_function() -> Setup:
    class Reversed(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return -gradient

    def forward(net: nn.Module, x):
        return net.b(Reversed.apply(net.a(x).tanh()))

    return regression(Net(forward, a=nn.Linear(4, 7), b=nn.Linear(7, 3)), torch.randn(N, 4))
