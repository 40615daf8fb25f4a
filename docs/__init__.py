"""Documents, and the renderer of the tables in them that come from code (`make docs`)."""
