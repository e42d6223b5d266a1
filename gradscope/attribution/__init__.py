"""Which training samples made the model answer so."""
