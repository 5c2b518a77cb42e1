"""One start in a fresh interpreter, `python -m benchmarks.studies.startup_probe WAY`: prints how long it takes.

Nothing is imported before the clock runs but what reads the clock.
"""

import sys
import time

NUM_ENVS = 64
NUM_WORKERS = 2


def main(way: str) -> None:
    """Start, reset and close once; the way is "shm", "zmq" or "async" (Gymnasium's AsyncVectorEnv)."""
    began = time.perf_counter()
    if way == "async":
        import gymnasium

        envs = gymnasium.make_vec("CartPole-v1", num_envs=NUM_ENVS, vectorization_mode="async")
    else:
        from clusterenv import ClusterEnv, Network

        envs = ClusterEnv("CartPole-v1", NUM_ENVS, num_workers=NUM_WORKERS, network=Network(transport=way))
    envs.reset(seed=0)
    ready = time.perf_counter()
    envs.close()
    print(ready - began, time.perf_counter() - ready)


if __name__ == "__main__":
    main(sys.argv[1])
