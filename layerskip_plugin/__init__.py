"""Layer skipping: drafts from the target's own layers, some of them skipped."""
