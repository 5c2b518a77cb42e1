"""The remote process that hosts a shard of the environments."""
