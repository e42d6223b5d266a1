"""Models whose later batches are unlike the first."""
