"""The transform `adam` against steps that torch.optim makes, and states that do not fit."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import gradscope
from gradscope.blocks import DenseBlock, Gradients
from gradscope.errors import CheckpointError, SpecError
from gradscope.run import compute, prepare
from gradscope.sources.weights.optimizer import read_optimizer
from gradscope.stages.chain import bind
from gradscope.storage import open_file
from tests.run.test_pipeline import spec

LEARNING_RATE = 2.0**-8
Build = Callable[[nn.Module], torch.optim.Optimizer]


def by_decay(model: nn.Module) -> list[dict[str, Any]]:
    """Weights in one group, biases in another, as trainers make them."""
    every = list(model.parameters())
    return [
        {"params": [p for p in every if p.dim() > 1]},
        {"params": [p for p in every if p.dim() == 1], "weight_decay": 0.0, "betas": (0.5, 0.75)},
    ]


BUILDS: dict[str, Build] = {
    "Adam": lambda m: torch.optim.Adam(m.parameters(), lr=LEARNING_RATE),
    "other settings": lambda m: torch.optim.Adam(
        m.parameters(), lr=LEARNING_RATE, betas=(0.6, 0.7), eps=1e-3
    ),
    "amsgrad": lambda m: torch.optim.Adam(
        m.parameters(), lr=LEARNING_RATE, betas=(0.6, 0.5), amsgrad=True
    ),
    "AdamW": lambda m: torch.optim.AdamW(m.parameters(), lr=LEARNING_RATE, weight_decay=0.0),
    "names": lambda m: torch.optim.AdamW(
        reversed(list(m.named_parameters())), lr=LEARNING_RATE, weight_decay=0.0
    ),
    "groups": lambda m: torch.optim.AdamW(by_decay(m), lr=LEARNING_RATE, weight_decay=0.0),
}


def data(n: int = 6) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(5)
    made = [torch.randn(n, k, generator=draw, dtype=torch.float64) for k in (4, 3)]
    return made[0], made[1]


def trained(build: Build, steps: int = 4) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    optimizer = build(model)
    for k in range(steps):
        optimizer.zero_grad()
        x, y = data()
        loss = nn.functional.mse_loss(model(x * (1 + k)), y)
        loss.backward()
        optimizer.step()
    return model, optimizer


def saved(optimizer: torch.optim.Optimizer, folder: Path) -> Path:
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    return folder / "optimizer.pt"


def rows(model: nn.Module, chain: str) -> dict[str, np.ndarray]:
    """One row a sample, each computed by itself."""
    x, y = data()
    found = [
        gradscope.expectation(model, "mse", chain, a[None], b[None])
        for a, b in zip(x, y, strict=True)
    ]
    return {name: np.stack([one[name] for one in found]) for name in found[0]}


@pytest.mark.parametrize("name", BUILDS)
def test_the_step_that_torch_makes(name: str, tmp_path: Path) -> None:
    """The parameters move by the learning rate times T(g), for each sample's own gradient."""
    model, optimizer = trained(BUILDS[name])
    ours = rows(model, f"adam:state={saved(optimizer, tmp_path)},form=step")
    for i, (x, y) in enumerate(zip(*data(), strict=True)):
        moved, again = copy.deepcopy((model, optimizer))
        again.zero_grad()
        nn.functional.mse_loss(moved(x[None]), y[None]).backward()
        again.step()
        after = dict(moved.named_parameters())
        for own, before in model.named_parameters():
            step = ((before - after[own]) / LEARNING_RATE).detach().numpy()
            np.testing.assert_allclose(ours[own][i], step, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", BUILDS)
def test_scaled_by_the_second_moments(name: str, tmp_path: Path) -> None:
    model, optimizer = trained(BUILDS[name])
    ours = rows(model, f"adam:state={saved(optimizer, tmp_path)}")
    plain = rows(model, "mean")
    for group in optimizer.param_groups:
        for p in group["params"]:
            (own,) = (key for key, value in model.named_parameters() if value is p)
            kept = optimizer.state[p]
            v = kept["max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq"].numpy()
            corrected = v / (1 - group["betas"][1] ** 4)
            right = plain[own] / (np.sqrt(corrected) + group["eps"])
            np.testing.assert_allclose(ours[own], right, rtol=1e-12)


def test_in_a_run_and_in_a_checkpoint(tmp_path: Path) -> None:
    """The state is within a checkpoint; the file of a run says what it was."""
    asked = spec(samples=":20", transform=["identity"])
    model = prepare(asked).scope.problem.model
    optimizer = torch.optim.AdamW(model.parameters(), eps=1e-4)
    for p in model.parameters():
        p.grad = torch.ones_like(p) / 8
    optimizer.step()
    path = tmp_path / "training.pt"
    torch.save({"epoch": 3, "optimizer": optimizer.state_dict()}, path)
    chains = ["identity", f"adam:state={path}", f"mean | adam:state={path}", "mean"]
    compute(prepare(spec(samples=":20", transform=chains)), tmp_path / "o.h5")
    with open_file(tmp_path / "o.h5") as file:
        plain, scaled, after, mean = ({k: v[:] for k, v in chain.items()} for chain in file.chains)
        assert "training.pt" in file.run["digests"]["stages"]
    for name, values in plain.items():
        np.testing.assert_allclose(scaled[name], values / (1 / 8 + 1e-4), rtol=1e-9)
        np.testing.assert_allclose(after[name], mean[name] / (1 / 8 + 1e-4), rtol=1e-9)


def test_some_parameters_are_frozen(tmp_path: Path) -> None:
    """Those that the optimiser never updated are passed over."""

    def build(model: nn.Module) -> torch.optim.Optimizer:
        for p in model[0].parameters():
            p.requires_grad_(False)
        return torch.optim.Adam(model.parameters())

    model, optimizer = trained(build)
    ours = rows(model, f"adam:state={saved(optimizer, tmp_path)}")
    root = optimizer.state[model[2].bias]["exp_avg_sq"].numpy() / (1 - 0.999**4)
    right = rows(model, "mean")["2.bias"] / (np.sqrt(root) + 1e-8)
    np.testing.assert_allclose(ours["2.bias"], right, rtol=1e-12)


def chain_of(optimizer: torch.optim.Optimizer, folder: Path, **changes: Any) -> str:
    state = optimizer.state_dict()
    state["param_groups"][0] |= changes
    torch.save(state, folder / "optimizer.pt")
    return f"adam:state={folder / 'optimizer.pt'}"


def test_states_that_do_not_fit(tmp_path: Path) -> None:
    model, optimizer = trained(BUILDS["Adam"])
    more, fewer = (
        nn.Sequential(*layers).double()
        for layers in ((nn.Linear(4, 5), nn.Linear(5, 3), nn.Linear(3, 3)), (nn.Linear(4, 3),))
    )
    turned = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3)).double()
    chain = chain_of(optimizer, tmp_path)
    for other, what in (
        (more, "moments of 4 parameters .* here are 6"),
        (fewer, "moments of 4 parameters .* here are 2"),
        (turned, r"place of '0.weight' are of shape \(5, 4\), .* of \(3, 4\)"),
    ):
        with pytest.raises(CheckpointError, match=what) as caught:
            rows(other, chain)
        assert "optimizer.pt" in str(caught.value) and "named_parameters" in str(caught.value)
    named = chain_of(trained(BUILDS["names"])[1], tmp_path)
    with pytest.raises(CheckpointError, match=r"'1\.weight' is not in it"):
        rows(nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3)).double(), named)
    with pytest.raises(CheckpointError, match="maximises"):
        rows(model, chain_of(optimizer, tmp_path, maximize=True))
    model[0].weight.data = model[0].weight.data.to(torch.complex128)
    with pytest.raises(SpecError, match=r"'0\.weight' is complex"):
        chain = bind(chain_of(optimizer, tmp_path))
        chain.rows(Gradients({k: DenseBlock(p.data[None]) for k, p in model.named_parameters()}))


@pytest.mark.parametrize("kind", ["SGD", "NAdam", "RAdam", "Adamax", "RMSprop"])
def test_other_optimisers_are_refused(kind: str, tmp_path: Path) -> None:
    model, optimizer = trained(lambda m: getattr(torch.optim, kind)(m.parameters(), lr=1e-3))
    with pytest.raises(CheckpointError):
        rows(model, chain_of(optimizer, tmp_path))


class Evil:
    def __reduce__(self) -> Any:
        return (Path.touch, (Path("touched"),))


def test_what_is_no_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "o.pt"
    two = trained(BUILDS["Adam"])[1].state_dict()
    for content in ({"weight": torch.ones(3)}, {"a": two, "b": two}, {"optimizer": Evil()}):
        torch.save(content, path)
        with pytest.raises(CheckpointError, match=r"no states|2 states|more than t") as caught:
            read_optimizer(path)
        assert "Save optimizer.state_dict()" in str(caught.value)
    for broken in ({"params": None}, {"params": [0], "param_names": []}, {"params": [[]]}):
        torch.save(two | {"param_groups": [two["param_groups"][0] | broken]}, path)
        with pytest.raises(CheckpointError, match="damaged"):
            read_optimizer(path)
    path.write_bytes(pickle.dumps(two))
    with pytest.raises(CheckpointError, match="pickle"):
        read_optimizer(path)
    with pytest.raises(CheckpointError, match="no such file"):
        read_optimizer(tmp_path / "missing.pt")
    assert not Path("touched").exists()
    with pytest.raises(SpecError, match="form must be scaled or step"):
        gradscope.Scope(nn.Linear(2, 1), "mse").expectation(
            "adam:state=o.pt,form=x", torch.ones(1, 2), torch.ones(1, 1)
        )
