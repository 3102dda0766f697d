"""Pages and tables of the documentation that are made from the code; not part of the wheel."""
