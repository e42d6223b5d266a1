"""What happens to gradients: transforms, reducers, losses, labels and their chains."""
