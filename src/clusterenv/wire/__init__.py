"""What is sent between head and workers, and the transports that carry it."""
