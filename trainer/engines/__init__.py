"""Other RL engines behind one small interface: a folder each, beside what several of them share."""
