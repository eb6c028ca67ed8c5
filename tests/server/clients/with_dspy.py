"""dspy: a typed field by the JSON adapter, and by the chat adapter, which falls back on it.

dspy asks for a schema where its tables say that a model knows them. They know no model of a server of
one's own, but LM Studio's, which have this protocol.
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
