"""The paths of the dialects: access and error bodies go by them."""

# They change or tell of the engine; for administrators.
CONTROL: frozenset[str] = frozenset(
    (
        # both dialects
        "/flush_cache",
        "/server_info",
        "/update_weight_version",
        "/update_weights",
        # vLLM
        "/abort_requests",
        "/finish_weight_update",
        "/get_world_size",
        "/init_weight_transfer_engine",
        "/is_paused",
        "/is_sleeping",
        "/pause",
        "/reset_prefix_cache",
        "/resume",
        "/shutdown_weight_transfer_engine",
        "/sleep",
        "/start_weight_update",
        "/wake_up",
        "/weight_checker",
        "/weight_info",
        # SGLang
        "/abort_request",
        "/begin_weight_update",
        "/continue_generation",
        "/destroy_weights_update_group",
        "/end_weight_update",
        "/get_model_info",
        "/get_server_info",
        "/get_weight_version",
        "/health_generate",
        "/init_weights_update_group",
        "/model_info",
        "/pause_generation",
        "/post_process_weights",
        "/pull_weights",
        "/release_memory_occupation",
        "/resume_memory_occupation",
        "/update_weights_from_disk",
        "/update_weights_from_distributed",
        "/update_weights_from_ipc",
        "/update_weights_from_tensor",
        "/v1/loads",
        "/weights_checker",
        # prime-rl and PipelineRL
        "/init_broadcaster",
        "/liveness",
        "/receive_weight_update",
    )
)
# They generate; for users.
GENERATION: frozenset[str] = frozenset(("/generate", "/inference/v1/generate"))
