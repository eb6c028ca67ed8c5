"""The reference backend: plain torch, written for clarity, one subject per file."""
