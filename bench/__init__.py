"""Benchmarks, one per file; `demo` is that of `make demo`, `lib` holds shared code."""
