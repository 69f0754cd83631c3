"""The demo: its model, its datastore, its two servers, and the server that stays up."""
