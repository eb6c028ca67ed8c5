"""Classes of transformers that are not read, and what of them the decoder lacks."""

from collections.abc import Iterable, Mapping
from difflib import get_close_matches

_INDEXER = "its attention chooses keys by a sparse indexer"
_LAYER_NORM = "its norms subtract the mean (LayerNorm)"
_MAMBA = "its layers, or some of them, are state-space models (Mamba)"
_STATE = "its layers, or some of them, carry a state that the decoder does not compute"
_ENCODER = "it reads its prompt with an encoder"
_AFTER_ROPE = "it normalises queries and keys after they are rotated"
_BIDIRECTIONAL = "it was made to see both sides of a token"

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
    "it has norms inside attention and MLP, and weights of three values": (
        *("BitNetForCausalLM", "BitnetForCausalLM"),
    ),
    "its attention sees chunks of the context, and its norms of queries have no weights": (
        *("Llama4ForCausalLM", "Llama4ForConditionalGeneration"),
    ),
    "it reads bytes, not tokens": ("BltForCausalLM",),
}
REFUSED: Mapping[str, str] = {name: why for why, names in _REASONS.items() for name in names}


def refusal(architectures: Iterable[str], known: Iterable[str]) -> str:
    """Why a model of these classes, none of which is known, is not loaded: one sentence."""
    names, listed = tuple(architectures), sorted(known)
    if not names:
        return (
            f"architecture missing: config.json names none; {len(listed)} are known, such as "
            "LlamaForCausalLM and Qwen3ForCausalLM (docs/models.md lists them)."
        )
    for name in names:
        if name in REFUSED:
            return f"{name} is not supported: {REFUSED[name]}, which the decoder lacks."
    near = get_close_matches(names[0], listed, n=3, cutoff=0.8)
    such = near or ["LlamaForCausalLM", "Qwen3ForCausalLM"]
    return (
        f"architecture {', '.join(names)} is not supported; {len(listed)} are, "
        f"{'near it' if near else 'such as'} {' and '.join(such)} (docs/models.md lists them)."
    )
