"""Observers of a running cache: counts over time, the miss-ratio curve, traffic recordings, JSON logs."""
