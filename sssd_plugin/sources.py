"""Where draft tokens come from, by number."""

SOURCES = "request", "prediction", "running", "learnt", "datastore", "other"
REQUEST, PREDICTION, RUNNING, LEARNT, DATASTORE, OTHER = range(len(SOURCES))
