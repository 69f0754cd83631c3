"""Benchmarks: each file here is one, `demo` is the one of `make demo`, `lib` holds what they share."""
