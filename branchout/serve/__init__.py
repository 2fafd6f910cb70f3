"""The local page and its HTTP API. It needs the extra `serve`; nothing here is imported before it is asked for."""
