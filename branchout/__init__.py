"""Branchout adds classes to a trained image classifier without making it forget the old ones."""

__version__ = "0.1.0"
