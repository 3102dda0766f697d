"""The outer loop: replicas that share nothing but an object store. See `trainer.diloco` for its names."""
