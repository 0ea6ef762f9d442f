"""Experiments: each run writes a result file, and figures and tables are drawn from result files only."""
