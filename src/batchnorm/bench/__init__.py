"""Benchmarks, one file a question; they run on a user's machine as they ran here."""
