"""Evaluation with proof: a session, a pass over batches, the certificate and its audits."""
