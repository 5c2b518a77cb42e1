"""Recording: rollouts go to disk as they are made, and become a Minari dataset of whole episodes."""
