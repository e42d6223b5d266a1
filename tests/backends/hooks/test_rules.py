"""Every node rule against the masked fallback, at every place of the case table where it fires."""

from collections.abc import Iterator

import pytest
import torch

from gradscope.backends import hooks as package
from gradscope.backends.hooks import hooks
from gradscope.backends.hooks.rules import Site, masked, node_rules, recurrent
from gradscope.blocks import Block
from gradscope.core.batch import Batch
from gradscope.core.problem import Problem
from gradscope.errors import RefusedError
from tests.cases import INDEPENDENT

FIRED: dict[str, int] = {}


@pytest.fixture(scope="module", autouse=True)
def judged() -> Iterator[None]:
    """Run every case with each rule's block compared with the masked fallback's."""
    original = package._block

    def compared(kind: str, site: Site) -> Block:
        block = original(kind, site)
        rule = node_rules.find(kind)
        if rule is not None and rule(site) is not None:
            torch.testing.assert_close(block.dense(), masked(site).dense(), rtol=1e-9, atol=1e-11)
            assert block.shape == site.shape
            FIRED[kind] = FIRED.get(kind, 0) + 1
        return block

    package._block = compared
    try:
        for case in INDEPENDENT:
            setup = case.build()
            try:
                with hooks(Problem.of(setup.model, setup.loss)) as evaluate:
                    evaluate(Batch.of(setup.inputs, setup.targets))
            except RefusedError:
                continue
        yield
    finally:
        package._block = original


# fused LSTM and large linear layers are of float32 only: see test_recurrent.py and test_linear.py
@pytest.mark.parametrize(
    "name", sorted({*node_rules.names()} - {recurrent.KIND, "GradscopeWeightBackward"})
)
def test_the_rule_fires_and_equals_the_fallback(name: str) -> None:
    assert FIRED.get(name, 0) > 0
