"""The learner's process: tracks the workers and the answers they owe, and merges those answers into one batch."""
