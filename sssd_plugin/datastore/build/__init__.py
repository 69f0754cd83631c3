"""Building a datastore: inputs, sorting in bounded memory, checkpoints, and atomic publishing."""
