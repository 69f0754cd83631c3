"""Building a datastore: inputs, sorting in bounded memory, and atomic publishing."""
