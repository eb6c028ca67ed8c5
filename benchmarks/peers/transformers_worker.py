"""`generate` of transformers on a CPU: `python -m benchmarks.peers.transformers_worker SETTING`.

The setting is JSON: model, dtype, threads, experts. Requests of one shape form a batch. Batches run
one after another, because there are no batches of several lengths without padding. A prompt prefix
shared by several requests is computed for each of them.
"""

import json
import sys
import time
from typing import Any

from benchmarks.peers.channel import open_channel, serve


def main() -> None:
    answers = open_channel()
    setting = json.loads(sys.argv[1])
    import torch
    import transformers
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(setting["threads"])
    chosen = {"experts_implementation": setting["experts"]} if setting["experts"] else {}
    model: Any = AutoModelForCausalLM.from_pretrained(
        setting["model"], dtype=getattr(torch, setting["dtype"]), **chosen
    ).eval()
    settings = model.generation_config
    settings.eos_token_id, settings.bos_token_id, settings.pad_token_id = None, None, 0

    def answer(question: dict[str, Any]) -> dict[str, Any]:
        batches: dict[tuple[int, int], list[list[int]]] = {}
        for prompt, length, n in question["requests"]:
            batches.setdefault((len(prompt), length), []).extend([prompt] * n)
        began, tokens = time.perf_counter(), 0
        for (_, length), prompts in batches.items():
            ids = torch.tensor(prompts)
            made = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=length,
                do_sample=True,
                **{"temperature": 1.0, "top_k": 0, **question["sampling"]},
            )
            tokens += made[:, ids.shape[1] :].numel()
        return {"seconds": time.perf_counter() - began, "tokens": tokens}

    version = f"{transformers.__version__}, torch {torch.__version__}"
    serve(answers, answer, {"version": version})


if __name__ == "__main__":
    main()
