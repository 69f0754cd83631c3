"""Suffix arrays in memory: sub-indices, merged runs of documents, views of a batch, look-ups."""
