"""Reports from result files: README's tables, Figure 1, and an HTML page that compares runs."""
