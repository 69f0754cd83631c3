"""Suffix arrays in memory: sub-indices, runs that documents are merged into, what a batch sees of them, look-ups."""
