"""The plugin and its hooks on the real classes of SGLang."""
