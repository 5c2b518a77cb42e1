"""Speed benchmarks of ClusterEnv and its peers; `python -m benchmarks.step` is the one to start with."""
