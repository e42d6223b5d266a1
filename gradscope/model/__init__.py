"""What is known of the user's model, and what is restored after each forward pass."""
