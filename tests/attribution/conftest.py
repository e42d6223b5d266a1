"""Running the command line in this process, as tests of commands do."""

from tests.cli.conftest import gradscope as command  # noqa: F401
