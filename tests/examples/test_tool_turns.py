"""The multi-turn rollout for TRL: true logprobs of every turn, and a mask over the tool's tokens."""

from examples.tool_turns import ToolTurns
from nano_inference import EngineConfig, InferenceEngine, SamplingParams


def test_tool_turns_return_true_logprobs_of_all_turns() -> None:
    config = EngineConfig("smollm2-135m", max_model_len=512, kv_cache_memory=2**27, device="cpu")
    with InferenceEngine(config) as engine:
        params = SamplingParams(max_tokens=8, seed=3)
        answers = iter(["7", "8", None, None, "9", None])
        rollout = ToolTurns(engine, lambda _: next(answers, None), params, max_turns=3)
        prompts = [[{"role": "user", "content": f"Add {n} and 4."}] for n in (1, 2)]
        fields = rollout(prompts, None)
        assert set(fields) == {"prompt_ids", "completion_ids", "logprobs", "env_mask"}
        for prompt, ids, logprobs, mask in zip(*fields.values(), strict=True):
            assert len(ids) == len(logprobs) == len(mask)
            assert 0 in mask
            assert mask[0] == mask[-1] == 1
            (scored,) = engine.generate(
                [*prompt, *ids], SamplingParams(max_tokens=1, prompt_logprobs=True)
            )
            assert scored.prompt_logprobs is not None
            rows = scored.prompt_logprobs[len(prompt) :]
            assert all(
                theirs == ours
                for theirs, ours, sampled in zip(rows, logprobs, mask, strict=True)
                if sampled
            )
