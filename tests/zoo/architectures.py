"""Architectures with unusual structure, as small models that need no library."""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from tests.zoo.base import N, Net, Setup, param, regression, seeded

ARCHITECTURES = {}


def architecture(builder):
    """File a builder under its own name; the model is in eval mode."""

    def build(dtype: torch.dtype = torch.float64) -> Setup:
        with seeded(builder.__name__, dtype):
            setup = builder()
        setup.model.eval()
        return setup

    ARCHITECTURES[builder.__name__] = build
    return builder


def _experts(net, x, top):
    """Each token to its `top` experts, as transformers' eager loop does."""
    flat = x.reshape(-1, x.shape[-1])
    weight, which = net.router(flat).softmax(-1).topk(top, -1)
    weight = weight / weight.sum(-1, keepdim=True)
    out = torch.zeros_like(flat)
    mask = F.one_hot(which, len(net.up)).permute(2, 1, 0)
    for e in range(len(net.up)):
        slot, token = torch.where(mask[e])
        if len(token):
            h = F.silu(flat[token] @ net.up[e]) @ net.down[e]
            out = out.index_add(0, token, h * weight[token, slot, None])
    return out.view_as(x)


def _mixture(experts=3):
    return {
        "router": nn.Linear(4, experts),
        "up": param(experts, 4, 7),
        "down": param(experts, 7, 4),
    }


@architecture
def experts_chosen_by_each_token():
    return regression(Net(lambda net, x: _experts(net, x, 2), **_mixture()), torch.randn(N, 6, 4))


@architecture
def an_expert_without_tokens():
    net = Net(lambda net, x: _experts(net, x, 1), **_mixture(4))
    net.router.bias.data[3] = -50.0
    return regression(net, torch.randn(N, 6, 4))


@architecture
def experts_by_sorting():
    def forward(net, x):
        flat = x.reshape(-1, 4)
        which = net.router(flat).argmax(-1)
        order = which.argsort(stable=True)
        counts = torch.bincount(which, minlength=3).tolist()
        done = [t @ w for t, w in zip(flat[order].split(counts), net.up, strict=True)]
        return torch.cat(done)[order.argsort()].view(*x.shape[:2], 7).tanh()

    return regression(Net(forward, **_mixture()), torch.randn(N, 6, 4))


@architecture
def soft_experts():
    def forward(net, x):
        gate = net.router(x)
        slots = torch.einsum("nte,ntd->ned", gate.softmax(1), x)
        done = torch.einsum("ned,edh->neh", slots, net.up).tanh()
        return torch.einsum("nte,neh->nth", gate.softmax(2), done)

    return regression(Net(forward, **_mixture()), torch.randn(N, 6, 4))


@architecture
def pictures_scattered_into_text():
    def forward(net, ids, image):
        text = net.table(ids)
        seen = net.vision(image).flatten(2).transpose(1, 2)
        mask = (ids == 8).unsqueeze(-1).expand_as(text)
        return net.head(text.masked_scatter(mask, seen)).tanh().cumsum(1)

    ids = torch.randint(0, 8, (N, 9))
    ids[:, 2:6] = 8  # four positions of each sample are its picture's
    model = Net(
        forward, table=nn.Embedding(9, 4), vision=nn.Conv2d(2, 4, 3, stride=3), head=nn.Linear(4, 3)
    )
    return regression(model, (ids, torch.randn(N, 2, 6, 6)))


@architecture
def attention_biases_by_a_table_of_offsets():
    class Levit(nn.Module):
        """Gathers its biases from a table by a buffer of offsets."""

        def __init__(self):
            super().__init__()
            self.qkv = nn.Linear(4, 12)
            self.biases = param(2, 6)
            self.register_buffer("offset", (torch.arange(6)[:, None] - torch.arange(6)).abs())

        def forward(self, x):
            q, k, v = self.qkv(x).unflatten(-1, (2, 6)).chunk(3, -1)
            scores = torch.einsum("nqhd,nkhd->nhqk", q, k) + self.biases[:, self.offset]
            return torch.einsum("nhqk,nkhd->nqhd", scores.softmax(-1), v).flatten(2)

    return regression(Levit(), torch.randn(N, 6, 4))


@architecture
def relative_position_buckets():
    def forward(net, x):
        t = torch.arange(x.shape[1], device=x.device)
        distance = t[None] - t[:, None]
        bucket = torch.where(distance < 0, 4, 0) + distance.abs().float().log1p().long().clamp(
            max=3
        )
        scores = torch.einsum("nqd,nkd->nqk", net.q(x), net.k(x))
        scores = scores.unsqueeze(1) + net.bias(bucket).permute(2, 0, 1)
        return torch.einsum("nhqk,nkd->nqhd", scores.softmax(-1), x).flatten(2)

    layers = {"q": nn.Linear(4, 3), "k": nn.Linear(4, 3), "bias": nn.Embedding(8, 2)}
    return regression(Net(forward, **layers), torch.randn(N, 7, 4))


@architecture
def windows_with_a_table_of_positions():
    def forward(net, x):
        n, c = x.shape[:2]
        windows = x.unfold(2, 2, 2).unfold(3, 2, 2).reshape(n, c, -1, 4).permute(0, 2, 3, 1)
        flat = windows.reshape(-1, 4, c)  # windows of all samples along one axis
        q, k, v = net.qkv(flat).chunk(3, -1)
        bias = net.table[net.index.view(-1)].view(4, 4, 2).permute(2, 0, 1)
        scores = (q.unflatten(-1, (2, 2)).transpose(1, 2)) @ k.unflatten(-1, (2, 2)).permute(
            0, 2, 3, 1
        )
        h = (scores + bias.unsqueeze(0)).softmax(-1) @ v.unflatten(-1, (2, 2)).transpose(1, 2)
        return h.transpose(1, 2).reshape(n, -1, 4)

    at = torch.tensor([[0, 0], [0, 1], [1, 0], [1, 1]])
    index = ((at[:, None] - at + 1) * torch.tensor([3, 1])).sum(-1)
    model = Net(forward, qkv=nn.Linear(3, 12), table=param(9, 2), index=index)
    return regression(model, torch.randn(N, 3, 4, 6))


@architecture
def disentangled_positions():
    def forward(net, x):
        size = x.shape[1]
        place = net.places(torch.arange(2 * size - 1, device=x.device))
        q, k = net.q(x), net.k(x)
        t = torch.arange(size, device=x.device)
        offset = (t[:, None] - t + size - 1).expand(len(x), size, size)
        scores = q @ k.transpose(1, 2)
        scores = scores + (q @ net.k(place).T).gather(2, offset)
        scores = scores + (k @ net.q(place).T).gather(2, offset).transpose(1, 2)
        return scores.softmax(-1) @ x

    layers = {"q": nn.Linear(4, 3), "k": nn.Linear(4, 3), "places": nn.Embedding(13, 4)}
    return regression(Net(forward, **layers), torch.randn(N, 7, 4))


@architecture
def rotary_positions_with_shared_keys():
    def forward(net, x):
        t = torch.arange(x.shape[1], device=x.device, dtype=x.dtype)
        angle = t[:, None] * x.new_tensor([1.0, 0.1])
        cos, sin = angle.cos().repeat(1, 2), angle.sin().repeat(1, 2)

        def turn(z):
            a, b = z.chunk(2, -1)
            return z * cos + torch.cat([-b, a], -1) * sin

        q = turn(net.q(x).unflatten(-1, (3, 4)).transpose(1, 2))
        k, v = (f(x).unsqueeze(1).repeat_interleave(3, 1) for f in (net.k, net.v))
        h = F.scaled_dot_product_attention(q, turn(k), v, is_causal=True)
        return h.transpose(1, 2).flatten(2)

    layers = {"q": nn.Linear(5, 12), "k": nn.Linear(5, 4), "v": nn.Linear(5, 4)}
    return regression(Net(forward, **layers), torch.randn(N, 6, 5))


@architecture
def gated_delta_rule():
    def forward(net, x):
        q, k, v = net.qkv(x).chunk(3, -1)
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        decay = -net.log_a.exp() * F.softplus(net.decay(x) + net.dt)
        beta, state, out = net.beta(x).sigmoid(), x.new_zeros(len(x), 3, 3), []
        for t in range(x.shape[1]):
            state = state * decay[:, t].exp().unsqueeze(-1)
            error = (v[:, t] - torch.einsum("nkv,nk->nv", state, k[:, t])) * beta[:, t]
            state = state + k[:, t].unsqueeze(-1) * error.unsqueeze(1)
            out.append(torch.einsum("nkv,nk->nv", state, q[:, t]))
        return torch.stack(out, 1)

    layers = {"qkv": nn.Linear(4, 9), "decay": nn.Linear(4, 1), "beta": nn.Linear(4, 1)}
    return regression(Net(forward, **layers, log_a=param(1), dt=param(1)), torch.randn(N, 6, 4))


@architecture
def selective_state_space():
    def forward(net, x):
        step = F.softplus(net.step(x))
        b, c = net.bc(x).chunk(2, -1)
        state, out = x.new_zeros(len(x), 4, 3), []
        for t in range(x.shape[1]):
            decay = (-step[:, t, :, None] * net.log_a.exp()).exp()
            state = decay * state + (step[:, t] * x[:, t]).unsqueeze(-1) * b[:, t].unsqueeze(1)
            out.append((state * c[:, t].unsqueeze(1)).sum(-1) + net.skip * x[:, t])
        return torch.stack(out, 1)

    layers = {"step": nn.Linear(4, 4), "bc": nn.Linear(4, 6)}
    return regression(
        Net(forward, **layers, log_a=param(4, 3), skip=param(4)), torch.randn(N, 6, 4)
    )


@architecture
def time_mix_with_the_token_before():
    def forward(net, x):
        before = F.pad(x, (0, 0, 1, -1))
        mixed = x * net.mix + before * (1 - net.mix)
        k, v = net.k(mixed), net.v(mixed)
        top, bottom, out = torch.zeros_like(k[:, 0]), torch.zeros_like(k[:, 0]), []
        for t in range(x.shape[1]):
            now = (net.first + k[:, t]).exp()
            out.append((top + now * v[:, t]) / (bottom + now))
            top = top * (-net.decay.exp()).exp() + k[:, t].exp() * v[:, t]
            bottom = bottom * (-net.decay.exp()).exp() + k[:, t].exp()
        return torch.stack(out, 1)

    layers = {"k": nn.Linear(4, 3), "v": nn.Linear(4, 3)}
    own = {"mix": param(4), "first": param(3), "decay": param(3)}
    return regression(Net(forward, **layers, **own), torch.randn(N, 6, 4))


@architecture
def affine_parameters_repeated_over_the_batch():
    def forward(net, x):
        n = len(x)
        flat = x.reshape(1, -1, *x.shape[2:])  # samples times channels, as instance_norm does
        weight, bias = net.weight.repeat(n), net.bias.repeat(n)
        out = F.batch_norm(flat, None, None, weight, bias, True)
        return net.conv(out.view_as(x).sin())

    own = {"weight": param(3), "bias": param(3), "conv": nn.Conv2d(3, 2, 2)}
    return regression(Net(forward, **own), torch.randn(N, 3, 4, 6))


@architecture
def weights_standardised_at_each_call():
    def forward(net, x):
        w = net.weight.flatten(1)
        w = F.batch_norm(w.unsqueeze(0), None, None, net.gain, None, True).view_as(net.weight)
        return F.conv2d(x, w).tanh()

    return regression(
        Net(forward, weight=param(6, 3, 2, 2), gain=param(6)), torch.randn(N, 3, 4, 5)
    )


@architecture
def kernels_made_for_each_sample():
    def forward(net, x):
        n, c = x.shape[:2]
        mix = net.route(x.mean((2, 3))).softmax(-1)
        kernel = torch.einsum("ne,eoihw->noihw", mix, net.bank).flatten(0, 1)
        return F.conv2d(x.reshape(1, n * c, *x.shape[2:]), kernel, groups=n).unflatten(1, (n, -1))[
            0
        ]

    own = {"route": nn.Linear(3, 2), "bank": param(2, 4, 3, 2, 2)}
    return regression(Net(forward, **own), torch.randn(N, 3, 4, 6))


@architecture
def squeezed_and_excited():
    def forward(net, x):
        h = net.conv(x)
        return h * net.up(F.relu6(net.down(h.mean((2, 3), keepdim=True)))).sigmoid()

    own = {
        "conv": nn.Conv2d(3, 4, 3, groups=1),
        "down": nn.Conv2d(4, 2, 1),
        "up": nn.Conv2d(2, 4, 1),
    }
    return regression(Net(forward, **own), torch.randn(N, 3, 5, 6))


@architecture
def layers_scaled_and_tokens_joined():
    def forward(net, x):
        h = net.patch(x).flatten(2).transpose(1, 2)
        h = torch.cat([net.token.expand(len(h), -1, -1), h], 1) + net.place
        h = h + net.scale * net.attend(h, h, h, need_weights=False)[0]
        return net.head(net.norm(h)[:, 0])

    own = {
        "patch": nn.Conv2d(2, 4, 2, stride=2), "token": param(1, 1, 4), "place": param(1, 7, 4),
        "scale": param(4, scale=0.1), "attend": nn.MultiheadAttention(4, 2, batch_first=True),
        "norm": nn.LayerNorm(4), "head": nn.Linear(4, 3),
    }  # fmt: skip
    return regression(Net(forward, **own), torch.randn(N, 2, 4, 6))


@architecture
def places_interpolated_to_the_picture():
    def forward(net, x):
        place = F.interpolate(net.place, size=x.shape[2:], mode="bicubic", align_corners=False)
        return net.conv(x + place).tanh()

    return regression(
        Net(forward, place=param(1, 3, 4, 4), conv=nn.Conv2d(3, 2, 3)), torch.randn(N, 3, 6, 7)
    )


@architecture
def deformed_by_a_sampled_grid():
    def forward(net, x):
        h, w = x.shape[2:]
        y = torch.linspace(-0.8, 0.8, h, device=x.device, dtype=x.dtype)
        z = torch.linspace(-0.8, 0.8, w, device=x.device, dtype=x.dtype)
        grid = torch.stack(torch.meshgrid(z, y, indexing="xy"), -1)
        shift = 0.1 * net.offset(x).tanh().permute(0, 2, 3, 1)
        return net.out(F.grid_sample(x, grid + shift, align_corners=False))

    own = {"offset": nn.Conv2d(3, 2, 3, padding=1), "out": nn.Conv2d(3, 2, 1)}
    return regression(Net(forward, **own), torch.randn(N, 3, 5, 6))


@architecture
def nearest_codes_with_a_straight_estimate():
    def forward(net, x):
        h = net.encode(x)
        code = net.codes[torch.cdist(h.detach(), net.codes.detach()).argmin(-1)]
        return net.decode(h + (code - h).detach()), code

    model = Net(forward, encode=nn.Linear(4, 3), codes=param(5, 3), decode=nn.Linear(3, 4))

    def loss(outputs, targets):
        out, code = outputs
        return (out - targets).square().sum((1, 2)) + code.sin().sum((1, 2))

    return Setup(model, loss, torch.randn(N, 6, 4), torch.randn(N, 6, 4))


@architecture
def filtered_in_the_frequencies():
    def forward(net, x):
        spectrum = torch.fft.rfft2(net.lift(x), norm="ortho")
        low = torch.einsum(
            "nihw,iohw->nohw", spectrum[:, :, :3, :2], torch.view_as_complex(net.filter)
        )
        out = spectrum.new_zeros(len(x), 3, *spectrum.shape[2:])
        out[:, :, :3, :2] = low
        return torch.fft.irfft2(out, s=x.shape[2:], norm="ortho")

    own = {"lift": nn.Conv2d(2, 4, 1), "filter": param(4, 3, 3, 2, 2)}
    return regression(Net(forward, **own), torch.randn(N, 2, 6, 7))


@architecture
def messages_of_graphs_that_are_joined():
    def forward(net, x, edges):
        n, v = x.shape[:2]
        start = v * torch.arange(n, device=x.device)
        a, b = (edges + start[:, None, None]).transpose(0, 1).flatten(1)
        h = net.lift(x.flatten(0, 1))
        score = F.leaky_relu((h[a] * net.left).sum(-1) + (h[b] * net.right).sum(-1), 0.2)
        score = (score - score.detach().max()).exp()
        total = score.new_zeros(n * v).index_add(0, b, score)
        weight = score / total[b]
        return h.new_zeros(h.shape).index_add(0, b, h[a] * weight[:, None]).view(n, v, -1)

    own = {"lift": nn.Linear(4, 3), "left": param(3), "right": param(3)}
    ring = torch.arange(7)
    edges = torch.stack([torch.stack([ring, ring.roll(k)]) for k in (1, 2, 3, 1, 2)])
    return regression(Net(forward, **own), (torch.randn(N, 7, 4), edges))


@architecture
def largest_message_of_each_node():
    def forward(net, x, edges):
        n, v = x.shape[:2]
        a, b = edges.unbind(1)
        rows = x.gather(1, a.unsqueeze(-1).expand(-1, -1, 4))
        message = net.one(torch.cat([rows, x.gather(1, b.unsqueeze(-1).expand(-1, -1, 4))], -1))
        out = message.new_zeros(n, v, 3)
        return out.scatter_reduce(1, b.unsqueeze(-1).expand(-1, -1, 3), message, "amax")

    edges = torch.randint(0, 7, (N, 2, 11))
    return regression(Net(forward, one=nn.Linear(8, 3)), (torch.randn(N, 7, 4), edges))


@architecture
def queries_that_are_parameters():
    def forward(net, x):
        query = net.query.unsqueeze(0).repeat(len(x), 1, 1)
        for _ in range(2):  # the same layer twice
            query = net.norm(query + net.attend(query, x, x)[0])
        return query, net.box(query).sigmoid()

    own = {"query": param(3, 4), "attend": nn.MultiheadAttention(4, 2, batch_first=True)}
    own |= {"norm": nn.LayerNorm(4), "box": nn.Linear(4, 2)}

    def loss(outputs, targets):
        return outputs[0].sin().sum((1, 2)) + (outputs[1] * targets).sum((1, 2))

    return Setup(Net(forward, **own), loss, torch.randn(N, 6, 4), torch.randn(N, 3, 2))


@architecture
def slots_competing_for_positions():
    def forward(net, x):
        slots = net.start.expand(len(x), -1, -1)
        keys, values = net.k(x), net.v(x)
        for _ in range(2):
            share = (net.q(slots) @ keys.transpose(1, 2)).softmax(1)
            share = share / share.sum(-1, keepdim=True)
            update = share @ values
            slots = net.cell(update.flatten(0, 1), slots.flatten(0, 1)).view_as(slots)
        return slots

    own = {name: nn.Linear(4, 4) for name in "qkv"} | {
        "start": param(1, 3, 4),
        "cell": nn.GRUCell(4, 4),
    }
    return regression(Net(forward, **own), torch.randn(N, 6, 4))


@architecture
def steps_embedded_into_normalisations():
    def forward(net, x, step):
        frequency = torch.arange(1, 4, device=x.device, dtype=x.dtype)
        place = torch.cat(
            [(step[:, None] * frequency).sin(), (step[:, None] * frequency).cos()], -1
        )
        scale, shift = net.embed(place)[:, :, None, None].chunk(2, 1)
        return net.out(F.silu(net.norm(net.conv(x)) * (1 + scale) + shift))

    own = {"conv": nn.Conv2d(2, 4, 3, padding=1), "norm": nn.GroupNorm(2, 4)}
    own |= {"embed": nn.Linear(6, 8), "out": nn.Conv2d(4, 2, 3)}
    return regression(Net(forward, **own), (torch.randn(N, 2, 5, 6), torch.rand(N)))


@architecture
def depth_over_stochastic_paths_in_eval_mode():
    def forward(net, x):
        for layer in (net.a, net.b):
            kept = F.dropout(layer(x), 0.5, net.training) * x.new_ones(len(x), 1, 1)
            x = x + kept.tanh()
        return x

    return regression(Net(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 4)), torch.randn(N, 6, 4))


@architecture
def low_precision_inside():
    def forward(net, x):
        h = net.a(x)
        h = (h.float() * h.float().square().mean(-1, keepdim=True).add(1e-6).rsqrt()).to(h.dtype)
        return net.b(h * net.weight).tanh()

    own = {"a": nn.Linear(4, 7), "weight": param(7), "b": nn.Linear(7, 3)}
    return regression(Net(forward, **own), torch.randn(N, 6, 4))


@architecture
def sequences_of_other_lengths():
    def forward(net, x, mask):
        h = net.a(x) * mask.unsqueeze(-1)
        scores = (h @ h.transpose(1, 2)).masked_fill(~mask[:, None, :], torch.finfo(h.dtype).min)
        return net.b(scores.softmax(-1) @ h).sum(1) / mask.sum(1, keepdim=True)

    mask = torch.arange(6) < torch.tensor([6, 3, 4, 5, 2]).unsqueeze(1)
    own = {"a": nn.Linear(4, 7), "b": nn.Linear(7, 3)}
    return regression(Net(forward, **own), (torch.randn(N, 6, 4), mask))
