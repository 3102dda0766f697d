"""The three channels on VeRL. Only this package imports `verl`, which needs its own environment."""
