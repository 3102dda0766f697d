"""What people see of a data root: its status, figures, page, and the life of one state."""
