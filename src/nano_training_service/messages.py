"""The client's JSON requests as pydantic models. Unknown fields are rejected by name, so that no
part of a request is silently ignored.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from nano_training_service.errors import Refused


class Message(BaseModel):
    """Base of all requests."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())
    type: str | None = None


# Seconds until a checkpoint expires. The bound keeps the date's year within four digits.
Lifetime = Annotated[int, Field(gt=0, le=10**10)]


class ClientConfig(Message):
    """Body of `/client/config` and `/client/dynamic_config`."""

    sdk_version: str


class CreateSession(Message):
    """Body of `/create_session`. `/sessions` reports its `display_name`."""

    tags: list[str] = []
    user_metadata: dict[str, Any] | None = None
    sdk_version: str = ""
    project_id: str | None = None
    display_name: str | None = None


class Heartbeat(Message):
    """Body of `/session_heartbeat`."""

    session_id: str


class FinishSession(Message):
    """Body of `/sessions/ID/finish`."""

    reason: dict[str, Any] = {}
    detail: str | None = None


class LoraConfig(Message):
    """Rank, seed and targets of an adapter."""

    rank: int
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class CreateModel(Message):
    """Body of `/create_model`."""

    session_id: str
    model_seq_id: int = Field(ge=0)
    base_model: str
    user_metadata: dict[str, Any] | None = None
    lora_config: LoraConfig | None = None
    optimizer_config: dict[str, Any] = {"type": "adamw"}


class ModelRequest(Message):
    """Request that contains only a model's id."""

    model_id: str


class Sequenced(ModelRequest):
    """Request with a sequence number in its model's order."""

    seq_id: int | None = None


class AdamParams(Message):
    """Hyperparameters of one step of AdamW."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)
    learning_rate: float = Field(1e-4, ge=0)
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.95, ge=0, lt=1)
    eps: float = Field(1e-12, ge=0)
    weight_decay: float = Field(0.0, ge=0)
    grad_clip_norm: float = Field(0.0, ge=0)


class OptimStep(Sequenced):
    """Body of `/optim_step`. `optimizer_params` belongs to other optimizers and is rejected."""

    adam_params: dict[str, Any] | None = None
    optimizer_params: dict[str, Any] | None = None


class SaveWeights(Sequenced):
    """Body of `/save_weights`."""

    path: str | None = None
    ttl_seconds: Lifetime | None = None
    overwrite: bool = False
    user_metadata: dict[str, str] | None = None


class SaveForSampler(Sequenced):
    """Body of `/save_weights_for_sampler`."""

    path: str | None = None
    sampling_session_seq_id: int | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"
    ttl_seconds: Lifetime | None = None
    user_metadata: dict[str, str] | None = None


class SaveExternal(Sequenced):
    """Body of `/save_weights_external`."""

    path: str
    ttl_seconds: Lifetime | None = None
    age_encryption_recipients: list[str] | None = None


class SetLifetime(Message):
    """Body of `.../checkpoints/ID/ttl`: seconds from now. None: forever."""

    ttl_seconds: Lifetime | None = None


class LoadWeights(Message):
    """Body of `/load_weights`: load into a model, or into a new model of a session."""

    model_id: str | None = None
    seq_id: int | None = None
    session_id: str | None = None
    model_seq_id: int | None = None
    base_model: str | None = None
    user_metadata: dict[str, Any] | None = None
    path: str
    optimizer: bool
    optimizer_config: dict[str, Any] | None = None
    weights_access_token: str | None = None


class CreateSamplingSession(Message):
    """Body of `/create_sampling_session`."""

    session_id: str
    sampling_session_seq_id: int
    base_model: str | None = None
    model_path: str | None = None


class JoinSamplingSession(Message):
    """Body of `/join_sampling_session`."""

    sampling_session_id: str


class SamplingParams(Message):
    """Sampling settings. `stop=None` stops at the end of sequence, `[]` only at `max_tokens`."""

    max_tokens: int | None = None
    seed: int | None = None
    stop: str | list[int] | list[str] | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0


class ModelInput(Message):
    """Chunks of a prompt. Only encoded text is supported."""

    chunks: list[dict[str, Any]]

    def tokens(self) -> list[int]:
        """Return all tokens. Raises `Refused` for other kinds of chunks and for invalid ids."""
        all_tokens: list[int] = []
        for chunk in self.chunks:
            kind, tokens = chunk.get("type", "encoded_text"), chunk.get("tokens")
            if kind != "encoded_text" or not isinstance(tokens, list):
                raise Refused(
                    f"the prompt contains a chunk of type {kind!r}; send encoded_text only."
                )
            if not all(type(each) is int for each in tokens):  # the engine also accepts chats
                raise Refused("the prompt contains values that are not token ids; send integers.")
            all_tokens += tokens
        return all_tokens


class Sample(Message):
    """Body of `/asample`."""

    num_samples: int = Field(1, ge=1)
    prompt: ModelInput
    sampling_params: SamplingParams
    base_model: str | None = None
    model_path: str | None = None
    sampling_session_id: str | None = None
    seq_id: int | None = None
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: int = Field(0, ge=0)
    topk_sample_logprobs: int = Field(0, ge=0)
    target_prompt_logprobs: dict[str, Any] | None = None
    prompt_alt_tokens_k: int = 0
    prompt_logprobs_last_n: int | None = None
    record_stability_info: bool | None = None


class RetrieveFuture(Message):
    """Body of `/retrieve_future`. `allow_metadata_only` has no effect: the service always sends
    the whole result.
    """

    request_id: str
    allow_metadata_only: bool = False


class CancelFuture(Message):
    """Body of `/cancel_future`."""

    request_id: str


class WeightsInfo(Message):
    """Body of `/weights_info`."""

    tinker_path: str
