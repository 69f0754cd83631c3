"""Method "freedraft": n-gram drafts for every request, draft passes of the model where n-grams are poor."""

from freedraft.hybrid.options import NAME, SPEC

__all__ = ["NAME", "SPEC"]
