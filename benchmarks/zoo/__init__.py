"""Everything that can be built from a configuration, against a batch of one in float64."""
