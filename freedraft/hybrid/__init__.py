"""Method "hybrid": n-gram drafts for every request, draft passes of the model where n-grams are poor."""

from freedraft.hybrid.options import SPEC

__all__ = ["SPEC"]
