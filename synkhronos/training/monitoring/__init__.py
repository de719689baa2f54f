"""Measurement of a training: validation metrics, reports, records, and the early stop."""
