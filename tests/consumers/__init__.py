"""KV events read by programs that nobody here wrote: a router's indexer and a viewer."""
