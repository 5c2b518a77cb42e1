"""Recipes: other libraries' learners on a ClusterEnv, in short. docs/how-to/learners.md says what to install."""
