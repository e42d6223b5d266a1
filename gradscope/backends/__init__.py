"""The backends, which compute every sample's gradient."""

from gradscope.backends import expand, hooks, loop, vmap  # noqa: F401  each registers itself
