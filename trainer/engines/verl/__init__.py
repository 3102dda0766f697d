"""The three channels on VeRL: the only room that imports `verl`, in an environment of its own."""
