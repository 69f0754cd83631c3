"""The demo: its model, its datastore, its two servers, and a server that keeps running."""
