"""The sessions of the sample, in the order of their dates."""
