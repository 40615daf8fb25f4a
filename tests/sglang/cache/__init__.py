"""The cache of the SGLang shim, over SGLang's own pools, beside SGLang's own caches."""
