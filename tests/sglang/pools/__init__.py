"""Names, allocator, memory and fingerprint of the SGLang shim, over SGLang's own classes."""
