"""The shim without SGLang: its queue, its loop and its cache are a miniature (rig.py)."""
