"""The learner's process: who the workers are, what they owe, and how their answers become one batch."""
