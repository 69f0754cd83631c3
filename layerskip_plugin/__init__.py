"""Layer skip: drafting with the target's own layers, some of them left out."""
