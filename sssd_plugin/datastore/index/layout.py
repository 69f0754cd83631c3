"""Constants of the arrays of a `SubIndex`."""

import numpy as np

SEPARATOR = -1
"""Stands after every document. Below every token id, so it sorts first; never a candidate, so no draft crosses it."""

PAD = 32
"""Separators after the last document: compiled code may look this far beyond any suffix start, unchecked."""

PADDING = np.full(PAD, SEPARATOR, np.int32)

SPARSE_STEP = 16
"""Suffixes per entry of the sparse index: one cache line of the suffix array."""
