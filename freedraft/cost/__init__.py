"""What a step costs and what its drafts bring: how much to draft is decided here."""
