"""Every other row of the tables: one file per idea, one function each."""
