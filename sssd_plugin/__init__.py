"""SSSD: drafting from n-grams of the prompt, the output so far and a suffix-array datastore."""

import freedraft  # noqa: F401  (before anything is loaded from numba's cache)
