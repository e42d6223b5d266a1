"""PyTorch Geometric: every convolution and basic model, over the graphs of a batch at once."""

import inspect
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.zoo.groups.inputs import quiet, required, runnable
from benchmarks.zoo.libraries import load
from benchmarks.zoo.subject import NotBuiltError, Subject, shaken

NODES, EDGES, WIDTH, OUT = 6, 14, 8, 8
_LEFT_OUT = ("CuGraph", "Fused", "WLConv", "Hetero", "HANConv", "HGTConv")
_MODELS = (
    "GCN", "GraphSAGE", "GIN", "GAT", "PNA", "EdgeCNN", "MLP", "DeepGCNLayer", "JumpingKnowledge",
    "GraphUNet", "SchNet", "DimeNet", "DimeNetPlusPlus", "LINKX", "AttentiveFP", "RECT_L",
    "LightGCN", "GPSConv", "ARLinkPredictor", "PolyAttention", "SGFormer", "Polynormer",
)  # fmt: skip


def names(heads: bool = False, wanted: Any = None) -> list[str]:
    """Return the convolutions, pooling operators and models."""
    nn_ = load("torch_geometric").nn
    found = [n for n in nn_.conv.__all__ if not n.startswith(_LEFT_OUT)]
    found += [n for n in _MODELS if hasattr(nn_, n)]
    return found + [f"norm.{n}" for n in nn_.norm.__all__]


class Graphs(nn.Module):
    """A layer on one graph that joins the graphs of a batch.

    Args:
        layer: A layer of PyTorch Geometric.
        keys: Names of the arguments that the layer gets.
    """

    def __init__(self, layer: nn.Module, keys: list[str]) -> None:
        super().__init__()
        self.lift = nn.Linear(WIDTH, WIDTH)
        self.layer = layer
        self.keys = keys

    def forward(self, x: Tensor, edges: Tensor, features: Tensor, position: Tensor) -> Tensor:
        """Map nodes (n, v, width), edges (n, 2, e), and features (n, e, width) to (n, v, out)."""
        n, v, _ = x.shape
        start = v * torch.arange(n, device=x.device)
        joined = (edges + start[:, None, None]).transpose(0, 1).flatten(1)
        flat = self.lift(x).flatten(0, 1)
        given = {
            "x": flat,
            "x_0": flat.sin(),
            "edge_index": joined,
            "pos_edge_index": joined,
            "neg_edge_index": joined.flip(0),
            "hyperedge_index": joined,
            "edge_attr": features.flatten(0, 1),
            "edge_weight": features[..., 0].flatten().sigmoid(),
            "edge_type": (features[..., 1] > 0).long().flatten(),
            "node_type": (x[..., 0] > 0).long().flatten(),
            "pos": position.flatten(0, 1),
            "normal": nn.functional.normalize(position.flatten(0, 1), dim=-1),
            "batch": torch.arange(n, device=x.device).repeat_interleave(v),
            "z": (x[..., 0] * 3).abs().long().flatten() + 1,
        }
        found = self.layer(**{key: given[key] for key in self.keys})
        out: Tensor = found[0] if isinstance(found, tuple) else found
        return out.unflatten(0, (n, v)) if len(out) == n * v else out


def build(name: str) -> Subject:
    """Return a layer or model between a linear layer and the batch."""
    nn_ = load("torch_geometric").nn
    kind = getattr(nn_.norm if name.startswith("norm.") else nn_, name.removeprefix("norm."))
    torch.manual_seed(0)
    with quiet():
        layer = kind(**_arguments(kind, name))
    reasons = []
    for keys in _keys(layer):
        model = shaken(Graphs(layer, keys))
        try:
            return Subject(model, runnable(model, [_inputs]))
        except NotBuiltError as error:
            reasons.append(f"{keys}: {error}")
    raise NotBuiltError("; ".join(reasons))


def _keys(layer: nn.Module) -> Iterator[list[str]]:
    """Yield lists of arguments: required ones with edge features, then required ones alone."""
    known = list(inspect.signature(layer.forward).parameters)
    needed = required(layer.forward)
    for more in (["edge_attr"], ["edge_weight"], ["edge_type"], ["batch"], []):
        if all(key in known for key in more):
            yield list(dict.fromkeys([*needed, *more]))


def _inputs(seed: int, n: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(1000 + seed)

    def one() -> tuple[Tensor, ...]:
        edges = torch.randint(0, NODES, (2, EDGES), generator=generator)
        ring = torch.arange(NODES)
        edges[:, :NODES] = torch.stack([ring, ring.roll(1)])  # each node has a neighbour
        return (
            torch.randn(NODES, WIDTH, generator=generator),
            edges,
            torch.randn(EDGES, WIDTH, generator=generator).sigmoid(),
            torch.randn(NODES, 3, generator=generator),
        )

    return tuple(map(torch.stack, zip(*(one() for _ in range(n)), strict=True)))


def _mlp(*widths: int) -> nn.Module:
    layers: list[nn.Module] = []
    for a, b in pairwise(widths):
        layers += [nn.Linear(a, b), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def _arguments(kind: Any, name: str) -> dict[str, Any]:
    nn_ = load("torch_geometric").nn
    known: dict[str, Any] = {
        "in_channels": WIDTH, "out_channels": OUT, "channels": WIDTH, "hidden_channels": 8,
        "edge_dim": WIDTH, "num_layers": 2, "K": 2, "alpha": 0.3, "num_relations": 2, "heads": 2,
        "dim": WIDTH, "kernel_size": 2, "first_aggr": True, "filter_size": 2, "k": 2,
        "space_dimensions": 2, "propagate_dimensions": 3, "num_node_types": 2, "num_edge_types": 2,
        "edge_type_emb_dim": 3, "edge_attr_emb_dim": 4, "deg": torch.tensor([0, 2, 3, 1]),
        "aggregators": ["mean", "max"], "scalers": ["identity", "amplification"],
        "nn": _mlp(WIDTH, 8, OUT), "conv": nn_.GCNConv(WIDTH, OUT), "num_nodes": NODES, "depth": 2,
        "mlp_h": _mlp(WIDTH, 3), "mlp_f": _mlp(WIDTH + 3, 8), "mlp_g": _mlp(8, WIDTH),
        "num_timesteps": 2, "mode": "cat", "embedding_dim": 8, "in_edge_channels": WIDTH,
        "local_nn": _mlp(WIDTH + 3, 8), "global_nn": _mlp(8, OUT), "groups": 2,
    }  # fmt: skip
    special: dict[str, dict[str, Any]] = {
        "EdgeConv": {"nn": _mlp(2 * WIDTH, 8, OUT)},
        "DynamicEdgeConv": {"nn": _mlp(2 * WIDTH, 8, OUT)},
        "NNConv": {"nn": _mlp(WIDTH, WIDTH * OUT)},
        "PPFConv": {"local_nn": _mlp(WIDTH + 4, 8)},
        "EGConv": {"aggregators": ["mean", "sum"], "num_heads": 2},
        "CGConv": {"dim": WIDTH},
        "XConv": {"dim": 3, "kernel_size": 3},
        "GMMConv": {"dim": WIDTH, "kernel_size": 2},
        "SplineConv": {"dim": WIDTH, "kernel_size": 2},
        "SignedConv": {"first_aggr": True},
        "FiLMConv": {"nn": None},
        "GPSConv": {"conv": nn_.GCNConv(WIDTH, WIDTH), "heads": 2},
        "AntiSymmetricConv": {},
        "GATConv": {"heads": 2}, "GATv2Conv": {"heads": 2}, "TransformerConv": {"heads": 2},
    }  # fmt: skip
    mine = known | special.get(name, {})
    parameters = inspect.signature(kind.__init__).parameters
    needed = [key for key in required(kind.__init__) if key in mine]
    extra = [key for key in ("edge_dim", "local_nn", "global_nn") if key in parameters]
    extra += [key for key in special.get(name, {}) if key in parameters]
    return {key: mine[key] for key in dict.fromkeys(needed + extra) if mine[key] is not None}
