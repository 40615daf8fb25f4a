"""KV events: who has what, told to routers and viewers in SGLang's own wire format."""
