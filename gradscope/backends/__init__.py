"""The ways to get every sample's gradient."""

from gradscope.backends import expand, hooks, loop, vmap  # noqa: F401  each registers itself
