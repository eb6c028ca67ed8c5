"""dspy: a typed field through the JSON adapter, and through the chat adapter that falls back on it.

dspy requests a schema only for models in its tables. The tables have no self-hosted models except
LM Studio's, which use this protocol.
"""
# pyright: reportMissingImports=false

import dspy
from asked import MODEL, TEXT, URL, Pet, tell


class Told(dspy.Signature):
    """Which pet is it?"""

    text: str = dspy.InputField()
    pet: Pet = dspy.OutputField()


lm = dspy.LM(
    f"lm_studio/{MODEL}",
    api_base=f"{URL}/v1",
    api_key="none",
    max_tokens=300,
    cache=False,
    num_retries=0,
)


def predicted(adapter: dspy.Adapter) -> Pet:
    with dspy.context(lm=lm, adapter=adapter):
        return dspy.Predict(Told)(text=TEXT).pet


tell(json=predicted(dspy.JSONAdapter()), chat=predicted(dspy.ChatAdapter()))
