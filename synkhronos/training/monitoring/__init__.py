"""Measurement of training: validation metrics, reports, records, and early stopping."""
