"""A training service: LoRA adapters of one base model, trained and sampled over HTTP by the API of
the public client `tinker`. Several clients at once, each with an adapter and an optimizer of its
own; what one of them gets does not depend on the others.
"""
