"""What a head costs with 8 to 1,024 workers: `python -m benchmarks.studies.scale`."""
