"""Session logs of coding agents to turns and trace states."""
