"""What a problem, a batch and a chain are, and how names are looked up."""
