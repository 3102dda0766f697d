"""Loss functions. Tensors in, scalar out; nothing here knows a framework."""
