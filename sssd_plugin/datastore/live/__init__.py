"""The live datastore: what finished requests wrote, in memory and in an append-only log on disk."""
