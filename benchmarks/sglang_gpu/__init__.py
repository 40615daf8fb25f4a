"""One real pair of SGLang engines on a GPU: what is restored is what was computed, and how soon."""
