"""What every test runs under."""

import os

import pytest
from hypothesis import settings

settings.register_profile("ci", derandomize=True)  # the same examples on every run of a commit
if os.environ.get("CI"):
    settings.load_profile("ci")


def pytest_configure(config: pytest.Config) -> None:
    """Let pass what torch itself warns about in models that are meant as they are."""
    for text in (
        "Using padding='same' with even kernel lengths:UserWarning",
        "`torch.jit.script` is deprecated:DeprecationWarning",
    ):
        config.addinivalue_line("filterwarnings", f"ignore:{text}")
