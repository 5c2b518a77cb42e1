"""Studies of ClusterEnv itself: start-up, streams, links, traffic, scale, where the time goes."""
