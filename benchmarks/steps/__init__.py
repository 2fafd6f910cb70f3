"""Where accuracy is lost over many steps: an oracle ladder, candidates, and compaction. See `__main__`."""
