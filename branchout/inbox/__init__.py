"""The inbox: a folder in which new photos arrive, decisions about them, and the runs that add them to a model."""
