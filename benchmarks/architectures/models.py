"""What a user would write: factories. The other architectures need no code at all."""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

ATOMS, EDGES, KINDS = 24, 52, 119  # of a molecule: atoms, directed bonds; chemical elements
_WIDTH, _LAYERS, _TASKS = 300, 5, 12


def mobilenet_v3() -> nn.Module:
    """Torchvision's MobileNetV3-Large."""
    import torchvision

    model: nn.Module = torchvision.models.mobilenet_v3_large()
    return model


def unet() -> nn.Module:
    """Diffusers' U-Net of the diffusion model of CIFAR-10 (Ho et al. 2020)."""
    import diffusers

    down = ("DownBlock2D", "AttnDownBlock2D", "DownBlock2D", "DownBlock2D")
    model: nn.Module = diffusers.UNet2DModel(
        sample_size=32,
        block_out_channels=(128, 256, 256, 256),
        down_block_types=down,
        up_block_types=tuple(kind.replace("Down", "Up") for kind in reversed(down)),
    )
    return model


class Molecules(nn.Module):
    """A graph isomorphism network (Xu et al. 2019) of the size used for ogbg-mol*."""

    def __init__(self) -> None:
        super().__init__()
        from torch_geometric.nn import GINConv

        def layer() -> nn.Module:
            hidden = nn.Sequential(nn.Linear(_WIDTH, 2 * _WIDTH), nn.BatchNorm1d(2 * _WIDTH))
            convolution: nn.Module = GINConv(
                nn.Sequential(*hidden, nn.ReLU(), nn.Linear(2 * _WIDTH, _WIDTH)), train_eps=True
            )
            return convolution

        self.atoms = nn.Embedding(KINDS, _WIDTH)
        self.layers = nn.ModuleList(layer() for _ in range(_LAYERS))
        self.norms = nn.ModuleList(nn.BatchNorm1d(_WIDTH) for _ in range(_LAYERS))
        self.head = nn.Linear(_WIDTH, _TASKS)

    def forward(self, atoms: Tensor, bonds: Tensor) -> Tensor:
        """Map atoms (n, a) and bonds (n, 2, e), numbers of atoms, to logits (n, tasks)."""
        n, a = atoms.shape
        own = torch.arange(n, device=atoms.device)[:, None, None] * a
        edges = (bonds + own).transpose(0, 1).flatten(1)  # of one graph of all molecules
        x = self.atoms(atoms.flatten())
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + F.relu(norm(layer(x, edges)))
        pooled: Tensor = self.head(x.unflatten(0, (n, a)).mean(1))
        return pooled


def graph() -> nn.Module:
    """PyTorch Geometric's convolutions, over all molecules of a batch at once."""
    return Molecules()
