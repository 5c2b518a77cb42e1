"""Speed benchmarks of ClusterEnv and its peers; `python -m benchmarks.peers.step` is the one to start with."""
