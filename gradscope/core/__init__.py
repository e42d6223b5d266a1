"""Floor 1: what a problem, a batch and a chain are, and how names are looked up."""
