"""The reference backend, one subject a file: plain torch, clear before fast."""
