"""A training service: train and sample LoRA adapters of one base model over HTTP, with the API of
the public client `tinker`. Several clients can connect at once, each with its own adapter and
optimizer. A client's results do not depend on other clients.
"""
