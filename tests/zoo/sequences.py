"""Attention, recurrent layers and embeddings."""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from tests.zoo.base import N, Net, Setup, case, param, program, regression


def _ids(*shape: int, rows: int = 9) -> torch.Tensor:
    return torch.randint(0, rows, (N, *shape))


@case()
def attention_module_with_masks() -> Setup:
    def forward(net: nn.Module, x, padding):
        mask = torch.ones(6, 6, dtype=torch.bool, device=x.device).triu(1)
        return net.a(x, x, x, key_padding_mask=padding, attn_mask=mask)[0].tanh()

    padding = torch.arange(6) >= torch.tensor([6, 3, 4, 5, 2]).unsqueeze(1)
    model = Net(forward, a=nn.MultiheadAttention(4, 2, batch_first=True))
    return regression(model, (torch.randn(N, 6, 4), padding))


@program(lambda: ({"qkv": nn.Linear(4, 18), "out": nn.Linear(6, 2)}, torch.randn(N, 7, 4)))
def causal_dot_product_attention(net, x):
    q, k, v = net.qkv(x).unflatten(-1, (3, 2, 3)).permute(2, 0, 3, 1, 4)
    h = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return net.out(h.transpose(1, 2).flatten(2))


@case()
def encoder_layer_in_eval_mode() -> Setup:
    layer = nn.TransformerEncoderLayer(4, 2, 7, batch_first=True, activation="gelu")
    return regression(nn.Sequential(layer, nn.Linear(4, 3)), torch.randn(N, 6, 4))


@case(train=True)
def encoder_in_train_mode_without_dropout() -> Setup:
    layer = nn.TransformerEncoderLayer(4, 2, 7, dropout=0.0, batch_first=True, norm_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return regression(model, torch.randn(N, 6, 4))


@program(
    lambda: (
        {
            "tokens": nn.Embedding(9, 4),
            "positions": nn.Embedding(8, 4),
            "norm1": nn.LayerNorm(4),
            "qkv": nn.Linear(4, 12),
            "out": nn.Linear(4, 4),
            "norm2": nn.LayerNorm(4),
            "up": nn.Linear(4, 7),
            "down": nn.Linear(7, 4),
        },
        _ids(6),
    )
)
def language_model(net, ids):
    h = net.tokens(ids) + net.positions(torch.arange(ids.shape[1], device=ids.device))
    q, k, v = net.qkv(net.norm1(h)).chunk(3, -1)
    h = h + net.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))
    h = h + net.down(F.gelu(net.up(net.norm2(h))))
    return F.linear(h, net.tokens.weight).log_softmax(-1)


@program(lambda: ({"a": nn.LSTM(4, 3, batch_first=True)}, torch.randn(N, 6, 4)))
def lstm(net, x):
    return net.a(x)[0]


@program(lambda: ({"a": nn.GRU(4, 3, batch_first=True)}, torch.randn(N, 6, 4)))
def gru(net, x):
    return net.a(x)[0]


@program(lambda: ({"a": nn.Linear(4, 3), "norm": nn.RMSNorm(3)}, torch.randn(N, 6, 4)))
def rms_norm(net, x):
    return net.norm(net.a(x)).tanh()


@case()
def lstm_two_layers_bidirectional_projected() -> Setup:
    rnn = nn.LSTM(4, 6, num_layers=2, bidirectional=True, proj_size=3, batch_first=True)
    model = Net(
        lambda net, x: torch.cat([net.a(x)[0].tanh().flatten(1), _flat(net.a(x)[1])], 1), a=rnn
    )
    return regression(model, torch.randn(N, 7, 4))


def _flat(states: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return torch.cat([s.transpose(0, 1).flatten(1) for s in states], 1)


@program(
    lambda: (
        {"a": nn.LSTM(4, 3, batch_first=True), "h": param(1, 1, 3), "c": param(1, 1, 3)},
        torch.randn(N, 6, 4),
    )
)
def lstm_with_learnt_initial_state(net, x):
    h, c = (s.expand(-1, len(x), -1).contiguous() for s in (net.h, net.c))
    return net.a(x, (h, c))[0]


@case()
def embedding() -> Setup:
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 3), nn.Tanh())
    return regression(model, _ids(6))


@program(
    lambda: (
        {"rnn": nn.LSTM(3, 4, 2, batch_first=True), "head": nn.Linear(4, 2)},
        (torch.randn(N, 6, 3), torch.tensor([3, 6, 2, 5, 4])),
    )
)
def packed_sequences(net, x, lengths):
    packed = nn.utils.rnn.pack_padded_sequence(x, lengths.cpu(), True, enforce_sorted=False)
    states, _ = net.rnn(packed)
    out, _ = nn.utils.rnn.pad_packed_sequence(states, True, total_length=x.shape[1])
    return net.head(out)


@case()
def embedding_scaled_by_frequency() -> Setup:
    ids = _ids(N, 6, rows=4)
    return regression(nn.Sequential(nn.Embedding(4, 3, scale_grad_by_freq=True)), ids)


@case()
def sparse_embedding() -> Setup:
    return regression(nn.Sequential(nn.Embedding(9, 3, sparse=True)), _ids(N, 6))
