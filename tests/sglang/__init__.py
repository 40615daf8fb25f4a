"""Tests against real SGLang; they run inside its environments and are skipped elsewhere."""
