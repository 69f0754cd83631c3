"""The adapter to vLLM: method names, the runner hook, fixes. It knows no drafter."""
