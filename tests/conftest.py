"""What every test runs under."""

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Let pass what torch itself warns about in models that are meant as they are."""
    for text in (
        "Using padding='same' with even kernel lengths:UserWarning",
        "`torch.jit.script` is deprecated:DeprecationWarning",
    ):
        config.addinivalue_line("filterwarnings", f"ignore:{text}")
