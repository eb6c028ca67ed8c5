"""Unsupported architectures of transformers, and the missing feature of each."""

from collections.abc import Iterable, Mapping
from difflib import get_close_matches

_INDEXER = "its attention selects keys with a sparse indexer"
_LAYER_NORM = "its norms subtract the mean (LayerNorm)"
_MAMBA = "some or all of its layers are state-space models (Mamba)"
_STATE = "some or all of its layers carry a recurrent state of an unsupported kind"
_ENCODER = "it encodes the prompt with a separate encoder"
_AFTER_ROPE = "it normalizes queries and keys after rotary embedding"
_BIDIRECTIONAL = "its attention is bidirectional"

_REASONS: Mapping[str, tuple[str, ...]] = {
    _INDEXER: (
        *("AXK2ForCausalLM", "DeepseekV32ForCausalLM", "DeepseekV4ForCausalLM"),
        *("Dots3NoteForCausalLM", "Dots3NoteForConditionalGeneration", "GlmMoeDsaForCausalLM"),
        *("Glm5NextForCausalLM", "Glm5NextForConditionalGeneration", "HYV4ForCausalLM"),
        *("MiniMaxM3VLForCausalLM", "MiniMaxM3SparseForConditionalGeneration"),
        *("Qwen4ExpForCausalLM", "Qwen4ExpForConditionalGeneration"),
    ),
    _LAYER_NORM: (
        *("AyaVisionForConditionalGeneration", "BioGptForCausalLM", "BloomForCausalLM"),
        *("CodeGenForCausalLM", "Cohere2ForCausalLM", "Cohere2MoeForCausalLM"),
        *("Cohere2VisionForConditionalGeneration", "CohereForCausalLM", "CTRLLMHeadModel"),
        *("DbrxForCausalLM", "FalconForCausalLM", "FuyuForCausalLM", "GPT2LMHeadModel"),
        *("GPTBigCodeForCausalLM", "GPTJForCausalLM", "GPTNeoForCausalLM", "GPTNeoXForCausalLM"),
        *("GPTNeoXJapaneseForCausalLM", "Jais2ForCausalLM", "ModernBertDecoderForCausalLM"),
        *("MptForCausalLM", "NemotronForCausalLM", "OLMoForCausalLM", "OPTForCausalLM"),
        *("OlmoForCausalLM", "OpenAIGPTLMHeadModel", "PersimmonForCausalLM", "PhiForCausalLM"),
        *("PhimoeForCausalLM", "PhiMoEForCausalLM", "StableLmForCausalLM"),
        *("Starcoder2ForCausalLM", "XGLMForCausalLM"),
    ),
    _MAMBA: (
        *("BambaForCausalLM", "FalconH1ForCausalLM", "FalconMambaForCausalLM"),
        *("GraniteMoeHybridForCausalLM", "JambaForCausalLM", "Mamba2ForCausalLM"),
        *("MambaForCausalLM", "NemotronHForCausalLM", "NemotronH_Omni_Reasoning_V3"),
        *("Zamba2ForCausalLM", "ZambaForCausalLM"),
    ),
    _STATE: (
        *("BailingHybridForCausalLM", "KimiLinearForCausalLM", "MiniMaxForCausalLM"),
        *("OlmoHybridForCausalLM", "RecurrentGemmaForCausalLM", "RwkvForCausalLM"),
        "xLSTMForCausalLM",
    ),
    _AFTER_ROPE: ("HunYuanDenseV1ForCausalLM", "HunYuanMoEV1ForCausalLM"),
    _ENCODER: (
        *("BartForConditionalGeneration", "Florence2ForConditionalGeneration"),
        *("LongT5ForConditionalGeneration", "MBartForConditionalGeneration", "MarianMTModel"),
        *("MT5ForConditionalGeneration", "PegasusForConditionalGeneration"),
        *("SwitchTransformersForConditionalGeneration", "T5ForConditionalGeneration"),
        *("T5Gemma2ForConditionalGeneration", "T5GemmaForConditionalGeneration"),
        *("UMT5ForConditionalGeneration", "WhisperForConditionalGeneration"),
    ),
    _BIDIRECTIONAL: (
        *("BertLMHeadModel", "CamembertForCausalLM", "ElectraForCausalLM", "ErnieForCausalLM"),
        *("RobertaForCausalLM", "XLMRobertaForCausalLM", "XLNetLMHeadModel"),
    ),
    "its layers have several residual streams": (
        *("Gemma3nForCausalLM", "Gemma3nForConditionalGeneration"),
    ),
    "its attention subtracts one softmax from another": ("DiffLlamaForCausalLM",),
    "it has norms inside attention and MLP, and ternary weights": (
        *("BitNetForCausalLM", "BitnetForCausalLM"),
    ),
    "its attention is chunked, and its query norms have no weights": (
        *("Llama4ForCausalLM", "Llama4ForConditionalGeneration"),
    ),
    "it reads bytes, not tokens": ("BltForCausalLM",),
}
REFUSED: Mapping[str, str] = {name: why for why, names in _REASONS.items() for name in names}


def refusal(architectures: Iterable[str], known: Iterable[str]) -> str:
    """Return one sentence on why a model of these classes, all unknown, is not loaded."""
    names, listed = tuple(architectures), sorted(known)
    if not names:
        return (
            f"config.json names no architecture; {len(listed)} are supported, such as "
            "LlamaForCausalLM and Qwen3ForCausalLM (docs/models.md lists them)."
        )
    for name in names:
        if name in REFUSED:
            return f"{name} is not supported: {REFUSED[name]}, which is not implemented."
    near = get_close_matches(names[0], listed, n=3, cutoff=0.8)
    such = near or ["LlamaForCausalLM", "Qwen3ForCausalLM"]
    return (
        f"architecture {', '.join(names)} is not supported; {len(listed)} are, "
        f"{'the nearest' if near else 'such as'} {' and '.join(such)} (docs/models.md lists them)."
    )
