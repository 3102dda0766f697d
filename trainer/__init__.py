"""Three-channel training on a published preference dataset: losses, data, outer loop, adapters."""
