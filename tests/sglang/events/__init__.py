"""Our KV events against SGLang's own code."""
