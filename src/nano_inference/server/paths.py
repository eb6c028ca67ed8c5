"""The paths of the dialects and of the page: access and error bodies go by them. Tests compare
them with the routes.
"""

# They change the engine or what it does; for administrators.
CHANGING: frozenset[str] = frozenset(
    (
        # both dialects
        "/flush_cache",
        "/update_weight_version",
        "/update_weights",
        # SGLang and prime-rl
        "/load_lora_adapter",
        # vLLM
        "/abort_requests",
        "/inference/v1/abort_requests",
        "/finish_weight_update",
        "/init_weight_transfer_engine",
        "/pause",
        "/reset_prefix_cache",
        "/resume",
        "/shutdown_weight_transfer_engine",
        "/sleep",
        "/start_weight_update",
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
        "/wake_up",
        "/weight_checker",
        # SGLang
        "/abort_request",
        "/begin_weight_update",
        "/continue_generation",
        "/destroy_weights_update_group",
        "/end_weight_update",
        "/get_weights_by_name",  # it changes nothing, and tells what the model is worth
        "/init_weights_update_group",
        "/load_lora_adapter_from_tensors",
        "/pause_generation",
        "/post_process_weights",
        "/pull_weights",
        "/release_memory_occupation",
        "/resume_memory_occupation",
        "/unload_lora_adapter",
        "/update_weights_from_disk",
        "/update_weights_from_distributed",
        "/update_weights_from_ipc",
        "/update_weights_from_tensor",
        "/weights_checker",
        # prime-rl and PipelineRL
        "/init_broadcaster",
        "/receive_weight_update",
    )
)
# They only tell; for users.
READING: frozenset[str] = frozenset(
    (
        "/get_model_info",
        "/get_server_info",
        "/get_weight_version",
        "/get_world_size",
        "/health_generate",
        "/is_paused",
        "/is_sleeping",
        "/model_info",
        "/server_info",
        "/v1/loads",
        "/weight_info",
    )
)
# It says that the engine lives, and nothing else; for whatever looks after processes.
OPEN: frozenset[str] = frozenset(("/liveness",))
# Their bodies hold a model's tensors.
WITH_WEIGHTS: frozenset[str] = frozenset(
    ("/load_lora_adapter_from_tensors", "/update_weights_from_tensor")
)
CONTROL = CHANGING | READING | OPEN
# The server's page: the same for all, so open to all; it asks for a key where a route wants one.
PAGE_FILES = (
    "api.js",
    "charts.js",
    "chat.css",
    "chat.js",
    "conversations.js",
    "dashboard.js",
    "docs.js",
    "dom.js",
    "icon.svg",
    "links.js",
    "main.js",
    "markdown.js",
    "messages.js",
    "samples.js",
    "server.js",
    "settings.js",
    "store.js",
    "style.css",
    "tips.js",
)
PAGE: frozenset[str] = frozenset(("/", "/docs", *(f"/page/{name}" for name in PAGE_FILES)))
# They generate; for users.
GENERATION: frozenset[str] = frozenset(("/generate", "/inference/v1/generate"))
