"""Turn the rows of a published dataset into tensors, independent of any training framework."""
