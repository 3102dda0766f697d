"""Other RL engines behind one small interface. Each has a folder, and shared modules are next to these."""
