"""From the rows of a published dataset to tensors. Nothing here knows a framework."""
