"""The transform `adam` against steps that torch.optim makes, and states that do not fit."""

import copy
import json
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
from gradscope.engine.chains import bind
from gradscope.errors import CheckpointError, SpecError
from gradscope.run import compute, prepare
from gradscope.sources.weights.optimizer import read_optimizer
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
    model = prepare(asked).session.problem.model
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


def square() -> nn.Module:
    """Two layers of equal shapes."""
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()


def parts(model: nn.Module, *names: str) -> list[dict[str, Any]]:
    """One group for each name: a layer's, or of all weights or all biases."""
    every = dict(model.named_parameters())
    return [{"params": [(k, p) for k, p in every.items() if name in k]} for name in names]


# what torch.optim.AdamW is given, in pairs of names and parameters
ORDERS: dict[str, Callable[[nn.Module], Any]] = {
    "the model's": lambda m: [*m.named_parameters()],
    "reversed": lambda m: [*m.named_parameters()][::-1],
    "head first": lambda m: parts(m, "2.", "0."),
    "layers": lambda m: parts(m, "0.", "2."),
    "decay": lambda m: parts(m, "weight", "bias"),
    "biases first": lambda m: parts(m, "bias", "weight"),
    "reversed in its groups": lambda m: [
        {"params": group["params"][::-1]} for group in parts(m, "weight", "bias")
    ],
    "frozen biases": lambda m: parts(m, "weight"),
    "frozen biases in it": lambda m: [
        (k, p.requires_grad_("weight" in k)) for k, p in m.named_parameters()
    ],
    "frozen layer": lambda m: parts(m, "2."),
}
IN_ORDER = {"the model's", "decay", "biases first", "frozen biases", "frozen biases in it"}


def unnamed(given: list[Any]) -> list[Any]:
    if isinstance(given[0], tuple):
        return [p for _, p in given]
    return [{"params": unnamed(group["params"])} for group in given]


def names_of(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[str]:
    names = {p: name for name, p in model.named_parameters()}
    return [names[p] for group in optimizer.param_groups for p in group["params"]]


def steps(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    draw = torch.Generator().manual_seed(6)
    for k in range(3):
        optimizer.zero_grad()
        x = torch.randn(6, 4, generator=draw, dtype=torch.float64) * (1 + k)
        model(x).square().sum().backward()
        optimizer.step()


def scaled(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The mean gradient divided by the root of the moments, each parameter's own."""
    x, _ = data()
    y = torch.zeros(len(x), 4, dtype=torch.float64)
    loss = (model(x) - y).square().mean(1).mean()
    owned = {k: p for k, p in model.named_parameters() if p.requires_grad}
    found = dict(zip(owned, torch.autograd.grad(loss, list(owned.values())), strict=True))
    return {
        k: g / ((optimizer.state[owned[k]]["exp_avg_sq"] / (1 - 0.999**3)).sqrt() + 1e-8)
        for k, g in found.items()
    }


def ours(model: nn.Module, chain: str) -> dict[str, Tensor]:
    x, _ = data()
    y = torch.zeros(len(x), 4, dtype=torch.float64)
    with gradscope.Scope(model, "mse") as scope:
        return scope.expectation(f"{chain} | mean", x, y)


def ordered(name: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model, trained by an optimiser without names; what it never updated is frozen."""
    model = square()
    optimizer = torch.optim.AdamW(unnamed(ORDERS[name](model)), lr=LEARNING_RATE)
    steps(model, optimizer)
    for p in model.parameters():
        p.requires_grad_(p in optimizer.state)
    return model, optimizer


@pytest.mark.parametrize("name", ORDERS)
def test_equal_shapes_without_names_are_refused(name: str, tmp_path: Path) -> None:
    model, optimizer = ordered(name)
    chain = f"adam:state={saved(optimizer, tmp_path)}"
    with pytest.raises(CheckpointError, match=r"'0.weight', '2.weight' have .*\(4, 4\)") as caught:
        ours(model, chain)
    assert all(w in str(caught.value) for w in ("names=FILE", "names=model", "named_parameters"))


@pytest.mark.parametrize("name", ORDERS)
def test_equal_shapes_with_names(name: str, tmp_path: Path) -> None:
    """Names that torch saves, or a list of them, give each parameter its own moments."""
    model = square()
    optimizer = torch.optim.AdamW(ORDERS[name](model), lr=LEARNING_RATE)
    steps(model, optimizer)
    for p in model.parameters():
        p.requires_grad_(p in optimizer.state)
    torch.testing.assert_close(
        ours(model, f"adam:state={saved(optimizer, tmp_path)}"), scaled(model, optimizer)
    )
    model, optimizer = ordered(name)
    (tmp_path / "names.json").write_text(json.dumps(names_of(optimizer, model)))
    chain = f"adam:state={saved(optimizer, tmp_path)},names={tmp_path / 'names.json'}"
    torch.testing.assert_close(ours(model, chain), scaled(model, optimizer))


@pytest.mark.parametrize("name", sorted(IN_ORDER | {"layers", "head first", "reversed"}))
def test_the_order_of_the_model(name: str, tmp_path: Path) -> None:
    """What the user says of the order is used where it leaves one assignment."""
    model, optimizer = ordered(name)
    chain = f"adam:state={saved(optimizer, tmp_path)},names=model"
    if name not in IN_ORDER:
        with pytest.raises(CheckpointError, match=r"of 2 groups|moments for"):
            ours(model, chain)
    else:
        torch.testing.assert_close(ours(model, chain), scaled(model, optimizer))


def test_a_group_that_was_added_later(tmp_path: Path) -> None:
    model = square()
    optimizer = torch.optim.Adam(parts(model, "2."), lr=LEARNING_RATE)
    steps(model, optimizer)
    optimizer.add_param_group(parts(model, "0.")[0])
    steps(model, optimizer)
    state = optimizer.state_dict()
    for group in state["param_groups"]:
        del group["param_names"]
    torch.save(state, tmp_path / "o.pt")
    for ending in ("", ",names=model"):
        with pytest.raises(CheckpointError, match=r"in several ways|of 2 groups"):
            ours(model, f"adam:state={tmp_path / 'o.pt'}{ending}")


@pytest.mark.parametrize("turned", [False, True])
def test_different_shapes_need_no_names(turned: bool, tmp_path: Path) -> None:
    """One assignment fits the shapes, whatever the order."""
    build: Build = lambda m: torch.optim.Adam(  # noqa: E731
        list(m.parameters())[:: -1 if turned else 1], lr=LEARNING_RATE
    )
    model, optimizer = trained(build)
    found = rows(model, f"adam:state={saved(optimizer, tmp_path)}")
    plain = rows(model, "mean")
    for name, p in model.named_parameters():
        root = np.sqrt(optimizer.state[p]["exp_avg_sq"].numpy() / (1 - 0.999**4))
        np.testing.assert_allclose(found[name], plain[name] / (root + 1e-8), rtol=1e-12)


def test_moments_of_a_parameter_that_is_not_selected(tmp_path: Path) -> None:
    """A shape that fits a selected parameter fits the frozen one as well."""
    model, optimizer = ordered("frozen layer")
    path = saved(optimizer, tmp_path)
    for p in model.parameters():
        p.requires_grad_(not p.requires_grad)
    x, y = data()
    for chain in (f"adam:state={path} | mean", f"mean | adam:state={path}"):
        with pytest.raises(CheckpointError, match="in several ways"):
            gradscope.expectation(model, "mse", chain, x, torch.zeros(len(y), 4).double())


def test_states_with_names_for_keys(tmp_path: Path) -> None:
    """State dicts of FSDP have names in the place of numbers."""
    model, optimizer = ordered("reversed")
    state = optimizer.state_dict()
    (group,), names = state["param_groups"], names_of(optimizer, model)
    keyed = {names[k]: v for k, v in state["state"].items()}
    torch.save({"state": keyed, "param_groups": [group | {"params": names}]}, tmp_path / "o.pt")
    found = ours(model, f"adam:state={tmp_path / 'o.pt'}")
    torch.testing.assert_close(found, scaled(model, optimizer))


def test_names_that_do_not_fit(tmp_path: Path) -> None:
    model, optimizer = ordered("the model's")
    path, names = saved(optimizer, tmp_path), tmp_path / "names.json"
    four = names_of(optimizer, model)
    for content, what in (
        ("no", "not JSON"),
        ("{}", "not a list of names"),
        ("[1]", "not a list of names"),
        (json.dumps(four[:3]), "3 names, .* has 4 parameters"),
        (json.dumps([*four[:3], four[0]]), "contain '0.weight' more than once"),
        (json.dumps([*four[:3], "other"]), "'2.bias' is not in the"),
        (json.dumps(four[::-1]), r"moments for '0.weight' have the shape \(4,\)"),
    ):
        names.write_text(content)
        with pytest.raises(CheckpointError, match=what):
            ours(model, f"adam:state={path},names={names}")
    with pytest.raises(CheckpointError, match=r"missing\.json"):
        ours(model, f"adam:state={path},names={tmp_path / 'missing.json'}")
    torch.save(trained(BUILDS["names"])[1].state_dict(), path)
    for given in (names, "model"):
        names.write_text(json.dumps(four))
        with pytest.raises(CheckpointError, match="already has names"):
            ours(model, f"adam:state={path},names={given}")


def test_two_parameters_of_one_name(tmp_path: Path) -> None:
    """An optimiser of two models may have a name twice."""
    model, other = square(), square()
    every = [{"params": [*m.named_parameters()]} for m in (model, other)]
    optimizer = torch.optim.Adam(every, lr=LEARNING_RATE)
    for m in (model, other):
        steps(m, optimizer)
    with pytest.raises(CheckpointError, match=r"contain '0\.weight', .* more than once"):
        ours(model, f"adam:state={saved(optimizer, tmp_path)}")


def test_states_that_do_not_fit(tmp_path: Path) -> None:
    model, optimizer = trained(BUILDS["Adam"])
    more, fewer = (
        nn.Sequential(*layers).double()
        for layers in ((nn.Linear(4, 5), nn.Linear(5, 3), nn.Linear(3, 3)), (nn.Linear(4, 3),))
    )
    turned = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3)).double()
    chain = chain_of(optimizer, tmp_path)
    for other, what in (
        (more, "moments for 4 of .* 6 parameters are selected"),
        (fewer, "moments for 4 of .* 2 parameters are selected"),
        (turned, r"moments for '0.weight' have the shape \(5, 4\), .* shape \(3, 4\)"),
    ):
        with pytest.raises(CheckpointError, match=what) as caught:
            rows(other, chain)
        assert "optimizer.pt" in str(caught.value) and "named_parameters" in str(caught.value)
    named = chain_of(trained(BUILDS["names"])[1], tmp_path)
    with pytest.raises(CheckpointError, match=r"'1\.weight' is not in the"):
        rows(nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3)).double(), named)
    with pytest.raises(CheckpointError, match="maximize=True"):
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
        with pytest.raises(CheckpointError, match=r"no states|2 states|not tensors") as caught:
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
