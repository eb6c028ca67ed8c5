"""Use a server with TRL's clients of a vLLM server: `python with_trl_client.py URL MODEL_FOLDER`.

Run by an interpreter that has TRL. Prints the results as JSON. TRL imports the trainer's half of
the weight transfer from a package named `vllm`, here that of shim/. Without a card it joins the
server in a gloo group, so that real bytes travel.
"""
# pyright: reportMissingImports=false

import hashlib
import json
import sys
import threading
from pathlib import Path
from typing import Any

import requests
import torch
from accelerate import PartialState
from transformers import AutoConfig, AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parents[3] / "shim" / "src"))

URL, FOLDER = sys.argv[1:3]
PROMPTS = [[5, 6, 7], [8, 9]]

from trl.experimental.async_grpo.vllm_client import VLLMClient as AsyncClient  # noqa: E402
from trl.experimental.async_grpo.weight_transfer import WeightTransferClient  # noqa: E402
from trl.generation.vllm_client import VLLMClient  # noqa: E402
from vllm.utils.network_utils import get_open_port  # noqa: E402


def a_model(seed: int) -> Any:
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(FOLDER), dtype=torch.float32)


def checksums(model: Any) -> dict[str, str]:
    return {
        name: hashlib.sha256(parameter.detach().contiguous().numpy().tobytes()).hexdigest()
        for name, parameter in model.named_parameters()
    }


def compared(model: Any) -> dict[str, Any]:
    """Return the server's bitwise comparison with these weights."""
    body = {"action": "compare", "baseline": checksums(model)}
    return requests.post(f"{URL}/weight_checker", json=body).json()


def ours(body: dict[str, Any], path: str = "/v1/completions") -> Any:
    return requests.post(URL + path, json=body).json()


def sampling(client: VLLMClient) -> dict[str, Any]:
    seeded = {"seed": 3, "ignore_eos": True}
    chat = [[{"role": "user", "content": "Hi"}], [{"role": "user", "content": "Hey"}]]
    return {
        "generated": client.generate(PROMPTS, n=2, max_tokens=4, generation_kwargs=seeded),
        "best": client.generate(PROMPTS, n=1, max_tokens=4, logprobs=3, generation_kwargs=seeded),
        "texts": client.generate(["Hello", "Goodbye"], max_tokens=3),
        "without": client.generate(PROMPTS, max_tokens=2, logprobs=None)["logprobs"],
        "many": len(
            client.generate([[4, i] for i in range(3, 67)], n=8, max_tokens=1)["completion_ids"]
        ),
        "chatted": client.chat(chat, n=2, max_tokens=3),
        "scored": client.get_sequence_logprobs([[5, 6, 7, 8, 9]], [2], top_logprobs=100),
    }


def whole_update(client: VLLMClient) -> dict[str, Any]:
    client.init_communicator(torch.device("cuda"))  # its only use of the device is the type
    one, other = a_model(1), a_model(2)
    client.update_model_params(one)
    first = compared(one)
    with client.weight_update():  # tensor by tensor
        for name, parameter in other.named_parameters():
            client.update_named_param(name, parameter.data)
    client.reset_prefix_cache()
    client.close_communicator()
    return {"first": first, "second": compared(other)}


def update_in_flight() -> dict[str, Any]:
    """Update as AsyncGRPO does: requests pause and continue."""
    model, client = a_model(3), AsyncClient(URL)
    told = [
        (name, str(each.dtype).removeprefix("torch."), list(each.shape))
        for name, each in model.named_parameters()
    ]
    names, dtypes, shapes = (list(column) for column in zip(*told, strict=True))
    transfer = WeightTransferClient(
        client, {"names": names, "dtype_names": dtypes, "shapes": shapes}
    )
    transfer.init_weight_transfer()
    replies: list[Any] = []
    body = {
        "prompt": [5, 6, 7],
        "max_tokens": 400,
        "seed": 2**63 - 1,
        "logprobs": 0,
        "ignore_eos": True,
        "n": 1,
    }
    thread = threading.Thread(
        target=lambda: replies.append(ours(body | {"return_token_ids": True}))
    )
    thread.start()
    while not requests.get(f"{URL}/stats").json()["engine"]["num_running"]:
        assert thread.is_alive()
    transfer.pause()
    transfer.send_weights((name, parameter.data) for name, parameter in model.named_parameters())
    transfer.resume()
    thread.join(60)
    transfer.destroy()
    return {
        "weights": compared(model),
        "choice": replies[0]["choices"][0],
        "length": client.get_max_model_len(),
    }


torch.set_num_threads(1)
PartialState(cpu=True)  # TRL's logging requires it
client = VLLMClient(base_url=URL, group_port=get_open_port(), connection_timeout=10)
seen = {"info": client.get_server_info(), "model": client.model} | sampling(client)
seen |= {"updates": whole_update(client), "in_flight": update_in_flight()}
print(json.dumps(seen))
