"""Use the service at URL `sys.argv[1]` with the client `tinker` on the base model `sys.argv[2]`,
and print the results as one line of JSON. Runs in a separate environment.
"""

import json
import os
import sys
from typing import Any

import numpy as np
import tinker  # pyright: ignore[reportMissingImports]
import torch
from tinker import types  # pyright: ignore[reportMissingImports]
from tinker_cookbook import weights  # pyright: ignore[reportMissingImports]

QUESTION = "What is 2 + 3?"


def datum(tokens: list[int], **inputs: Any) -> types.Datum:
    """Return a sequence with loss inputs. The prompt has weight 0 if the loss takes weights."""
    fields = {"target_tokens": np.array(tokens[1:]), **inputs}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=fields)


def failure(future: Any) -> str:
    """Return a future's error with the category that the client reads."""
    try:
        future.result()
    except tinker.TinkerError as problem:
        return f"{getattr(problem, 'category', problem.__class__.__name__)}: {problem}"
    return ""


def train(client: Any, tokenizer: Any, steps: int) -> list[float]:
    """Train with supervision and return the losses."""
    tokens = tokenizer.encode("Question: " + QUESTION + "\nAnswer: 5.")
    losses = []
    for _ in range(steps):
        weights = np.ones(len(tokens) - 1, np.float32)
        done = client.forward_backward([datum(tokens, weights=weights)], "cross_entropy")
        step = client.optim_step(types.AdamParams(learning_rate=1e-3))
        losses.append(done.result().metrics["loss:sum"])
        step.result()
    return losses


def sampled(client: Any, tokenizer: Any, seed: int) -> dict[str, Any]:
    """Return samples of the current model with the model's own scores of their tokens."""
    sampler = client.save_weights_and_get_sampling_client().result()
    prompt = tokenizer.encode("Question: " + QUESTION + "\nAnswer:")
    params = types.SamplingParams(max_tokens=8, seed=seed, temperature=1.0)
    asked = types.ModelInput.from_ints(prompt)
    answer = sampler.sample(
        asked, 2, params, include_prompt_logprobs=True, topk_prompt_logprobs=3
    ).result()
    rows = []
    for sequence in answer.sequences:
        tokens = prompt + sequence.tokens
        forward = client.forward([datum(tokens)], "cross_entropy").result()
        rows.append(
            {
                "sampler": sequence.logprobs,
                "trainer": forward.loss_fn_outputs[0]["logprobs"].tolist()[len(prompt) - 1 :],
                "prompt": answer.prompt_logprobs[1:],
                "trainer_prompt": forward.loss_fn_outputs[0]["logprobs"].tolist()[
                    : len(prompt) - 1
                ],
                "computed": sampler.compute_logprobs(types.ModelInput.from_ints(tokens)).result()[
                    len(prompt) :
                ],
                "tokens": sequence.tokens,
            }
        )
    again = sampler.sample(asked, 2, params).result()
    return {
        "rows": rows,
        "again": [each.tokens for each in again.sequences],
        "top": [len(each or ()) for each in answer.topk_prompt_logprobs],
    }


def policy_gradient(client: Any, sample: dict[str, Any], prompt: list[int]) -> dict[str, float]:
    """Return the loss sum of one batch for each loss function."""
    results = {}
    for name in ("importance_sampling", "ppo", "cispo", "dro", "gspo"):
        data = []
        for row, advantage in zip(sample["rows"], (1.0, -1.0), strict=True):
            padding = [0.0] * (len(prompt) - 1)
            inputs = {
                "logprobs": np.array(padding + row["sampler"], np.float32),
                "advantages": np.array(padding + [advantage] * len(row["tokens"]), np.float32),
            }
            if name == "gspo":
                mask = padding + [1.0] * len(row["tokens"])
                inputs["sequence_ratio_mask"] = np.array(mask, np.float32)
            data.append(datum(prompt + row["tokens"], **inputs))
        results[name] = client.forward_backward(data, name).result().metrics["loss:sum"]
    return results


def columns(client: Any, tokenizer: Any) -> dict[str, Any]:
    """Return three targets per token, mostly padding, as torch tensors. The client sends them
    sparse.
    """
    tokens = tokenizer.encode("Question: " + QUESTION + "\nAnswer:")
    targets = torch.zeros(len(tokens), 3, dtype=torch.int64)
    weights = torch.zeros(len(tokens), 3)
    targets[-1], weights[-1] = torch.tensor([5, 6, 7]), torch.tensor([0.5, 0.25, 0.25])
    inputs = {"target_tokens": targets, "weights": weights}
    many = types.Datum(model_input=types.ModelInput.from_ints(tokens), loss_fn_inputs=inputs)
    result = client.forward([many, datum(tokens)], "cross_entropy").result()
    found = [output["logprobs"].to_numpy() for output in result.loss_fn_outputs]
    single = [
        client.forward([datum([*tokens, token])], "cross_entropy")
        .result()
        .loss_fn_outputs[0]["logprobs"]
        .tolist()[-1]
        for token in (5, 6, 7)
    ]
    sparse = many.loss_fn_inputs["target_tokens"].sparse_crow_indices is not None
    shapes = [list(each.shape) for each in found]
    return {"sparse": sparse, "shapes": shapes, "last": found[0][-1].tolist(), "single": single}


def main() -> None:
    """Run all parts and print their results."""
    url, base = sys.argv[1:3]
    with tinker.ServiceClient(base_url=url, api_key="tml-test") as service:
        client = service.create_lora_training_client(base, rank=8, seed=1).result()
        tokenizer = client.get_tokenizer()
        found: dict[str, Any] = {"losses": train(client, tokenizer, 3)}
        found["sampled"] = sampled(client, tokenizer, 7)
        prompt = tokenizer.encode("Question: " + QUESTION + "\nAnswer:")
        found["columns"] = columns(client, tokenizer)
        found["policy"] = policy_gradient(client, found["sampled"], prompt)
        client.optim_step(types.AdamParams(learning_rate=1e-3)).result()

        def custom(data: Any, logprobs: Any) -> Any:
            return sum((each**2).sum() for each in logprobs), {"mine": 1.0}

        found["custom"] = client.forward_backward_custom([datum(prompt)], custom).result().metrics
        client.optim_step(types.AdamParams(learning_rate=1e-3, grad_clip_norm=0.1)).result()

        path = client.save_state("half").result().path
        found["rest"] = [train(client, tokenizer, 2)]
        resumed = service.create_training_client_from_state_with_optimizer(path).result()
        found["rest"].append(train(resumed, tokenizer, 2))
        rest = tinker.RestClient(base_url=url, api_key="tml-test")
        found["rank"] = rest.get_weights_info_by_tinker_path(path).result().lora_rank
        found["paths"] = [
            each.tinker_path == path for each in rest.list_user_checkpoints().result().checkpoints
        ]
        try:
            rest.unpublish_checkpoint_from_tinker_path(path).result()
        except tinker.TinkerError as problem:
            found["unpublished"] = str(problem)
        exported = client.save_weights_external("out").result().path
        folder = weights.download(tinker_path=exported, output_dir="downloaded", base_url=url)
        found["downloaded"] = sorted(os.listdir(folder))
        found["refused"] = [
            failure(client.forward_backward([datum(prompt)], "stable_reinforce")),
            failure(service.create_lora_training_client("another/model")),
            failure(service.create_lora_training_client(base, rank=9999)),
        ]
    print(json.dumps(found))


main()
