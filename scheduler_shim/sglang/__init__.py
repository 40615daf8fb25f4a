"""The SGLang plugin: an unmodified SGLang scheduler uses treecored through this package.

The only place of the project that imports SGLang or torch beside the GPU's own parts.
"""
