"""What travels between head and workers, and the transports it travels on."""
