"""The adapter to vLLM: method names, runner hooks, fixes. Independent of drafters."""
