"""Run replicas on this machine, as Hugging Face Jobs, or in Modal sandboxes."""
