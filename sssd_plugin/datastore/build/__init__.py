"""Building a datastore: inputs, sorting in bounded memory, checkpoints of a build, and its atomic publishing."""
