"""A `rollout_func` for TRL's `GRPOTrainer` with a PEFT adapter over HTTP. A server holds the model
and receives only the adapter's tensors, a few megabytes, after each optimizer step.

Any trainer can do the same: build the bytes with `PeftModel` and `safetensors`, and send one POST.
"""

import json
import time
import urllib.parse
import urllib.request
from typing import Any

from peft import get_peft_model_state_dict
from safetensors.torch import save

from nano_inference.rl.parameter_states import states
from nano_inference.rl.trl import group_by_prompt, mismatch, prompt_token_ids, sampling_params

BYTES, JSON = "application/octet-stream", "application/json"
# fields of PEFT's configuration that affect the product; the server rejects unsupported values
CONFIG = (
    *("peft_type", "r", "lora_alpha", "use_rslora", "alpha_pattern", "bias"),
    *("use_dora", "fan_in_fan_out", "lora_bias", "modules_to_save"),
)


class AdapterRollout:
    """Rollout function: completions of a server's model with the trainer's adapter, with logprobs.

    Args:
        url: URL of a server with `--rl --max-loras 1`.
        name: Name of the adapter on the server.
    """

    def __init__(self, url: str, name: str = "policy") -> None:
        self.url, self.name = url, name
        self._synced: Any = None
        self._version = 0
        self.sent_bytes = 0  # size of the last update

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        token_ids = prompt_token_ids(prompts, trainer)
        params = sampling_params(trainer)
        params["stop_token_ids"] = sorted(params["stop_token_ids"])
        began = time.perf_counter()
        self.sync(trainer)
        synced = time.perf_counter()
        found: dict[int, Any] = {}
        mode, step = "train" if trainer.model.training else "eval", trainer.state.global_step
        for number, group in enumerate(group_by_prompt(token_ids)):
            seed = hash((trainer.args.seed, mode == "eval", step, number)) % 2**63
            told = params | {"n": len(group.places), "seed": seed, "logprobs": 1}
            found |= zip(group.places, self._generate(group.token_ids, told), strict=True)
        ended = time.perf_counter()
        choices = [found[place] for place in range(len(prompts))]
        completions = [choice["token_ids"] for choice in choices]
        logprobs = [choice["token_logprobs"] for choice in choices]
        figures = {
            "rollout/sync_seconds": synced - began,
            "rollout/generate_seconds": ended - synced,
        }
        figures |= mismatch(trainer, token_ids, completions, logprobs)
        for name, value in figures.items():
            trainer._metrics[mode][name].append(value)
        return {
            "prompt_ids": token_ids,
            "completion_ids": completions,
            "logprobs": logprobs,
            "weight_version": [self._version] * len(prompts),
        }

    def sync(self, trainer: Any) -> bool:
        """Send the adapter as a new version if it has changed. Return True if it was sent."""
        model = trainer.accelerator.unwrap_model(trainer.model)
        now = states([param for param in model.parameters() if param.requires_grad])
        if now == self._synced:
            return False
        config = model.peft_config[model.active_adapter].to_dict()
        told = {name: config[name] for name in CONFIG if config.get(name)}
        tensors = get_peft_model_state_dict(model, adapter_name=model.active_adapter)
        content = save({name: each.detach().contiguous() for name, each in tensors.items()})
        where = {"lora_name": self.name, "config_dict": json.dumps(told)}
        path = "/load_lora_adapter_from_tensors?" + urllib.parse.urlencode(where)
        self._version = self._post(path, content, BYTES)["version"]
        self._synced, self.sent_bytes = now, len(content)
        return True

    def _generate(self, prompt: tuple[int, ...], params: dict[str, Any]) -> list[Any]:
        asked = {"model": self.name, "token_ids": list(prompt), "sampling_params": params}
        asked["flat_logprobs"] = "list"
        content = json.dumps(asked).encode()
        return self._post("/inference/v1/generate", content, JSON)["choices"]

    def _post(self, path: str, content: bytes, kind: str) -> Any:
        asked = urllib.request.Request(self.url + path, content, {"content-type": kind})
        with urllib.request.urlopen(asked, timeout=600) as reply:
            return json.loads(reply.read())
