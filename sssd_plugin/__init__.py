"""SSSD: drafting from n-grams of the prompt, the output so far and a suffix-array datastore."""
