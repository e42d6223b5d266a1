"""What init reads in training scripts: the model, its arguments and its loss."""
