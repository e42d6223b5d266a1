"""Facts about the user's model, and the state that is restored after each forward pass."""
