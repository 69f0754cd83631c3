"""The live datastore: outputs of finished requests, in memory and in a log on disk or at a URL."""
