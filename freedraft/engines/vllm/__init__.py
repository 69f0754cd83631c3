"""The seam to vLLM: method names, the runner hook, version-gated fixes. It knows no drafter."""
