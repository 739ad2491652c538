"""Benchmarks, run by `make bench`: ratios within one run; nothing here passes or fails."""
