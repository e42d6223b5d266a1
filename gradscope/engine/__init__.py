"""Evaluation with proof: the session, passes over batches, the certificate and audits."""
