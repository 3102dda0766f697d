"""Where replicas run: on this machine, as Hugging Face Jobs, in Modal sandboxes."""
