"""Datastores on disk: their format, checksums and audit, opening one, and copying one from object storage."""
