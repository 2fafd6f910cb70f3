"""Attacks on the command line, on files and on the server, with counts of what happened. Run: make torture."""
